// A way for a bucket to travel: penstock.strategies.closed_form and penstock.cost.ways once more.
// A route is written "ring", "ring+onebit" or "ring+onebit/4"; a way is {route, a, b, each, measured}: a bucket of n
// tensors and m dense bytes takes a + b m + each n seconds, for a codec compresses every tensor by itself.

// HiPress Eq. 2: `batches` times the serial sends, encodes and decodes of one of `pieces` parts.
function compressedCost(network, codec, count, pieces, batches) {
  const beta = network.beta_seconds_per_byte;
  const least = (curve) => Math.max(curve.floor_seconds || 0, curve.startup_seconds);
  let calls = count.encodes * least(codec.encode) + count.decodes * least(codec.decode);
  calls += count.sends * beta * (codec.fixed_nbytes || 0);
  const perByte = count.sends * beta * codec.ratio + count.encodes * codec.encode.seconds_per_byte +
    count.decodes * codec.decode.seconds_per_byte;
  return { a: batches * count.sends * network.alpha_seconds, b: (batches / pieces) * perByte, each: batches * calls };
}

// Where the partitions are not chosen, a ring and parameter servers cut into one piece per rank, others not at all.
function compressedRing(network, codec, p, partitions) {
  const pieces = partitions === 1 ? p : partitions;
  return compressedCost(network, codec, { sends: 2 * (p - 1), encodes: p, decodes: p }, pieces, Math.ceil(pieces / p));
}

function compressedParameterServer(network, codec, p, partitions) {
  const pieces = partitions === 1 ? p : partitions;
  const count = { sends: 2 * (p - 1), encodes: Math.min(pieces, p), decodes: p };
  return compressedCost(network, codec, count, pieces, Math.ceil(pieces / p));
}

function compressedBinaryTree(network, codec, p, partitions) {
  const levels = ceilLog2(p);
  const count = { sends: 2 * levels, encodes: levels + 1, decodes: levels + 1 };
  return compressedCost(network, codec, count, partitions, partitions);
}

function compressedAllGather(network, codec, p, partitions) {
  return compressedCost(network, codec, { sends: p - 1, encodes: 1, decodes: p }, partitions, partitions);
}

const COMPRESSED = {
  ring: compressedRing,
  parameter_server: compressedParameterServer,
  binary_tree: compressedBinaryTree,
  spanning_tree: compressedBinaryTree,
  all_gather: compressedAllGather,
  recursive_doubling: compressedAllGather,
};

function parseRoute(text) {
  const [, strategy, codec, partitions] = text.match(/^([^+/]+)(?:\+(.+?))?(?:\/([1-9][0-9]*))?$/);
  return { strategy, codec: codec || null, partitions: Number(partitions || 1) };
}

// A line measured in the network; what further tensors of a bucket add was measured too, or comes from the codec's curves.
function measuredWay(network, route) {
  const { a_seconds: a, b_seconds_per_byte: b, c_seconds_per_tensor: further } = network.all_reduce[route];
  const { strategy, codec, partitions } = parseRoute(route);
  const curves = (network.codecs || {})[codec];
  if (further != null) return { route, a: Math.max(0, a - further), b, each: further, measured: true };
  if (!curves || !COMPRESSED[strategy]) return { route, a, b, each: 0, measured: true };
  const { each } = COMPRESSED[strategy](network, curves, network.workers, partitions);
  return { route, a: Math.max(0, a - each), b, each, measured: true };
}

// The way that a route says on p workers, as `penstock simulate` takes it: the line measured with p workers where there
// is one, the closed form otherwise; null where there is neither.
function wayFor(network, route, p) {
  if ((network.all_reduce || {})[route] && p === network.workers) return measuredWay(network, route);
  const { strategy, codec, partitions } = parseRoute(route);
  if (codec === null) {
    return ALL_REDUCE[strategy] ? { route, ...ALL_REDUCE[strategy](network, p), each: 0, measured: false } : null;
  }
  const curves = (network.codecs || {})[codec];
  if (!curves || !COMPRESSED[strategy]) return null;
  const cost = p === 1 ? { a: 0, b: 0, each: 0 } : COMPRESSED[strategy](network, curves, p, partitions);
  return { route, ...cost, measured: false };
}

function waySeconds(way, nbytes, tensors) {
  return way.a + way.b * nbytes + way.each * tensors;
}
