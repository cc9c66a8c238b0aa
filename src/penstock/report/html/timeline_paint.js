// Painting a timeline: solid bars were measured, hatched bars are predicted.

function timelineInks(element) {
  const style = getComputedStyle(element);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(["ink", "quiet", "line", "paper", "compute"].map((name) => [name, read(name)]));
}

// Diagonal lines in one colour on the paper's: the mark of a prediction.
function hatching(pen, colour, paper) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const brush = tile.getContext("2d");
  brush.fillStyle = paper;
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = colour;
  brush.lineWidth = 1.6;
  for (const shift of [-6, 0, 6]) {
    brush.beginPath();
    brush.moveTo(shift, 6);
    brush.lineTo(shift + 6, 0);
    brush.stroke();
  }
  return pen.createPattern(tile, "repeat");
}

function paintTimeline(pen, view, width, height) {
  const inks = timelineInks(view.canvas);
  const hatched = {}; // by colour
  pen.clearRect(0, 0, width, height);
  pen.font = `11px ${getComputedStyle(view.canvas).fontFamily}`;
  pen.textBaseline = "middle";
  paintTimeAxis(pen, view, inks, width, height);
  view.rows.forEach((row, index) => {
    const y = AXIS_HEIGHT + index * (LANE_HEIGHT + LANE_GAP);
    pen.fillStyle = row.heading ? inks.ink : inks.quiet;
    pen.fillText(row.heading || row.lane, 0, y + LANE_HEIGHT / 2, row.heading ? width : view.labelWidth - 6);
    if (row.spans) paintSpans(pen, view, row, y, inks, hatched);
  });
}

function paintTimeAxis(pen, view, inks, width, height) {
  const ticks = linearTicks([view.from, view.to], Math.max(2, Math.floor(view.plotWidth / 90)));
  pen.strokeStyle = inks.line;
  pen.fillStyle = inks.quiet;
  for (const tick of ticks) {
    const x = view.x(tick);
    pen.beginPath();
    pen.moveTo(x, AXIS_HEIGHT - 4);
    pen.lineTo(x, height);
    pen.stroke();
    const label = formatSeconds(tick);
    pen.fillText(label, Math.min(x, width - pen.measureText(label).width - 1), 8);
  }
}

function paintSpans(pen, view, row, y, inks, hatched) {
  const predicted = row.how === "predicted";
  for (const span of row.spans) {
    const left = Math.max(view.x(span.start_seconds), view.labelWidth);
    const right = Math.min(view.x(span.end_seconds), view.labelWidth + view.plotWidth);
    if (right < view.labelWidth || left > view.labelWidth + view.plotWidth || right - left < 0) continue;
    const wide = Math.max(right - left, 0.5);
    const colour = row.lane === "compute" ? inks.compute : view.colours[bucketOf(span)];
    if (predicted) hatched[colour] = hatched[colour] || hatching(pen, colour, inks.paper);
    pen.fillStyle = predicted ? hatched[colour] : colour;
    pen.fillRect(left, y, wide, LANE_HEIGHT);
    if (wide < 4) continue;
    pen.strokeStyle = predicted ? colour : inks.paper;
    pen.strokeRect(left + 0.5, y + 0.5, wide - 1, LANE_HEIGHT - 1);
    if (wide > 40) paintSpanName(pen, span.name, left, y, wide, predicted, inks);
  }
}

function paintSpanName(pen, name, left, y, wide, predicted, inks) {
  pen.save();
  pen.beginPath();
  pen.rect(left + 2, y, wide - 4, LANE_HEIGHT);
  pen.clip();
  const width = pen.measureText(name).width;
  if (predicted) {
    pen.fillStyle = inks.paper;
    pen.fillRect(left + 3, y + 3, width + 4, LANE_HEIGHT - 6);
  }
  pen.fillStyle = predicted ? inks.ink : inks.paper;
  pen.fillText(name, left + 5, y + LANE_HEIGHT / 2 + 0.5);
  pen.restore();
}
