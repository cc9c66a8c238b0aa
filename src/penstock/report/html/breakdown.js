// What one iteration is made of: computation, communication that it hides, and communication that it does not.

const BAR = 20;

// One bar: computation, then exposed communication; hidden communication as a thin line below the computation.
function breakdownBar(scale, width, parts) {
  const { compute_seconds: compute, exposed_seconds: exposed } = parts;
  const hidden = Math.min(parts.hidden_seconds || 0, compute);
  const rect = (kind, from, to, y, height) =>
    svg("rect", { class: kind, x: scale(from), y, width: Math.max(0, scale(to) - scale(from)), height });
  return svg("svg", { width, height: BAR + 6, viewBox: `0 0 ${width} ${BAR + 6}`, "aria-hidden": "true" },
    rect("compute", 0, compute, 0.5, BAR - 1),
    rect("exposed", compute, compute + exposed, 0.5, BAR - 1),
    rect("hidden", compute - hidden, compute, BAR, 5));
}

function breakdownText(parts) {
  const whole = formatSeconds(parts.compute_seconds + parts.exposed_seconds);
  const hidden = parts.hidden_seconds === null ? "" : `; hidden ${formatSeconds(parts.hidden_seconds)}`;
  return `${whole} = computation ${formatSeconds(parts.compute_seconds)} + exposed ${formatSeconds(parts.exposed_seconds)}${hidden}`;
}

// A labelled bar; the words stand above it, so that nothing is cut off on a phone.
function barRow(title, text, bar, kind = null) {
  return html("div", { class: kind ? `bar-row ${kind}` : "bar-row" },
    html("span", { class: "bar-label" }, html("strong", {}, title), text), bar);
}

function breakdownRows(report) {
  return report.methods.flatMap((method) => [
    method.predicted && { title: `${method.name}, predicted`, parts: method.predicted, predicted: true },
    method.measured && { title: `${method.name}, measured`, parts: method.measured, predicted: false },
  ]).filter(Boolean);
}

function drawBreakdown(report) {
  const rows = breakdownRows(report);
  byId("breakdown").hidden = !rows.length;
  if (!rows.length) return;
  const longest = Math.max(...rows.map(({ parts }) => parts.compute_seconds + parts.exposed_seconds)) || 1;
  drawWithin(byId("breakdown-bars"), (width) => {
    const scale = linearScale([0, longest], [0, width - 2]);
    return html("div", {}, rows.map(({ title, parts, predicted }) =>
      barRow(title, breakdownText(parts), breakdownBar(scale, width, parts), predicted ? "predicted" : "measured")));
  });
}
