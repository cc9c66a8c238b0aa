// Scales, ticks and a frame for line charts.

function linearScale(domain, range) {
  const span = domain[1] - domain[0] || 1;
  const scale = (value) => range[0] + ((value - domain[0]) / span) * (range[1] - range[0]);
  return Object.assign(scale, { ticks: (count) => linearTicks(domain, count) });
}

function log2Scale(domain, range) {
  const inner = linearScale(domain.map(Math.log2), range);
  const scale = (value) => inner(Math.log2(value));
  return Object.assign(scale, { ticks: (count) => powersOfTwo(domain, count) });
}

function linearTicks([low, high], count) {
  const raw = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
}

function powersOfTwo([low, high], count) {
  const all = [];
  for (let value = 2 ** Math.ceil(Math.log2(low)); value <= high; value *= 2) all.push(value);
  const every = Math.ceil(all.length / Math.max(count, 1));
  return all.filter((_, index) => index % every === 0);
}

const MARGIN = { left: 52, right: 12, top: 10, bottom: 40 };

// An empty chart with axes: {root, plot, x, y}. `x` and `y` are {domain, label, format, scale}.
function frame(width, height, x, y, label) {
  const right = width - MARGIN.right;
  const bottom = height - MARGIN.bottom;
  const xScale = (x.scale || linearScale)(x.domain, [MARGIN.left, right]);
  const yScale = (y.scale || linearScale)(y.domain, [bottom, MARGIN.top]);
  const format = (axis) => axis.format || ((value) => String(value));
  const horizontal = yScale.ticks(5).map((tick) => [
    svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: yScale(tick), y2: yScale(tick) }),
    svg("text", { class: "tick", x: MARGIN.left - 6, y: yScale(tick), "text-anchor": "end", dy: "0.32em" }, format(y)(tick)),
  ]);
  const vertical = xScale.ticks(Math.max(2, Math.floor(width / 90))).map((tick) =>
    svg("text", { class: "tick", x: xScale(tick), y: bottom + 16, "text-anchor": "middle" }, format(x)(tick)));
  const plot = svg("g", {});
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    horizontal,
    svg("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }),
    vertical,
    svg("text", { class: "axis-label", x: (MARGIN.left + right) / 2, y: height - 6, "text-anchor": "middle" }, x.label),
    plot);
  return { root, plot, x: xScale, y: yScale };
}

// The path through points [[x, y], ...]; a null y breaks it.
function pathThrough(points, x, y) {
  let pen = "M";
  const parts = [];
  for (const [px, py] of points) {
    if (py === null) pen = "M";
    else {
      parts.push(`${pen}${x(px).toFixed(2)},${y(py).toFixed(2)}`);
      pen = "L";
    }
  }
  return parts.join("");
}

function extent(values) {
  const finite = values.filter((value) => value !== null && Number.isFinite(value));
  return finite.length ? [Math.min(...finite), Math.max(...finite)] : [0, 1];
}
