"""Parameters above 2 GiB, and of more than 2^31 elements, through the wrapper, where memory allows."""

import pytest

from runtime.test_large import BYTES_2_31, ELEMENTS_2_31, need, places
from spawn import spawn
from torch_large import one_step

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "codec", "gib"),
    [("ring", None, 15), ("native", None, 15), ("parameter_server", "blocks(bits=8)", 17)],
)
def test_a_parameter_above_2_gib_is_averaged_by_two_ranks(strategy, codec, gib):
    need(gib)
    where = places(BYTES_2_31)
    for averaged, count, routes in spawn(2, one_step, BYTES_2_31, "float32", strategy, codec, where):
        assert averaged == pytest.approx([1.5] * len(where), rel=0.02)  # of one value in a block, 8 bits are exact
        assert count == len(where)
        assert routes == strategy + (f"+{codec}" if codec else "")


def test_a_parameter_of_more_than_2_to_the_31_elements_passes_through_the_wrapper():
    need(15)
    where = places(ELEMENTS_2_31)
    ((averaged, count, _),) = spawn(1, one_step, ELEMENTS_2_31, "bfloat16", "ring", None, where)
    assert averaged == [1.0] * len(where)
    assert count == len(where)
