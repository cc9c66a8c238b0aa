// Numbers as a person reads them, each with its unit.

function significant(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 1);
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(decimals, 8));
}

function scaled(value, units) {
  const [unit, size] = units.find(([, size]) => Math.abs(value) >= size * 0.9995) || units[units.length - 1];
  return `${significant(value / size)} ${unit}`;
}

function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 s";
  return scaled(seconds, [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]);
}

function formatBytes(nbytes) {
  if (nbytes === null || nbytes === undefined) return "–";
  if (nbytes === 0) return "0 B";
  return scaled(nbytes, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]]);
}

function formatRate(bytesPerSecond) {
  if (bytesPerSecond === Infinity) return "without limit";
  const bits = 8 * bytesPerSecond;
  return scaled(bits, [["Tb/s", 1e12], ["Gb/s", 1e9], ["Mb/s", 1e6], ["kb/s", 1e3], ["b/s", 1]]);
}

function formatTimes(factor) {
  return factor === null || factor === undefined ? "–" : `${significant(factor)}×`;
}

function formatPercent(share) {
  return share === null || share === undefined ? "–" : `${significant(100 * share)} %`;
}

function formatNumber(value) {
  return value === null || value === undefined ? "–" : significant(value, 4);
}
