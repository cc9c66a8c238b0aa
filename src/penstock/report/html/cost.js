// How many seconds a message takes: the closed forms of penstock.strategies once more, same arithmetic; tests compare
// them, and that none is missing.
// A network is a penstock-network/1 document, a line is {a, b}: a seconds + b seconds per byte of the dense gradient.

const DEFAULT_BLOCK_NBYTES = 256 * 1024;

function floorLog2(p) {
  return 31 - Math.clz32(p);
}

function ceilLog2(p) {
  return p === 1 ? 0 : floorLog2(p - 1) + 1;
}

function addLines(first, second) {
  return { a: first.a + second.a, b: first.b + second.b };
}

function constantsOf(network) {
  return [network.alpha_seconds, network.beta_seconds_per_byte, network.gamma_seconds_per_byte];
}

// What the ranks beyond a power of two send before and after an exchange.
function foldingLine(network, p) {
  const [alpha, beta, gamma] = constantsOf(network);
  return p === 2 ** floorLog2(p) ? { a: 0, b: 0 } : { a: 2 * alpha, b: 2 * beta + gamma };
}

function ringLine(network, p) {
  const [alpha, beta, gamma] = constantsOf(network);
  const share = (p - 1) / p;
  return { a: 2 * (p - 1) * alpha, b: 2 * share * beta + share * gamma };
}

function binaryTreeLine(network, p) {
  const [alpha, beta, gamma] = constantsOf(network);
  const levels = ceilLog2(p);
  return { a: 2 * alpha * levels, b: (2 * beta + gamma) * levels };
}

function recursiveDoublingLine(network, p) {
  const [alpha, beta, gamma] = constantsOf(network);
  const rounds = floorLog2(p);
  return addLines({ a: alpha * rounds, b: (beta + gamma) * rounds }, foldingLine(network, p));
}

function halvingDoublingLine(network, p) {
  const [alpha, beta, gamma] = constantsOf(network);
  const rounds = floorLog2(p);
  const share = 1 - 1 / 2 ** rounds;
  return addLines({ a: 2 * alpha * rounds, b: share * (2 * beta + gamma) }, foldingLine(network, p));
}

function doubleTreeLine(network, p) {
  if (p === 1) return { a: 0, b: 0 };
  const [alpha, beta, gamma] = constantsOf(network);
  const steps = p === 2 ? 2 : p === 3 ? 3 : 4.5; // for a block of each half
  const levels = ceilLog2(p);
  const blockSeconds = DEFAULT_BLOCK_NBYTES * beta;
  const filling = steps * Math.max(levels - 2, 0) * blockSeconds;
  const perByte = (steps * (alpha + blockSeconds)) / (2 * DEFAULT_BLOCK_NBYTES);
  return { a: (4 * levels - 2) * alpha + filling, b: perByte + gamma };
}

function spanningTreeLine(network, p) {
  const [alpha, beta, gamma] = constantsOf(network);
  const levels = ceilLog2(p);
  return addLines({ a: alpha * levels, b: (beta + gamma) * levels }, { a: alpha * levels, b: beta * levels });
}

function pipelineLine(alpha, perByte, p) {
  if (p === 1) return { a: 0, b: 0 };
  const block = DEFAULT_BLOCK_NBYTES;
  return { a: (p - 1) * (alpha + block * perByte), b: alpha / block + perByte };
}

function linearPipelineLine(network, p) {
  const [alpha, beta, gamma] = constantsOf(network);
  return addLines(pipelineLine(alpha, beta + gamma, p), pipelineLine(alpha, beta, p));
}

const ALL_REDUCE = {
  ring: ringLine,
  binary_tree: binaryTreeLine,
  recursive_doubling: recursiveDoublingLine,
  halving_doubling: halvingDoublingLine,
  double_tree: doubleTreeLine,
  spanning_tree: spanningTreeLine,
  bidirectional_exchange: halvingDoublingLine,
  linear_pipeline: linearPipelineLine,
};
