"""Random planning problems on a grid of small whole numbers, where float arithmetic is exact and ties are common."""

from hypothesis import strategies as st

from penstock.cost.ways import Way
from penstock.network import LinearCost
from penstock.trace import Tensor, Trace


def make_trace(gaps, sizes, forward=0.0):
    tensors = tuple(Tensor(f"t{i}", size, float(gap)) for i, (gap, size) in enumerate(zip(gaps, sizes, strict=True)))
    return Trace("random", "none", 1, "float32", float(forward), tensors)


@st.composite
def traces(draw, most=12):
    count = draw(st.integers(1, most))
    gaps = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    return make_trace(gaps, sizes, draw(st.integers(0, 5)))


lines = st.builds(LinearCost, st.integers(0, 12).map(float), st.integers(0, 4).map(lambda b: b / 4))


def ways(most=1):
    return st.lists(lines, min_size=1, max_size=most).map(
        lambda costs: [Way(f"way{index}", (cost,)) for index, cost in enumerate(costs)]
    )


def codec_ways(most=4):
    """Ways by strategy, codec and partitions, each tensor of a bucket with a price of its own."""
    prices = st.lists(st.tuples(lines, st.integers(0, 3)), min_size=1, max_size=most)
    return prices.map(
        lambda found: [
            Way(f"way{i % 2}", (line,), codec="onebit" if i > 1 else None, partitions=1 + i, seconds_per_tensor=each)
            for i, (line, each) in enumerate(found)
        ]
    )


def staged_ways(most=1):
    pairs = st.lists(st.tuples(lines, lines), min_size=1, max_size=most)
    return pairs.map(lambda ps: [Way(f"way{i}", pair, ("push", "pull")) for i, pair in enumerate(ps)])
