// Loss and metric of every method, against steps and against seconds.

// The mean of the last `width` values at each point: training loss is noisy, and the trend is what is compared.
function smooth(points, width) {
  const kept = [];
  let sum = 0;
  return points.map(([x, y]) => {
    if (y === null) return [x, null];
    kept.push(y);
    sum += y;
    if (kept.length > width) sum -= kept[kept.length - 1 - width];
    return [x, sum / Math.min(kept.length, width)];
  });
}

function lossSeries(runs, axis) {
  return runs.map((run, index) => {
    const raw = run.steps.map((step) => [step[axis], step.loss]);
    return { index, raw, points: smooth(raw, Math.max(1, Math.round(raw.length / 40))) };
  });
}

function metricSeries(runs, axis) {
  return runs.map((run, index) => ({ index, raw: [], points: run.evaluations.map((e) => [e[axis], e.metric]), dots: true }));
}

function curveChart(width, series, xAxis, label) {
  const all = series.flatMap((one) => [...one.points, ...one.raw]);
  if (!all.length) return html("p", {}, "Nothing was recorded.");
  const bounds = extent(all.map(([, y]) => y));
  const slack = 0.05 * (bounds[1] - bounds[0] || 1);
  const y = { domain: [bounds[0] - slack, bounds[1] + slack], format: (v) => significant(v) };
  const x = { ...xAxis, domain: [0, extent(all.map(([value]) => value))[1] || 1] };
  const chart = frame(width, 260, x, y, label);
  const path = (kind, points, index, more) =>
    svg("path", { class: kind, d: pathThrough(points, chart.x, chart.y), stroke: colourOf(index), ...more });
  chart.plot.append(...series.map(({ raw, index }) => path("raw", raw, index)));
  chart.plot.append(...series.map(({ points, index }) => path("curve", points, index, { "stroke-dasharray": dashOf(index) })));
  for (const { points, index, dots } of series) {
    const seen = dots ? points.filter(([, value]) => value !== null) : [];
    chart.plot.append(...seen.map(([px, py]) => svg("circle", { cx: chart.x(px), cy: chart.y(py), r: 2.5, fill: colourOf(index) })));
  }
  return chart.root;
}

const CURVE_AXES = { step: { label: "steps" }, seconds: { label: "seconds of training", format: (v) => `${v} s` } };

// Runs of one group share axes: the losses of different tasks cannot be compared.
function drawAllCurves(report) {
  const groups = [...new Set(report.runs.map((run) => run.group))];
  let shown = [];
  const redraws = Object.entries(CURVE_AXES).flatMap(([axis, settings]) => [
    drawWithin(byId(`loss-by-${axis}`), (width) => curveChart(width, lossSeries(shown, axis), settings, `training loss against ${settings.label}`)),
    drawWithin(byId(`metric-by-${axis}`), (width) => curveChart(width, metricSeries(shown, axis), settings, `metric against ${settings.label}`)),
  ]);
  const show = (index) => {
    shown = report.runs.filter((run) => run.group === groups[index]);
    byId("curves-legend").replaceChildren(legend(shown.map((run) => run.name)));
    byId("metric-title").textContent = shown[0].metric_title;
    redraws.forEach((redraw) => redraw());
  };
  byId("curves-choice").replaceChildren(...[chooser("Runs of", groups, show)].filter(Boolean));
  show(0);
}
