// The table of methods, the sentence on top, and the colour of each method.

const COLOURS = 7;
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "5 2", "1 3", "12 4"];

function colourOf(index) {
  return `var(--method-${index % COLOURS})`;
}

function dashOf(index) {
  return DASHES[index % DASHES.length];
}

// The stroke of the index-th curve, to stand beside its name.
function stroke(index) {
  const line = { x1: 0, x2: 28, y1: 5, y2: 5, class: "curve", stroke: colourOf(index), "stroke-dasharray": dashOf(index) };
  return svg("svg", { class: "stroke", width: 28, height: 10, "aria-hidden": "true" }, svg("line", line));
}

function legend(names) {
  return html("ul", { class: "legend" }, names.map((name, index) => html("li", {}, stroke(index), name)));
}

function verdict(method) {
  if (method.is_baseline) return "what the others are compared with";
  return method.loses.length ? method.loses.join("; ") : "";
}

function methodColumns(report) {
  const several = new Set(report.methods.map((method) => method.group)).size > 1;
  return [
    { title: "method", cell: (m) => m.name },
    several ? { title: "run", cell: (m) => m.group } : null,
    { title: report.metric_title, cell: (m) => formatNumber(m.metric), numeric: true },
    { title: "time per iteration", cell: (m) => formatSeconds(m.iteration_seconds), numeric: true },
    { title: "speed-up", cell: (m) => formatTimes(m.speedup), numeric: true },
    { title: "samples per second", cell: (m) => formatNumber(m.samples_per_second), numeric: true },
    { title: "sent per worker and iteration", cell: (m) => formatBytes(m.bytes_per_iteration), numeric: true },
    { title: "of the dense bytes", cell: (m) => formatPercent(m.ratio), numeric: true },
    { title: "loses where", cell: verdict },
  ].filter(Boolean);
}

function drawMethods(report) {
  const mark = (method) => (method.is_baseline ? "baseline" : method.loses.length ? "loses" : null);
  byId("summary").replaceChildren(...report.summary.map((line) => html("li", {}, line)));
  byId("methods-table").replaceChildren(table(methodColumns(report), report.methods, mark));
}
