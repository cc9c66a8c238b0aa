"""Every collective with every strategy, for tests that run over all of them."""

from penstock.program import Collective
from penstock.strategies import names, sparse_names


def dense_calls() -> list[tuple[str, str]]:
    """Return every collective with every strategy that carries it out on dense data."""
    order = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather")
    assert set(order) == {one.value for one in Collective}
    return [(one, name) for one in order for name in names(one)]


def sparse_calls() -> list[tuple[str, str]]:
    """Return the all-reduce with every strategy that adds blocks of a sparse codec."""
    return [(Collective.ALL_REDUCE.value, name) for name in sparse_names()]
