// Which gradients travel together: penstock.planners once more.
// A model is {ready, prefix, compute}: when each gradient is ready, the bytes before each, when computation ends.
// A planner is given the ways a bucket can travel and returns messages {end, way}: the last tensor and how it travels.

const ITEMSIZE = { float64: 8, float32: 4, bfloat16: 2, float16: 2 };
const FIRST_NBYTES = 2 ** 20; // of stock DDP's first bucket
const NEXT_NBYTES = 25 * 2 ** 20;
const ROUNDING = 1e-12;

function modelOf(trace) {
  const ready = [];
  const prefix = [0];
  let now = trace.forward_seconds;
  for (const tensor of trace.tensors) {
    now += tensor.backward_seconds;
    ready.push(now);
    prefix.push(prefix[prefix.length - 1] + tensor.numel * ITEMSIZE[trace.dtype]);
  }
  return { ready, prefix, compute: now };
}

function planWfbp(model, [way]) {
  return model.ready.map((_, end) => ({ end, way }));
}

function planSingle(model, [way]) {
  return [{ end: model.ready.length - 1, way }];
}

function planThreshold(model, [way]) {
  const messages = [];
  let held = 0;
  let limit = FIRST_NBYTES;
  model.ready.forEach((_, end) => {
    held += model.prefix[end + 1] - model.prefix[end];
    if (held >= limit || end === model.ready.length - 1) {
      messages.push({ end, way });
      held = 0;
      limit = NEXT_NBYTES;
    }
  });
  return messages;
}

// MG-WFBP's Algorithm 1: merge while the next gradient is ready less than a startup after this message could begin.
function planGreedy({ ready, prefix }, [way]) {
  const messages = [];
  let start = ready[0];
  let pending = 0;
  for (let end = 0; end < ready.length - 1; end++) {
    pending += prefix[end + 1] - prefix[end];
    if (ready[end + 1] - start < way.a) {
      start = Math.max(start, ready[end + 1]);
    } else {
      messages.push({ end, way });
      start = Math.max(start + (way.a + way.b * pending), ready[end + 1]);
      pending = 0;
    }
  }
  return [...messages, { end: ready.length - 1, way }];
}

// What messages cost by one way: tensors i+1..j take startup + spent[j] - spent[i] seconds.
function priceOf(way, prefix) {
  const spent = prefix.map((nbytes, count) => (way.each ? way.b * nbytes + way.each * count : way.b * nbytes));
  return { way, startup: way.a, spent, queue: [], head: 0 };
}

// The optimum: f_j = min over i < j and ways of max(f_i, r_j) + a + spent_j - spent_i, with a monotone queue per way
// (planners/exact.py, proved in docs/decisions/0001-exact-merging.md).
function planExact({ ready, prefix }, ways) {
  const prices = ways.map((way) => priceOf(way, prefix));
  const finish = [0];
  const cut = [null]; // where the last message of an optimal schedule of 1..j begins, and its way
  let waited = 0; // the last i with finish[i] <= ready of the current tensor
  for (let j = 1; j <= ready.length; j++) {
    while (waited + 1 < j && finish[waited + 1] <= ready[j - 1]) waited++;
    const [best, choice] = bestLastMessage(prices, finish, ready[j - 1], waited, j);
    finish.push(best);
    cut.push(choice);
    for (const price of prices) pushCandidate(price, finish, j);
  }
  return fewestMessages(ready, prices, finish, cut);
}

function bestLastMessage(prices, finish, ready, waited, j) {
  let best = Infinity;
  let choice = null;
  for (const price of prices) {
    const { startup, spent, queue } = price;
    while (price.head < queue.length && queue[price.head] <= waited) price.head++;
    const candidates = [[waited, ready]];
    if (price.head < queue.length) candidates.push([queue[price.head], finish[queue[price.head]]]);
    for (const [start, from] of candidates) {
      const ends = from + startup + (spent[j] - spent[start]);
      if (ends < best) [best, choice] = [ends, { start, price }];
    }
  }
  return [best, choice];
}

function pushCandidate(price, finish, j) {
  const { spent, queue } = price;
  const level = finish[j] - spent[j];
  const last = () => queue[queue.length - 1];
  while (queue.length > price.head && finish[last()] - spent[last()] > level) queue.pop();
  queue.push(j);
}

// Of all schedules that end as early, the one with the fewest messages: each begins as early as its deadline allows.
function fewestMessages(ready, prices, finish, cut) {
  const messages = [];
  let j = ready.length;
  let deadline = finish[j];
  while (j > 0) {
    let { start, price } = cut[j];
    for (const other of prices) {
      const { startup, spent } = other;
      const earlier = earliestStart(spent, j, deadline - ready[j - 1] - startup);
      if (earlier < start) {
        const ends = Math.max(finish[earlier], ready[j - 1]) + startup + (spent[j] - spent[earlier]);
        if (ends <= deadline * (1 + ROUNDING)) [start, price] = [earlier, other];
      }
    }
    messages.push({ end: j - 1, way: price.way });
    deadline -= price.startup + (price.spent[j] - price.spent[start]);
    j = start;
  }
  return messages.reverse();
}

// The first i such that i+1..j can be sent in `seconds`; j where nothing can.
function earliestStart(spent, j, seconds) {
  if (seconds < 0) return j;
  let low = 0;
  let high = j;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spent[middle] < spent[j] - seconds) low = middle + 1;
    else high = middle;
  }
  return low;
}

const PLANNERS = {
  naive: { messages: planWfbp, overlap: false },
  wfbp: { messages: planWfbp, overlap: true },
  single: { messages: planSingle, overlap: true },
  threshold: { messages: planThreshold, overlap: true },
  greedy: { messages: planGreedy, overlap: true },
  exact: { messages: planExact, overlap: true },
};

// One row of `penstock simulate`: a planner on p workers.
function simulateRow(model, planner, ways, p) {
  const { messages: plan, overlap } = PLANNERS[planner];
  const messages = plan(model, ways);
  let now = 0;
  let first = 0;
  for (const { end, way } of messages) {
    const ready = overlap ? model.ready[end] : model.compute;
    now = Math.max(now, ready) + waySeconds(way, model.prefix[end + 1] - model.prefix[first], end + 1 - first);
    first = end + 1;
  }
  const iteration = Math.max(now, model.compute);
  const speedup = iteration ? (p * model.compute) / iteration : p;
  return {
    workers: p,
    planner,
    messages: messages.length,
    compressed: messages.filter(({ way }) => parseRoute(way.route).codec !== null).length,
    iteration_seconds: iteration,
    non_overlapped_seconds: iteration - model.compute,
    speedup,
    efficiency: speedup / p,
    cost: ways.every((way) => way.measured) ? "measured" : "model",
  };
}
