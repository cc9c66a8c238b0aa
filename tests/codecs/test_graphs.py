"""Work that is queued again and again: done as it is on the host, captured and replayed on a GPU."""

import gc
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from penstock.codecs.graphs import LANES, Replays  # noqa: E402

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Counting:
    """Adds one to each of many tensors, side by side; counts how often it was called."""

    def __init__(self, device: str) -> None:
        self.replays = Replays(torch.device(device))
        self.tensors = [torch.zeros(1000, device=device) for _ in range(3 * LANES)]
        self.calls = 0
        self.run = self.replays.make(self.work)

    def work(self) -> None:
        self.calls += 1
        self.replays.side_by_side([lambda one=one: one.add_(1) for one in self.tensors])
        for one in self.tensors:  # behind all of them
            one.mul_(2)

    def totals(self) -> set[float]:
        return {float(value) for one in self.tensors for value in one.unique()}


def test_on_the_host_work_is_done_each_time() -> None:
    counting = Counting("cpu")
    for _ in range(3):
        counting.run()
    assert counting.calls == 3
    assert counting.totals() == {14.0}


@pytest.mark.parametrize("stream", ["own", pytest.param("default")])
@GPU[0]
@GPU[1]
def test_on_a_gpu_work_is_launched_then_captured_then_replayed(stream: str) -> None:
    counting = Counting("cuda:0")
    torch.cuda.synchronize()
    used = torch.cuda.Stream() if stream == "own" else torch.cuda.default_stream()
    with torch.cuda.stream(used):
        for _ in range(4):
            counting.run()
    torch.cuda.synchronize()
    assert counting.calls == (2 if stream == "own" else 4)
    assert counting.totals() == {30.0}


@GPU[0]
@GPU[1]
def test_old_graphs_are_not_deleted_while_a_new_one_is_captured() -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # as often as can be
    try:
        for _ in range(5):
            counting = Counting("cuda:0")  # the last one is a cycle: `run` knows the work, which knows `run`
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    counting.run()
            torch.cuda.synchronize()
            assert counting.totals() == {14.0}
    finally:
        gc.set_threshold(*threshold)


class Pools:
    """torch's graphs, of which the last of a pool takes the pool with it."""

    def __init__(self):
        self.graphs, self.used, self.replayed = {}, set(), 0

    def make(self):
        pools, pool = self, []

        class Graph:
            def capture_begin(self, pool_handle=None, **options):
                pool.append(options["pool"])
                assert pools.graphs.get(pool[0]) or pool[0] not in pools.used, "a pool that was given up"
                pools.used.add(pool[0])

            def capture_end(self):
                pools.graphs[pool[0]] = pools.graphs.get(pool[0], 0) + 1

            def replay(self):
                pools.replayed += 1

            def __del__(self):
                pools.graphs[pool[0]] -= 1

        return Graph()


def test_the_pool_outlives_graphs_of_buckets_that_come_no_more(monkeypatch):
    pools, done = Pools(), []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", pools.make)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    replays = Replays(SimpleNamespace(type="cuda", index=0))
    for number in range(3):  # plans, whose buckets are let go
        replay = replays.make(lambda number=number: done.append(number))
        for _ in range(3):
            replay()
        del replay
    assert done == [0, 0, 1, 1, 2, 2]  # as it is, and as it is captured
    assert pools.replayed == 6
