"""Buckets of any sizes on their way together: every average is exact, and nothing is written while it is read.

All ranks are threads of one process. A codec of one byte a value takes the place of kernels: whole numbers are summed
without loss, and each payload says of which bucket and piece it is. Reads and writes of one launch, and of one group of
messages, happen at the same time on a device: here their places must be disjoint.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from penstock.runtime.device import queued  # noqa: E402
from penstock.runtime.device.messages import GroupedMessages  # noqa: E402
from penstock.runtime.device.queued import prepare_queued  # noqa: E402
from penstock.strategies import Options, build_compressed, coded_names, sparse_names  # noqa: E402

HEADER_NBYTES = 16


def spans(memory, pieces, itemsize=1):
    """Return the addresses of stretches of memory."""
    base = memory.data_ptr()
    return [(base + itemsize * start, base + itemsize * stop) for start, stop in pieces if start < stop]


def are_disjoint(writes, reads=()):
    """Say whether nothing is written that is written elsewhere, or read."""
    ordered = sorted([(*each, True) for each in writes] + [(*each, False) for each in reads])
    end, last_write = 0, 0  # of all before, and of those written
    for start, stop, writes_it in ordered:
        if start < (end if writes_it else last_write):
            return False
        end, last_write = max(end, stop), max(last_write, stop) if writes_it else last_write
    return True


class ByteForm:
    """Payloads of one byte a value behind a header that names bucket and piece."""

    def __init__(self, number):
        self.number = number

    def begin(self, count):
        return 0

    def max_nbytes(self, numel):
        return HEADER_NBYTES + numel

    def compile(self):
        pass

    def replayed(self, work):
        return work

    def queued_look(self, bucket, pieces):
        return SimpleNamespace(start=lambda: None, finish=lambda: None)

    def queued_encoder(self, bucket, residual, payloads, pieces, places, ordinals):
        stretches = self._stretches(pieces, places)

        def encode(_seed):
            assert are_disjoint(spans(payloads, stretches), spans(bucket, pieces, 4))
            found = [bucket[start:stop].to(torch.int8).view(torch.uint8) for start, stop in pieces]
            for (start, _), place, values in zip(pieces, places, found, strict=True):
                payloads[place : place + HEADER_NBYTES].view(torch.int64).copy_(torch.tensor([self.number, start]))
                payloads[place + HEADER_NBYTES : place + HEADER_NBYTES + len(values)] = values

        return encode

    def queued_decoder(self, bucket, payloads, pieces, places, adds):
        def decode():
            reads = [each for row in places for each in spans(payloads, self._stretches(pieces, row))]
            assert are_disjoint(spans(bucket, pieces, 4), reads)
            for turn, row in enumerate(places):
                for (start, stop), place in zip(pieces, row, strict=True):
                    values = self._values(payloads, start, stop, place).float()
                    bucket[start:stop] = bucket[start:stop] + values if adds or turn else values

        return decode

    def queued_merger(self, residual, payloads, pieces, places, others):
        def merge():
            ours, theirs = (spans(payloads, self._stretches(pieces, row)) for row in (places, others))
            assert are_disjoint(ours, theirs)
            for (start, stop), place, other in zip(pieces, places, others, strict=True):
                values = self._values(payloads, start, stop, other)
                self._values(payloads, start, stop, place).add_(values)

        return merge

    def _values(self, payloads, start, stop, place):
        assert payloads[place : place + HEADER_NBYTES].view(torch.int64).tolist() == [self.number, start]
        return payloads[place + HEADER_NBYTES : place + HEADER_NBYTES + stop - start].view(torch.int8)

    def _stretches(self, pieces, places):
        return [
            (place, place + self.max_nbytes(stop - start)) for (start, stop), place in zip(pieces, places, strict=True)
        ]


class Wire(GroupedMessages):
    """Messages between threads."""

    def __init__(self, rank, queues):
        super().__init__(None)
        self._rank, self._queues = rank, queues

    def calls(self, messages):
        return messages

    def _start(self, calls):
        sent, received = (
            [(memory, peer) for is_sent, memory, peer in calls if is_sent is way] for way in (True, False)
        )
        whole = partial(map, lambda one: spans(one[0], [(0, one[0].nbytes)])[0])
        assert are_disjoint([*whole(received)], [*whole(sent)])
        for memory, peer in sent:
            self._queues[self._rank, peer].put(memory.clone())
        for memory, peer in received:
            came = self._queues[peer, self._rank].get()
            assert came is not None, f"rank {peer} failed"
            memory.copy_(came)
        return []


def gradients(rank, step, number, numel):
    seed = 10_000 * step + 100 * number + rank
    return torch.randint(-7, 8, (numel,), generator=torch.Generator().manual_seed(seed)).float()


def train(rank, world_size, queues, strategies, buckets, steps):
    """Average all buckets in some steps, each step in an order of its own; return what is wrong."""
    messages, ready = Wire(rank, queues), []
    merging = {name: name in sparse_names() for name in strategies}
    for number, (name, sizes) in enumerate(buckets):
        bounds = list(accumulate(sizes, initial=0))
        codec = SimpleNamespace(name="bytes", fingerprint="", capabilities=SimpleNamespace(merging=merging[name]))
        program, batches = build_compressed(name, world_size, bounds, Options(block_numel=bounds[-1], ranks_per_node=2))
        form = ByteForm(number)
        ready.append((prepare_queued(program, rank, codec, form, batches, messages), torch.zeros(bounds[-1])))
    for step, order in enumerate(steps):
        through = []
        for number in order:
            program, data = ready[number]
            data.copy_(gradients(rank, step, number, len(data)))
            program.run(data)
            messages.behind(partial(through.append, number))
        messages.land()
        assert sorted(through) == sorted(order)
        for number in order:
            data = ready[number][1]
            wanted = sum(gradients(other, step, number, len(data)) for other in range(world_size))
            assert torch.equal(data, wanted), (step, number)
    return messages


def train_or_tell(rank, world_size, queues, *arguments):
    """Train; where that fails, let the others end too, which wait for messages."""
    try:
        return train(rank, world_size, queues, *arguments)
    except BaseException:
        for other in range(world_size):
            queues[rank, other].put(None)
        raise


def on_all_ranks(world_size, strategies, buckets, steps):
    queues = {(source, to): SimpleQueue() for source in range(world_size) for to in range(world_size)}
    with ThreadPoolExecutor(world_size) as pool:
        going = [
            pool.submit(train_or_tell, rank, world_size, queues, strategies, buckets, steps)
            for rank in range(world_size)
        ]
    failures = [each.exception() for each in going]
    for failure in failures:
        if failure is not None and "failed" not in str(failure):
            raise failure
    return [each.result() for each in going]


def test_rooms_are_needed_by_this_oracle_too(monkeypatch):
    """A ring's sums are passed on while the next bucket's are made: in one room they are written over."""
    buckets = [("ring", [9000])] * 3
    on_all_ranks(4, ["ring"], buckets, [range(3)])
    monkeypatch.setattr(queued, "rooms_needed", lambda *_: 1)
    with pytest.raises(AssertionError):
        on_all_ranks(4, ["ring"], buckets, [range(3)])


SIZES = st.lists(st.sampled_from([1, 5, 700, 1100, 2100, 4100, 9000]), min_size=1, max_size=4)


@settings(max_examples=8, deadline=None)
@given(data=st.data(), world_size=st.integers(1, 6))
def test_buckets_of_any_sizes_and_strategies_are_averaged_while_others_are_on_their_way(data, world_size):
    strategies = data.draw(st.lists(st.sampled_from(sorted({*coded_names(), *sparse_names()})), min_size=1, max_size=2))
    buckets = data.draw(st.lists(st.tuples(st.sampled_from(strategies), SIZES), min_size=1, max_size=7))
    steps = [data.draw(st.permutations(range(len(buckets)))) for _ in range(3)]
    on_all_ranks(world_size, strategies, buckets, steps)
