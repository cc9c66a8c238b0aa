// What if there were more workers, a faster network, another codec? The same arithmetic as `penstock simulate`.

const COMPARED = ["wfbp", "threshold", "greedy", "exact"];
const TITLES = { wfbp: "wfbp: every tensor alone", threshold: "threshold: as stock DDP", greedy: "greedy: as published", exact: "exact: the optimum" };
const CHART_WORKERS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048];

// The network at these slider positions; lines measured on the real one hold only where it is left as it was measured.
function networkAt(network, alphaStop, rateStop) {
  if (alphaStop.fitted && rateStop.fitted) return network;
  const { all_reduce: _measured, ...rest } = network;
  const beta = rateStop.fitted ? network.beta_seconds_per_byte : 1 / rateStop.value;
  return { ...rest, alpha_seconds: alphaStop.value, beta_seconds_per_byte: beta, source: "a what-if of the report" };
}

// Every way through a codec: by the strategies that have a closed form, and as measured.
function packedRoutes(network) {
  const modelled = Object.keys(network.codecs || {}).flatMap((codec) => Object.keys(COMPRESSED).map((strategy) => `${strategy}+${codec}`));
  return [...new Set([...modelled, ...Object.keys(network.all_reduce || {}).filter((route) => route.includes("+"))])];
}

// What is compared: the planners on the dense way; with a codec, the optimum over the compressed way and over both.
function whatIfLines(strategy, packed) {
  const dense = COMPARED.map((planner) => ({ title: TITLES[planner], planner, routes: [strategy] }));
  if (!packed) return dense;
  return [...dense,
    { title: `exact, all by ${packed}`, planner: "exact", routes: [packed] },
    { title: `exact, ${packed} where it pays`, planner: "exact", routes: [strategy, packed] }];
}

function whatIfRow(model, network, line, p) {
  const ways = line.routes.map((route) => wayFor(network, route, p));
  return ways.includes(null) ? null : { title: line.title, ...simulateRow(model, line.planner, ways, p) };
}

class WhatIf {
  constructor(report) {
    this.report = report;
    this.choose(0);
  }

  choose(index) {
    const subject = this.report.what_if.models[index];
    Object.assign(this, { subject, model: modelOf(subject.trace), strategy: subject.strategy, packed: null });
    this.workers = { value: subject.workers, fitted: true };
    this.latency = { value: subject.network.alpha_seconds, fitted: true };
    this.rate = { value: 1 / subject.network.beta_seconds_per_byte, fitted: true };
    this.build();
    this.redraw ??= drawWithin(byId("whatif-chart"), (width) => this.chart(width));
    this.update();
  }

  get network() {
    return networkAt(this.subject.network, this.latency, this.rate);
  }

  get lines() {
    return whatIfLines(this.strategy, this.packed);
  }

  rowsAt(p) {
    return this.lines.map((line) => whatIfRow(this.model, this.network, line, p));
  }

  build() {
    const { subject } = this;
    const set = (name) => (stop) => { this[name] = stop; this.update(); };
    const models = this.report.what_if.models;
    byId("whatif-controls").replaceChildren(...[
      chooser("Model", models.map((model) => model.label), (index) => this.choose(index)),
      slider("whatif-workers", "Workers", stopsAround(workerCounts(), subject.workers), (v) => `${v}`, set("workers")),
      slider("whatif-rate", "Bandwidth of a link", stopsAround(decades(7, 11, [1, 1.25, 2.5, 5]), this.rate.value), formatRate, set("rate")),
      slider("whatif-latency", "Latency of a message", stopsAround(decades(-7, -2, [1, 2, 5]), this.latency.value), formatSeconds, set("latency")),
      this.selects(),
    ].filter(Boolean));
  }

  selects() {
    const codecs = [null, ...packedRoutes(this.subject.network)];
    const dense = Object.keys(this.subject.network.all_reduce || {}).filter((route) => !route.includes("+"));
    const strategies = [...new Set([...Object.keys(ALL_REDUCE), ...dense])];
    const select = (id, label, names, chosen, change) =>
      html("label", { class: "chooser", for: id }, label, " ",
        html("select", { id, onchange: (event) => { change(event.target.value); this.update(); } },
          names.map((name, index) => html("option", { value: index, selected: name === chosen ? "" : null }, name))));
    return html("div", { class: "choosers" },
      select("whatif-codec", "Codec", codecs.map((codec) => codec || "none"), "none", (at) => { this.packed = codecs[at]; }),
      select("whatif-strategy", "All-reduce", strategies, this.strategy, (at) => { this.strategy = strategies[at]; }));
  }

  update() {
    this.redraw();
    byId("whatif-table").replaceChildren(whatIfTable(this.lines, this.rowsAt(this.workers.value)));
    byId("whatif-note").textContent = this.note();
    byId("whatif-command").replaceChildren(...this.command());
  }

  // What cannot be drawn, and why.
  note() {
    const { network } = this.subject;
    const unknown = [this.strategy, this.packed].filter((route) => route && !wayFor(network, route, network.workers + 1));
    if (!unknown.length) return "";
    return `${unknown.join(" and ")}: no closed form; known only as measured, with ${network.workers} workers on this network.`;
  }

  // The same question on the command line, with the files that it needs.
  command() {
    const link = (name, document) => html("a", { download: name, href: `data:application/json,${encodeURIComponent(JSON.stringify(document))}` }, name);
    const files = () => [link("trace.json", this.subject.trace), " --network ", link("network.json", this.network)];
    const workers = ` --workers ${this.workers.value}`;
    const line = (verb, routes, rest) => html("div", {}, `penstock ${verb} `, files(), `${workers} --all-reduce ${routes}${rest}`);
    const dense = line("simulate", this.strategy, ` --planners ${COMPARED.join(",")}`);
    if (!this.packed) return [dense];
    return [dense, line("simulate", this.packed, " --planners exact"), line("plan", `${this.strategy},${this.packed}`, " --planner exact")];
  }

