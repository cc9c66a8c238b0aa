"""Closed forms for collectives on an alpha-beta-gamma network: MG-WFBP Table 2 and Wang et al. Table 1.

Every function takes the network and a world size `p` and returns a line `a + b M`, M in bytes. The papers assume that
`p` is a power of two. Otherwise:

- trees (`binary_tree`, `spanning_tree`, `double_tree`) have ceil(log2 p) levels;
- exchanges (`recursive_doubling`, `halving_doubling`) run on the largest power of two below `p`; each rank left over
  first sends its data to a partner, which adds it, and receives the result at the end. That costs two more messages of
  the whole size and one more summation. `bidirectional_exchange` is charged the same, although its program does better:
  a rank without a partner shares another's, so that whole messages never travel;
- `ring` and `linear_pipeline` do not care.

One worker sends nothing: all costs are zero.
"""

from collections.abc import Callable

from penstock.network import LinearCost, Network

CostFunction = Callable[[Network, int], LinearCost]
ZERO = LinearCost(0.0, 0.0)
DEFAULT_BLOCK_NBYTES = 256 * 1024  # of a linear pipeline where nobody chose one


def floor_log2(p: int) -> int:
    """Return the exponent of the largest power of two not above `p`."""
    return p.bit_length() - 1


def ceil_log2(p: int) -> int:
    """Return the number of doublings from 1 to at least `p`."""
    return (p - 1).bit_length()


def ring(network: Network, p: int) -> LinearCost:
    """Ring all-reduce: p-1 steps to sum a p-th part each, p-1 steps to pass the sums on."""
    alpha, beta, gamma = _constants(network)
    share = (p - 1) / p
    return LinearCost(2 * (p - 1) * alpha, 2 * share * beta + share * gamma)


def binary_tree(network: Network, p: int) -> LinearCost:
    """Binomial reduce to one rank, then binomial broadcast; each level carries the whole message."""
    alpha, beta, gamma = _constants(network)
    levels = ceil_log2(p)
    return LinearCost(2 * alpha * levels, (2 * beta + gamma) * levels)


def recursive_doubling(network: Network, p: int) -> LinearCost:
    """Pairs at doubling distances exchange and add the whole message."""
    alpha, beta, gamma = _constants(network)
    rounds = floor_log2(p)
    return LinearCost(alpha * rounds, (beta + gamma) * rounds) + _folding(network, p)


