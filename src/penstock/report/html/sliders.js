// Sliders that move along stops; what was measured is always one of the stops, so one can return to it exactly.

// Stops {value, fitted} in ascending order: the round values between low and high, and the fitted one.
function stopsAround(values, fitted) {
  const stops = values.filter((value) => value !== fitted).map((value) => ({ value, fitted: false }));
  return [...stops, { value: fitted, fitted: true }].sort((a, b) => a.value - b.value);
}

function decades(low, high, steps) {
  const values = [];
  for (let power = low; power < high; power++) values.push(...steps.map((step) => Number(`${step}e${power}`)));
  return [...values, Number(`1e${high}`)];
}

function workerCounts() {
  const counts = [1, 2, 3, 4, 5, 6, 7, 8];
  for (let base = 8; base < 2048; base *= 2) counts.push(base * 1.25, base * 1.5, base * 1.75, base * 2);
  return counts;
}

// A labelled slider; `format` gives the value with its unit, `changed` is called with the new stop.
function slider(id, label, stops, format, changed) {
  const start = stops.findIndex((stop) => stop.fitted);
  const output = html("output", { for: id, id: `${id}-value` });
  const input = html("input", { type: "range", id, min: 0, max: stops.length - 1, step: 1, value: start });
  const say = () => {
    const stop = stops[Number(input.value)];
    const text = `${format(stop.value)}${stop.fitted ? " (as measured)" : ""}`;
    output.textContent = text;
    input.setAttribute("aria-valuetext", text);
    return stop;
  };
  input.addEventListener("input", () => changed(say()));
  say();
  return html("div", { class: "slider" }, html("label", { for: id }, label), input, output);
}
