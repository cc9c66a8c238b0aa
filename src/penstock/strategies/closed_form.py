"""What strategies say about their cost in closed form: the values, and the arithmetic that several of them share.

A dense collective is a line in its bytes (MG-WFBP Table 2, Wang et al. Table 1). Every strategy has its own in its
file, as a function of the network, the number of ranks `p` and the options. The papers assume that `p` is a power of
two; otherwise trees have ceil(log2 p) levels, and exchanges run on the largest power of two below `p`, with two more
messages of the whole size and one more summation for the ranks beyond it. One rank sends nothing: all costs are zero.

A compressed bucket of n tensors and m dense bytes costs `a + b m + c n` (HiPress, Eq. 2): every tensor is cut into
pieces and compressed by itself, so each brings its own calls of the codec and its own headers, besides its bytes. A
strategy says how many sends, encodes and decodes of a piece stand one after the other. A bucket of one tensor costs
exactly what Eq. 2 says, where no curve lies on its floor; where one does, and for tensors too small to be cut, the line
is above it. A sparse strategy says how many messages, merges and additions of whole blocks stand one after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.curves import CodecCurves, Curve
from penstock.network import LinearCost, Network

ZERO = LinearCost(0.0, 0.0)


def floor_log2(p: int) -> int:
    """Return the exponent of the largest power of two not above `p`."""
    return p.bit_length() - 1


def ceil_log2(p: int) -> int:
    """Return the number of doublings from 1 to at least `p`."""
    return (p - 1).bit_length()


def constants(network: Network) -> tuple[float, float, float]:
    """Return alpha, beta and gamma."""
    return network.alpha_seconds, network.beta_seconds_per_byte, network.gamma_seconds_per_byte


def folding(network: Network, p: int) -> LinearCost:
    """Return the cost of the messages before and after an exchange that ranks beyond a power of two need."""
    alpha, beta, gamma = constants(network)
    return ZERO if p == 2 ** floor_log2(p) else LinearCost(2 * alpha, 2 * beta + gamma)


@dataclass(frozen=True, slots=True)
class SyncCounts:
    """How many sends, encodes and decodes of a piece stand one after the other (HiPress Table 3)."""

    sends: int
    encodes: int
    decodes: int


CountFunction = Callable[[int, int], SyncCounts]  # of (workers, pieces of a tensor)


@dataclass(frozen=True, slots=True)
class CompressedCost:
    """The cost of a bucket, `line.seconds(nbytes) + seconds_per_tensor * tensors`."""

    line: LinearCost
    seconds_per_tensor: float


def counted_cost(network: Network, codec: CodecCurves, count: SyncCounts, pieces: int, batches: int) -> CompressedCost:
    """Add up `batches` times Eq. 2 for one of `pieces` parts: sends are shared by all tensors, calls by none."""
    beta = network.beta_seconds_per_byte
    calls = count.encodes * codec.encode.least_seconds + count.decodes * codec.decode.least_seconds
    calls += count.sends * beta * codec.fixed_nbytes
    per_byte = (
        count.sends * beta * codec.ratio
        + count.encodes * codec.encode.seconds_per_byte
        + count.decodes * codec.decode.seconds_per_byte
    )
    line = LinearCost(batches * count.sends * network.alpha_seconds, batches / pieces * per_byte)
    return CompressedCost(line, batches * calls)


@dataclass(frozen=True, slots=True)
class Round:
    """One step of a sparse all-reduce: how many messages travel at once, and how many ranks merge afterwards."""

    messages: int
    merges: int = 0
    children: int = 0  # of a broadcast: how many the sender with most to do still sends to, this one included


@dataclass(frozen=True, slots=True)
class SparseSteps:
    """What stands one after the other in a sparse all-reduce."""

    messages: int
    merges: int = 0
    adds: int = 0  # of blocks to the gradient
    rounds: tuple[Round, ...] = ()  # the same, with what happens at once; none where ranks do not wait for one another


def exchange_cost(steps: SparseSteps, network: Network, codec: CodecCurves) -> LinearCost:
    """Return the time from the first block sent to the result in the gradient, selection not included."""
    assert codec.block_merge is not None, "a codec whose blocks can be merged"
    beta = network.beta_seconds_per_byte
    message = LinearCost(network.alpha_seconds + beta * codec.fixed_nbytes, beta * codec.ratio)
    calls = [
        (steps.messages, message),
        (steps.merges, curve_line(codec.block_merge)),
        (1, curve_line(codec.decode)),
        (steps.adds, curve_line(codec.merge)),
    ]
    startup = sum(count * line.a_seconds for count, line in calls)
    return LinearCost(startup, sum(count * line.b_seconds_per_byte for count, line in calls))


def sparse_cost(steps: SparseSteps, network: Network, codec: CodecCurves) -> CompressedCost:
    """Return the cost of a bucket for planners: selection and exchange, a block for each tensor in one message."""
    total = curve_line(codec.encode) + exchange_cost(steps, network, codec)
    alphas = steps.messages * network.alpha_seconds
    return CompressedCost(LinearCost(alphas, total.b_seconds_per_byte), total.a_seconds - alphas)


def curve_line(curve: Curve) -> LinearCost:
    """Return a curve as a line, which is above it where it lies on its floor."""
    return LinearCost(curve.least_seconds, curve.seconds_per_byte)
