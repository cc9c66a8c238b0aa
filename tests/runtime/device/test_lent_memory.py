"""Payloads that lie in the bucket: no word of it is written while it holds something that is still read."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from penstock.program import DATA, Op
from penstock.runtime.device.queued import lent_memory, steps_of_all
from penstock.runtime.device.rounds import widen
from penstock.runtime.layout import lay_out
from penstock.strategies import Options, build_compressed, coded_names


def four_bits(numel: int) -> int:
    """Return the bytes of a payload, about as `blocks(bits=4)` has them."""
    return 32 + numel // 2 + numel // 32


def prepared(strategy, rank, world_size, sizes, max_nbytes=four_bits):
    """Return what a rank does, in which steps, where its buffers lie, and which of them in the bucket."""
    bounds = list(accumulate(sizes, initial=0))
    options = Options(block_numel=max(bounds[-1], 1), ranks_per_node=2)
    program, batches = build_compressed(strategy, world_size, bounds, options)
    wide = widen(program)
    layout = lay_out(wide.part(rank), 4, max_nbytes, batches)
    steps = steps_of_all(wide)[rank]
    return wide.ranks[rank], steps, layout, lent_memory(wide.ranks[rank], steps, layout)


class Words:
    """The words of a bucket, each with what was written there last: of `data`, or of a buffer that lies there."""

    def __init__(self, layout, lent):
        self.layout, self.lent, self.starts = layout, lent, {name: low for name, (low, _) in layout.buffers().items()}
        self.holds = [DATA] * layout.batches.numel  # gradients, then averages

    def of(self, slice_):
        """Return which words a slice has in the bucket."""
        if slice_.buffer == DATA:
            return [word for low, high in self.layout.pieces(slice_) for word in range(low, high)]
        if slice_.buffer not in self.lent:
            return []
        place, moved = self.layout.place(slice_), self.lent[slice_.buffer] - self.starts[slice_.buffer]
        return range((place.start + moved) // 4, (place.stop + moved) // 4)

    def carry_out(self, instructions, step):
        """Read all that a step reads, then write all that it writes: its parts run at the same time."""
        ones = [instructions[index] for index in step.indices]
        for one in ones:
            for slice_ in (one.read, one.write if one.op is Op.MERGE else None):
                if slice_ is not None:
                    assert {self.holds[word] for word in self.of(slice_)} <= {slice_.buffer}, one
        written = [word for one in ones if one.write is not None for word in self.of(one.write)]
        read = [word for one in ones if one.read is not None and one.read.buffer != DATA for word in self.of(one.read)]
        assert not set(read) & set(written), "read and written at the same time"
        for one in ones:
            if one.write is not None:
                for word in self.of(one.write):
                    self.holds[word] = one.write.buffer


@settings(max_examples=60, deadline=None)
@given(
    strategy=st.sampled_from(sorted(coded_names())),
    world_size=st.integers(1, 6),
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=5),
    shrinks=st.sampled_from([2, 8, 32]),
)
def test_what_is_read_is_what_was_written_and_all_words_end_as_averages(strategy, world_size, sizes, shrinks):
    for rank in range(world_size):
        found = prepared(strategy, rank, world_size, sizes, lambda numel: 16 + 4 * numel // shrinks)
        instructions, steps, layout, lent = found
        words = Words(layout, lent)
        for step in steps:
            words.carry_out(instructions, step)
        assert set(words.holds) <= {DATA}


@pytest.mark.parametrize(
    ("strategy", "world_size", "lent"),
    [
        ("parameter_server", 4, {"in0", "in0.1", "in0.2"}),
        ("parameter_server", 2, {"in0"}),
        ("ring", 4, {"in0"}),
        ("all_gather", 4, set()),  # all of the bucket is written while payloads are read
        ("parameter_server", 1, set()),
    ],
)
def test_partial_sums_are_received_into_the_bucket(strategy, world_size, lent):
    for rank in range(world_size):
        assert set(prepared(strategy, rank, world_size, [100_000, 50_000])[3]) == lent


def test_of_two_and_a_half_payloads_one_and_three_quarters_take_memory_besides():
    """Four ranks: three quarters of a payload sent and as much received, and all finished sums."""
    _, _, layout, lent = prepared("parameter_server", 0, 4, [400_000])
    sizes = {name: stop - start for name, (start, stop) in layout.buffers().items()}
    besides = sum(nbytes for name, nbytes in sizes.items() if name not in lent)
    assert sum(sizes.values()) / four_bits(400_000) == pytest.approx(2.5, rel=0.01)
    assert besides / four_bits(400_000) == pytest.approx(1.75, rel=0.01)


def test_nothing_is_lent_where_no_stretch_of_the_bucket_is_long_enough():
    """Two hundred tensors of 2,000 elements: a rank's half of each is 4 KB, what it receives 54 KB."""
    assert prepared("parameter_server", 0, 2, [400_000])[3]
    assert not prepared("parameter_server", 0, 2, [2000] * 200)[3]
