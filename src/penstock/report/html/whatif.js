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
    const chart = frame(width, 300, x, { domain: [0, 1], format: (v) => `${Math.round(100 * v)} %` }, "scaling efficiency against workers, predicted");
    const at = chart.x(this.workers.value);
    chart.plot.append(svg("line", { class: "marker", x1: at, x2: at, y1: chart.y(0), y2: chart.y(1) }));
    const counts = [...new Set([...CHART_WORKERS, this.workers.value])].sort((a, b) => a - b);
    this.lines.forEach((line, index) => {
      const points = counts.map((p) => [p, whatIfRow(this.model, this.network, line, p)]);
      const path = pathThrough(points.map(([p, row]) => [p, row ? row.efficiency : null]), chart.x, chart.y);
      chart.plot.append(svg("path", { class: "curve predicted", d: path, stroke: colourOf(index), "stroke-dasharray": dashOf(index) }));
    });
    chart.plot.append(...this.measuredDots(chart));
    return chart.root;
  }

  // What the runs really reached, at their own number of workers; faint where the sliders left the measured network.
  measuredDots(chart) {
    const here = this.latency.fitted && this.rate.fitted;
    const kind = here ? "measured-dot" : "measured-dot faint";
    let lowest = -Infinity; // labels of dots that lie close together are moved apart
    return [...this.subject.measured].sort((a, b) => b.efficiency - a.efficiency).flatMap(({ name, workers, efficiency }) => {
      const at = { x: chart.x(workers), y: chart.y(efficiency) };
      lowest = Math.max(at.y, lowest + 13);
      return [
        svg("circle", { class: kind, cx: at.x, cy: at.y, r: 4.5 }),
        svg("text", { class: kind, x: at.x + 9, y: lowest, dy: "0.32em" }, `${name}, measured: ${formatPercent(efficiency)}`),
      ];
    });
  }
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
