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

function drawCurves(element, series, xAxis, label) {
  const all = series.flatMap((one) => [...one.points, ...one.raw]);
  if (!all.length) return;
  const bounds = extent(all.map(([, y]) => y));
  const slack = 0.05 * (bounds[1] - bounds[0] || 1);
  const y = { domain: [bounds[0] - slack, bounds[1] + slack], format: (v) => significant(v) };
  const x = { ...xAxis, domain: [0, extent(all.map(([value]) => value))[1] || 1] };
  drawWithin(element, (width) => {
    const chart = frame(width, 260, x, y, label);
    for (const { raw, index } of series) {
      chart.plot.append(svg("path", { class: "raw", d: pathThrough(raw, chart.x, chart.y), stroke: colourOf(index) }));
    }
    for (const { points, index, dots } of series) {
      const line = { class: "curve", d: pathThrough(points, chart.x, chart.y), stroke: colourOf(index), "stroke-dasharray": dashOf(index) };
      chart.plot.append(svg("path", line));
      if (dots) chart.plot.append(...points.filter(([, v]) => v !== null).map(([px, py]) => svg("circle", { cx: chart.x(px), cy: chart.y(py), r: 2.5, fill: colourOf(index) })));
    }
    return chart.root;
  });
}

function drawAllCurves(report) {
  const axes = { step: { label: "steps" }, seconds: { label: "seconds of training", format: (v) => `${v} s` } };
  byId("curves-legend").replaceChildren(legend(report.runs.map((run) => run.name)));
  for (const [axis, settings] of Object.entries(axes)) {
    drawCurves(byId(`loss-by-${axis}`), lossSeries(report.runs, axis), settings, `training loss against ${settings.label}`);
    drawCurves(byId(`metric-by-${axis}`), metricSeries(report.runs, axis), settings, `${report.metric_title} against ${settings.label}`);
  }
  byId("metric-title").textContent = report.metric_title;
}
