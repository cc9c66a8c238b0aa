// One iteration, lane by lane and rank by rank: predicted above measured on one time axis, to be zoomed and dragged.

const LANE_HEIGHT = 18;
const LANE_GAP = 3;
const AXIS_HEIGHT = 22;
const LANES = ["compute", "network", "push", "pull", "computation", "communication"]; // from the top

// The bucket that a span is about: "name: send to 2" is about "name".
function bucketOf(span) {
  return span.name.split(": ")[0];
}

// Rows {how, rank, lane, spans} from the top; a heading row has no spans.
function timelineRows(timeline) {
  const rows = [];
  for (const how of ["predicted", "measured"]) {
    const spans = timeline[how] || [];
    for (const rank of [...new Set(spans.map((span) => span.rank))].sort((a, b) => a - b)) {
      const mine = spans.filter((span) => span.rank === rank);
      rows.push({ how, rank, heading: `${how}, rank ${rank}` });
      const order = (lane) => (LANES.includes(lane) ? LANES.indexOf(lane) : LANES.length);
      const lanes = [...new Set(mine.map((span) => span.lane))].sort((a, b) => order(a) - order(b));
      for (const lane of lanes) {
        rows.push({ how, rank, lane, spans: mine.filter((span) => span.lane === lane) });
      }
    }
  }
  return rows;
}

class TimelineView {
  // colours: of each bucket, by its name.
  constructor(canvas, status, colours) {
    Object.assign(this, { canvas, status, colours, rows: [], end: 1, from: 0, to: 1, hovered: null });
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerup", () => { this.grabbed = null; });
    canvas.addEventListener("pointercancel", () => { this.grabbed = null; });
    canvas.addEventListener("dblclick", () => this.show(0, this.end));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  load(timeline) {
    this.rows = timelineRows(timeline);
    const ends = this.rows.flatMap((row) => (row.spans || []).map((span) => span.end_seconds));
    this.end = Math.max(...ends, 1e-9);
    this.show(0, this.end);
  }

  // Show the seconds from..to, kept inside the iteration and at least a millionth of it long.
  show(from, to) {
    const length = Math.min(Math.max(to - from, this.end * 1e-6), this.end);
    this.from = Math.min(Math.max(from, 0), this.end - length);
    this.to = this.from + length;
    this.draw();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  pan(share) {
    const shift = share * (this.to - this.from);
    this.show(this.from + shift, this.to + shift);
  }

  get labelWidth() {
    return this.canvas.clientWidth < 520 ? 66 : 110;
  }

  get plotWidth() {
    return this.canvas.clientWidth - this.labelWidth;
  }

  x(seconds) {
    return this.labelWidth + ((seconds - this.from) / (this.to - this.from)) * this.plotWidth;
  }

  secondsAt(x) {
    return this.from + ((x - this.labelWidth) / this.plotWidth) * (this.to - this.from);
  }

  onWheel(event) {
    const whole = this.to - this.from >= this.end;
    if (event.deltaY > 0 && whole) return; // nothing left to zoom out of: let the page scroll
    event.preventDefault();
    this.zoom(Math.exp(event.deltaY * 0.002), this.secondsAt(event.offsetX));
  }

  onDown(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.grabbed = { x: event.offsetX, from: this.from };
  }

  onMove(event) {
    if (this.grabbed) {
      const shift = ((this.grabbed.x - event.offsetX) / this.plotWidth) * (this.to - this.from);
      this.show(this.grabbed.from + shift, this.grabbed.from + shift + (this.to - this.from));
    }
    this.describe(event.offsetX, event.offsetY);
  }

  onKey(event) {
    const actions = {
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.7), "=": () => this.zoom(0.7),
      "-": () => this.zoom(1 / 0.7), 0: () => this.show(0, this.end),
    };
    if (actions[event.key]) {
      event.preventDefault();
      actions[event.key]();
    }
  }

  // Say in words what lies under the pointer.
  describe(x, y) {
    const row = this.rows[Math.floor((y - AXIS_HEIGHT) / (LANE_HEIGHT + LANE_GAP))];
    const now = this.secondsAt(x);
    const slack = (this.to - this.from) / this.plotWidth;
    const span = row && row.spans && row.spans.find((one) => one.start_seconds - slack <= now && now <= one.end_seconds + slack);
    if (!span) return;
    const times = `${formatSeconds(span.start_seconds)} to ${formatSeconds(span.end_seconds)}`;
    this.status.textContent = `${row.how}, rank ${row.rank}, ${row.lane}: ${span.name}, ${times} (${formatSeconds(span.end_seconds - span.start_seconds)})`;
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    const height = AXIS_HEIGHT + this.rows.length * (LANE_HEIGHT + LANE_GAP);
    if (!width || !this.rows.length) return;
    const ratio = window.devicePixelRatio || 1;
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    paintTimeline(pen, this, width, height);
  }
}
