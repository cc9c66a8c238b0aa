"""Messages beyond 2 GiB and tensors beyond 2^31 elements, dense and coded, between threads of one process.

Values are zero but for some at places that a 32-bit size or index would miss: the first, the last, and those on both
sides of element 2^29 (byte 2^31) and of element 2^31.
"""

import numpy as np
import pytest

from penstock.codecs.registry import make_codec
from penstock.errors import CodecError
from penstock.runtime import Communicator
from penstock.strategies import build_part, names
from runtime.threads import run_ranks

pytestmark = pytest.mark.slow
GIB = 1 << 30
BYTES_2_31 = (1 << 29) + 12_345  # float32 elements of more than 2^31 bytes
ELEMENTS_2_31 = (1 << 31) + 77


def need(gib):
    """Skip where so much memory is not to be had."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    available = int(fields["MemAvailable"].split()[0]) / (1 << 20)
    if available < gib:
        pytest.skip(f"{available:.1f} GiB of memory are free; wanted {gib}")


def places(numel):
    edges = [0, (1 << 29) - 1, 1 << 29, (1 << 31) - 1, 1 << 31, numel - 1]
    return [edge for edge in edges if edge < numel]


@pytest.mark.parametrize("strategy", ["ring", "parameter_server", "linear_pipeline", "halving_doubling"])
def test_more_than_2_gib_are_summed(strategy):
    need(7)

    def rank(transport):
        values = np.zeros(BYTES_2_31, np.float32)
        values[places(values.size)] = transport.rank + 1
        Communicator(transport, timeout_seconds=280).all_reduce(values, strategy)
        return values[places(values.size)].tolist(), int(np.count_nonzero(values))

    wanted = places(BYTES_2_31)
    assert run_ranks(2, rank) == [([3.0] * len(wanted), len(wanted))] * 2


@pytest.mark.parametrize("strategy", ["ring", "parameter_server"])
def test_more_than_2_to_the_31_elements_are_summed(strategy):
    need(7)

    def rank(transport):
        values = np.zeros(ELEMENTS_2_31, np.int8)
        values[places(values.size)] = transport.rank + 1
        Communicator(transport, timeout_seconds=280).all_reduce(values, strategy)
        return values[places(values.size)].tolist(), int(np.count_nonzero(values))

    wanted = places(ELEMENTS_2_31)
    assert run_ranks(2, rank) == [([3] * len(wanted), len(wanted))] * 2


@pytest.mark.parametrize(("strategy", "codec"), [("ring", "blocks(bits=8)"), ("gtopk", "sparse(density=1e-6)")])
def test_more_than_2_gib_are_summed_through_a_codec(strategy, codec):
    """Values that both codecs send as they are: one value in its block, and the k largest."""
    need(9)

    def rank(transport):
        values = np.zeros(BYTES_2_31, np.float32)
        values[places(values.size)] = transport.rank + 1
        call = Communicator(transport, timeout_seconds=280).prepare_all_reduce(
            strategy, make_codec(codec), (0, values.size)
        )
        call.run(values, None, 1.0)
        return values[places(values.size)], int(np.count_nonzero(values))

    for found, count in run_ranks(2, rank):
        assert count == len(places(BYTES_2_31))
        np.testing.assert_allclose(found, 3.0, rtol=0.02)


@pytest.mark.parametrize(("world_size", "gib"), [(1, 10), (2, 20)])
def test_more_than_2_to_the_31_elements_are_summed_through_a_codec(world_size, gib):
    """In four pieces, since a payload holds at most 2^30; every value is sent as 0.5, or as nothing."""
    need(gib)

    def rank(transport):
        values = np.zeros(ELEMENTS_2_31, np.float32)
        values[places(values.size)] = 0.5
        call = Communicator(transport, timeout_seconds=280).prepare_all_reduce(
            "parameter_server", make_codec("tbq(tau=0.5)"), (0, values.size), partitions=4
        )
        call.run(values, None, 1.0)
        return values[places(values.size)].tolist(), int(np.count_nonzero(values))

    wanted = places(ELEMENTS_2_31)
    assert run_ranks(world_size, rank) == [([0.5] * len(wanted), len(wanted))] * world_size


def test_a_sparse_codec_finds_entries_beyond_index_2_to_the_31():
    need(11)
    values, codec = np.zeros(ELEMENTS_2_31, np.float32), make_codec("sparse(density=1e-6)")
    values[-1], values[1 << 31] = 5.0, -7.0
    payload = np.zeros(codec.max_nbytes(values.size), np.uint8)
    payload = payload[: codec.encode(values, None, payload)]
    decoded = np.zeros(ELEMENTS_2_31, np.float32)
    codec.decode(payload, decoded)
    assert (decoded[-1], decoded[1 << 31]) == (5.0, -7.0)


def test_a_dense_codec_refuses_more_elements_in_one_payload_than_its_header_holds():
    values, codec = np.zeros(ELEMENTS_2_31, np.float32), make_codec("onebit")  # zero pages, which take no memory
    with pytest.raises(CodecError, match="a payload holds at most 1073741824: split the tensor"):
        codec.encode(values, None, np.zeros(1024, np.uint8))


@pytest.mark.parametrize("strategy", [name for name in names("all_reduce") if name != "native"])
def test_every_strategy_builds_a_part_for_more_than_2_to_the_32_elements(strategy):
    numel = (1 << 32) + 5
    part = build_part("all_reduce", strategy, 1, 4, numel)
    written = [each.write for each in part.instructions if each.write is not None and each.write.buffer == "data"]
    assert part.numel == numel
    assert max(each.stop for each in written) == numel
    assert min(each.start for each in written) == 0