def halving_doubling(network: Network, p: int) -> LinearCost:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling (Rabenseifner)."""
    alpha, beta, gamma = _constants(network)
    rounds = floor_log2(p)
    share = 1 - 1 / 2**rounds  # as one factor: Table 2's difference of terms falls below 0 by rounding where p is 1
    return LinearCost(2 * alpha * rounds, share * (2 * beta + gamma)) + _folding(network, p)


def double_tree(network: Network, p: int) -> LinearCost:
    """Two complementary binary trees, each with half the message, pipelined.

    As published, and not attainable. Table 2 prints the startup as `2 log N`, without the alpha. Its slope,
    `beta + gamma`, is that of a reduce or a broadcast alone: an all-reduce has to send every byte in and out,
    `2 (p-1)/p beta` on each NIC, and the program takes about `2 beta` (tests/simulator/test_program.py).
    """
    if p == 1:
        return ZERO
    alpha, beta, gamma = _constants(network)
    return LinearCost(2 * alpha * ceil_log2(p), beta + gamma)


def spanning_tree(network: Network, p: int) -> LinearCost:
    """Minimum spanning tree reduce and broadcast: the same cost as `binary_tree`, another shape."""
    return spanning_tree_reduce(network, p) + spanning_tree_broadcast(network, p)


def spanning_tree_broadcast(network: Network, p: int) -> LinearCost:
    """Every level passes the whole message on: log p (alpha + n beta)."""
    alpha, beta, _ = _constants(network)
    return LinearCost(alpha * ceil_log2(p), beta * ceil_log2(p))


def spanning_tree_reduce(network: Network, p: int) -> LinearCost:
    """The broadcast backwards, with a summation at every level."""
    alpha, beta, gamma = _constants(network)
    return LinearCost(alpha * ceil_log2(p), (beta + gamma) * ceil_log2(p))


def bidirectional_exchange(network: Network, p: int) -> LinearCost:
    """Reduce-scatter and all-gather by exchange: the cost of `halving_doubling`."""
    return halving_doubling(network, p)


def bidirectional_exchange_broadcast(network: Network, p: int) -> LinearCost:
    """Spanning-tree scatter, then a ring all-gather, as MPI does it for long messages."""
    alpha, beta, _ = _constants(network)
    return LinearCost((ceil_log2(p) + p - 1) * alpha, 2 * (p - 1) / p * beta)


def bidirectional_exchange_reduce(network: Network, p: int) -> LinearCost:
    """Reduce-scatter by exchange, then a gather to the root."""
    alpha, beta, gamma = _constants(network)
    rounds = floor_log2(p)
    share = 1 - 1 / 2**rounds
    folding = ZERO if 2**rounds == p else LinearCost(alpha, beta + gamma)
    return LinearCost(2 * rounds * alpha, 2 * share * beta + share * gamma) + folding


def linear_pipeline(network: Network, p: int, block_nbytes: float = DEFAULT_BLOCK_NBYTES) -> LinearCost:
    """All-reduce through a chain in blocks: 2(p-1+n/b) alpha + (b(p-1)+n)(2 beta + gamma), a line in n."""
    return linear_pipeline_reduce(network, p, block_nbytes) + linear_pipeline_broadcast(network, p, block_nbytes)


def linear_pipeline_broadcast(network: Network, p: int, block_nbytes: float = DEFAULT_BLOCK_NBYTES) -> LinearCost:
    """Broadcast through a chain in blocks: (p-1+n/b) alpha + (b(p-1)+n) beta."""
    alpha, beta, _ = _constants(network)
    return _pipeline(alpha, beta, p, block_nbytes)


def linear_pipeline_reduce(network: Network, p: int, block_nbytes: float = DEFAULT_BLOCK_NBYTES) -> LinearCost:
    """Reduce through a chain in blocks: (p-1+n/b) alpha + (b(p-1)+n)(beta + gamma)."""
    alpha, beta, gamma = _constants(network)
    return _pipeline(alpha, beta + gamma, p, block_nbytes)


def best_block_nbytes(network: Network, p: int, nbytes: float, operation: str = "all_reduce") -> float:
    """Return the block size that minimises the linear pipeline's cost.

    The terms that depend on b are `n alpha / b` and `b (p-1) s`, where s is what a byte costs on its way; they are
    least where they are equal: b = sqrt(n alpha / ((p-1) s)). Erratum 9: Proposition 1 asks for n/b << alpha, which
    compares a count with a time; what it needs is n alpha / b << n beta, and the optimum follows from the cost.
    """
    alpha, beta, gamma = _constants(network)
    startups, per_byte = {"broadcast": (1, beta), "reduce": (1, beta + gamma), "all_reduce": (2, 2 * beta + gamma)}[
        operation
    ]
    if p == 1 or nbytes == 0 or per_byte == 0:
        return max(nbytes, 1.0)
    return float(min(max((startups * nbytes * alpha / ((p - 1) * per_byte)) ** 0.5, 1.0), nbytes))


def parameter_server(network: Network, p: int, servers: int | None = None) -> tuple[LinearCost, LinearCost]:
    """Push and pull through parameter servers (MG-WFBP section 4.3), as two lines.

    Co-located (`servers` None): each of the p workers keeps and sums a p-th part, so p-1 parts travel each way.
    Dedicated: each of `servers` machines receives its part from p workers, one after the other.
    """
    alpha, beta, gamma = _constants(network)
    messages, part = (p - 1, 1 / p) if servers is None else (p, 1 / servers)
    push = LinearCost(messages * alpha, messages * part * (beta + gamma))
    return push, LinearCost(messages * alpha, messages * part * beta)


ALL_REDUCE: dict[str, CostFunction] = {
    "ring": ring,
    "binary_tree": binary_tree,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "double_tree": double_tree,
    "spanning_tree": spanning_tree,
    "bidirectional_exchange": bidirectional_exchange,
    "linear_pipeline": linear_pipeline,
}
BROADCAST: dict[str, CostFunction] = {
    "spanning_tree": spanning_tree_broadcast,
    "bidirectional_exchange": bidirectional_exchange_broadcast,
    "linear_pipeline": linear_pipeline_broadcast,
}
REDUCE: dict[str, CostFunction] = {
    "spanning_tree": spanning_tree_reduce,
    "bidirectional_exchange": bidirectional_exchange_reduce,
    "linear_pipeline": linear_pipeline_reduce,
}


def _constants(network: Network) -> tuple[float, float, float]:
    return network.alpha_seconds, network.beta_seconds_per_byte, network.gamma_seconds_per_byte


def _folding(network: Network, p: int) -> LinearCost:
    """The messages before and after an exchange that ranks beyond a power of two need."""
    alpha, beta, gamma = _constants(network)
    return ZERO if p == 2 ** floor_log2(p) else LinearCost(2 * alpha, 2 * beta + gamma)


def _pipeline(alpha: float, per_byte: float, p: int, block_nbytes: float) -> LinearCost:
    if p == 1:
        return ZERO
    return LinearCost((p - 1) * (alpha + block_nbytes * per_byte), alpha / block_nbytes + per_byte)