  chart(width) {
    const x = { domain: [1, 2048], scale: log2Scale, label: "workers" };
    const chart = frame(width, CHART_HEIGHT, x, { domain: [0, 1], format: (v) => `${Math.round(100 * v)} %` }, "scaling efficiency against workers, predicted");
    const at = chart.x(this.workers.value);
    chart.plot.append(svg("line", { class: "marker", x1: at, x2: at, y1: chart.y(0), y2: chart.y(1) }));
    const counts = [...new Set([...CHART_WORKERS, this.workers.value])].sort((a, b) => a - b);
    const drawn = this.lines.map((line, index) => {
      const rows = counts.map((p) => [p, whatIfRow(this.model, this.network, line, p)]);
      const points = rows.map(([p, row]) => [p, row ? row.efficiency : null]);
      const path = pathThrough(points, chart.x, chart.y);
      chart.plot.append(svg("path", { class: "curve predicted", d: path, stroke: colourOf(index), "stroke-dasharray": dashOf(index) }));
      return points.filter(([, value]) => value !== null).map(([p, value]) => [chart.x(p), chart.y(value)]);
    });
    chart.plot.append(...this.measuredDots(chart, drawn, width));
    return chart.root;
  }

  // What the runs really reached, at their own number of workers; faint where the sliders left the measured network.
  measuredDots(chart, curves, width) {
    const here = this.latency.fitted && this.rate.fitted;
    const kind = here ? "measured-dot" : "measured-dot faint";
    const taken = []; // boxes of labels
    return [...this.subject.measured].sort((a, b) => b.efficiency - a.efficiency).flatMap(({ name, workers, efficiency }) => {
      const dot = { x: chart.x(workers), y: chart.y(efficiency) };
      const text = `${name}, measured: ${formatPercent(efficiency)}`;
      const box = placeLabel(dot, LETTER * text.length, curves, taken, width);
      const near = box && Math.abs(box.y + LABEL_HEIGHT / 2 - dot.y) < LABEL_HEIGHT;
      const circle = svg("circle", { class: kind, cx: dot.x, cy: dot.y, r: 4.5 }, svg("title", {}, text));
      if (!box) return [circle]; // the table of methods has it
      taken.push(box);
      const middle = box.y + LABEL_HEIGHT / 2;
      const side = box.x > dot.x ? box.x - 3 : box.x + box.width + 3;
      const leader = near ? [] : [svg("line", { class: "leader", x1: dot.x, y1: dot.y, x2: side, y2: middle })];
      return [...leader, circle, svg("text", { class: kind, x: box.x, y: middle, dy: "0.32em" }, text)];
    });
  }
}

const CHART_HEIGHT = 300, LABEL_HEIGHT = 15, LETTER = 7.2; // pixels; a letter is not wider on average

// The place nearest to a dot where a label of this width meets no curve, no other label and no edge; null: nowhere.
function placeLabel(dot, wide, curves, taken, width) {
  const rows = [];
  for (let y = MARGIN.top; y + LABEL_HEIGHT < CHART_HEIGHT - MARGIN.bottom; y += 3) rows.push(y);
  const columns = [dot.x + 9, dot.x - 9 - wide].filter((x) => x > MARGIN.left && x + wide < width - MARGIN.right);
  const boxes = columns.flatMap((x) => rows.map((y) => ({ x, y, width: wide, height: LABEL_HEIGHT })));
  const far = (box) => Math.abs(box.y + LABEL_HEIGHT / 2 - dot.y) + (box.x < dot.x ? 1 : 0);
  const free = (box) => !taken.some((other) => meet(box, other)) && !curves.some((points) => crosses(box, points));
  return boxes.sort((a, b) => far(a) - far(b)).find(free) || null;
}

function meet(a, b) {
  return a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
}

// Whether a line through points enters a box, looked at every two pixels.
function crosses(box, points) {
  const inside = (x, y) => meet(box, { x: x - 2, y: y - 2, width: 4, height: 4 });
  return points.slice(1).some(([x, y], index) => {
    const [fromX, fromY] = points[index];
    const steps = Math.ceil(Math.hypot(x - fromX, y - fromY) / 2) || 1;
    return Array.from({ length: steps + 1 }, (_, at) => at / steps).some((part) =>
      inside(fromX + part * (x - fromX), fromY + part * (y - fromY)));
  });
}

function whatIfTable(lines, rows) {
  const known = (show) => ({ row }) => (row ? show(row) : "–");
  const swatch = ({ index, line }) => html("span", {}, stroke(index), line.title);
  const columns = [
    { title: "plan", cell: swatch },
    { title: "messages", cell: known((row) => String(row.messages)), numeric: true },
    { title: "iteration", cell: known((row) => formatSeconds(row.iteration_seconds)), numeric: true },
    { title: "exposed", cell: known((row) => formatSeconds(row.non_overlapped_seconds)), numeric: true },
    { title: "speed-up over one worker", cell: known((row) => formatTimes(row.speedup)), numeric: true },
    { title: "efficiency", cell: known((row) => formatPercent(row.efficiency)), numeric: true },
    { title: "cost of a message", cell: known((row) => (row.cost === "measured" ? "measured line" : "closed form")) },
  ];
  return table(columns, lines.map((line, index) => ({ line, index, row: rows[index] })));
}

function drawWhatIf(report) {
  byId("whatif").hidden = !report.what_if.models.length;
  return report.what_if.models.length ? new WhatIf(report) : null;
}
