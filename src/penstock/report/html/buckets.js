// The buckets of a plan over the tensors they hold, and the bytes of each tensor.

// Tensors above, buckets below, both as wide as their bytes, in the order in which gradients become ready.
// Colours are those of the timeline: buckets of one bulk share one.
function bucketStrip(width, plan, colours) {
  const total = plan.buckets.reduce((sum, bucket) => sum + bucket.nbytes, 0) || 1;
  const scale = linearScale([0, total], [0, width]);
  const marks = [];
  let start = 0;
  for (const tensor of plan.tensors) {
    const about = `${tensor.name}: ${formatBytes(tensor.nbytes)}, bucket ${tensor.bucket + 1}`;
    marks.push(svg("rect", { class: "tensor", fill: colours[plan.buckets[tensor.bucket].message], x: scale(start), y: 0, width: Math.max(scale(start + tensor.nbytes) - scale(start), 0.2), height: 26 },
      svg("title", {}, about)));
    start += tensor.nbytes;
  }
  start = 0;
  plan.buckets.forEach((bucket, index) => {
    const wide = scale(start + bucket.nbytes) - scale(start);
    marks.push(svg("rect", { class: "bucket", fill: colours[bucket.message], x: scale(start), y: 32, width: Math.max(wide, 0.2), height: 30 },
      svg("title", {}, `bucket ${index + 1}: ${bucket.tensors} tensors, ${formatBytes(bucket.nbytes)}, ${bucket.how}`)));
    if (wide > 26) marks.push(svg("text", { class: "on-bar", x: scale(start) + wide / 2, y: 51, "text-anchor": "middle" }, index + 1));
    start += bucket.nbytes;
  });
  return svg("svg", { width, height: 64, viewBox: `0 0 ${width} 64`, role: "img", "aria-label": plan.about }, marks);
}

function bucketTable(plan) {
  const columns = [
    { title: "bucket", cell: (b) => String(b.index + 1) },
    { title: "tensors", cell: (b) => `${b.tensors}: ${b.name}` },
    { title: "gradient", cell: (b) => formatBytes(b.nbytes), numeric: true },
    { title: "encoded, predicted", cell: (b) => formatBytes(b.encoded_nbytes), numeric: true },
    { title: "travels by", cell: (b) => b.how },
  ];
  return table(columns, plan.buckets);
}

const TENSORS_SHOWN = 12;

// The largest tensors as bars: gradient bytes, and in them what is left after encoding.
function tensorBars(width, plan, whole) {
  const ordered = [...plan.tensors].sort((a, b) => b.nbytes - a.nbytes);
  const shown = whole ? ordered : ordered.slice(0, TENSORS_SHOWN);
  const scale = linearScale([0, Math.max(1, ...shown.map((tensor) => tensor.nbytes))], [0, width - 2]);
  const rect = (kind, nbytes) => svg("rect", { class: kind, x: 0, y: 0, width: Math.max(scale(nbytes), 0.5), height: 8 });
  return html("div", {}, shown.map((tensor) => {
    const encoded = tensor.encoded_nbytes;
    const bar = svg("svg", { width, height: 8, viewBox: `0 0 ${width} 8`, "aria-hidden": "true" },
      rect("dense", tensor.nbytes), encoded === null ? null : rect("encoded", encoded));
    const text = `${formatBytes(tensor.nbytes)}${encoded === null ? "" : `, encoded ${formatBytes(encoded)} (predicted)`}`;
    return barRow(tensor.name, text, bar);
  }));
}

function drawPlans(report) {
  const plans = report.plans;
  byId("plan").hidden = !plans.length;
  byId("bytes").hidden = !plans.some((plan) => plan.tensors.length);
  if (!plans.length) return;
  let current = plans[0];
  let whole = false;
  const strip = drawWithin(byId("bucket-strip"), (width) => bucketStrip(width, current, report.bucket_colours));
  const bars = drawWithin(byId("tensor-bars"), (width) => tensorBars(width, current, whole));
  const more = byId("tensor-more");
  const show = () => {
    byId("bucket-table").replaceChildren(bucketTable(current));
    byId("plan-about").textContent = current.about;
    more.hidden = current.tensors.length <= TENSORS_SHOWN;
    more.textContent = whole ? "Show the largest only" : `Show all ${current.tensors.length} tensors`;
    strip();
    bars();
  };
  const choose = (index) => { current = plans[index]; show(); };
  byId("plan-choice").replaceChildren(...[chooser("Plan of", plans.map((plan) => plan.name), choose)].filter(Boolean));
  more.addEventListener("click", () => { whole = !whole; show(); });
  show();
}
