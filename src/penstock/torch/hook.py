"""A communication hook that hands each bucket to the executor, on one thread and in one order.

torch calls the hook from its backward thread, bucket after bucket, in the same order on every rank. Each bucket goes to
one communication thread, which reduces it by the strategy of the plan over a process group of its own, so that its
messages never meet the user's. The future torch waits for is completed by that thread.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.runtime.communicator import Communicator
from penstock.runtime.transport.c10d import C10dTransport
from penstock.torch.planning import NATIVE, check_strategy

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[..., Future]


TIMEOUT_SECONDS = 300.0  # of one message


def comm_hook(
    strategy: str = "ring", process_group: dist.ProcessGroup | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> tuple[object, Hook]:
    """Return what torch's own wrapper takes: `ddp.register_comm_hook(*comm_hook("ring"))`.

    Every rank must call this at the same time, as it makes a process group.
    """
    check_strategy(strategy)
    group = process_group or dist.group.WORLD
    if group is None:
        raise PlanError("no process group; call torch.distributed.init_process_group first")
    return None, BucketSender(group, timeout_seconds, strategy).hook


class BucketSender:
    """Averages buckets by their planned strategies; buckets the plan does not know go by `otherwise`."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float, otherwise: str = NATIVE) -> None:
        self._engine, self._otherwise = group, otherwise
        ours = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
        self._communicator = Communicator(C10dTransport(ours), timeout_seconds=timeout_seconds)
        self._strategies: dict[frozenset[int], str] = {}
        self._overlap = True
        self._held: list[tuple[torch.Tensor, str, Future]] = []  # where a plan sends nothing before the end
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-sender")
        self.failure: Exception | None = None  # torch wraps what a future raises; the original is kept here

    def follow(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Use the plan's strategies from now on; `parameters` by the names the plan uses."""
        self._overlap = plan.overlap
        self._strategies = {
            frozenset(id(parameters[name]) for name in bucket.tensors): bucket.strategy for bucket in plan.buckets
        }

    def hook(self, state: object, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]  # torch wants these
        """Average one bucket over all ranks."""
        values = bucket.buffer()
        values.div_(dist.get_world_size(self._engine))
        key = frozenset(id(parameter) for parameter in bucket.parameters())
        strategy = self._strategies.get(key, self._otherwise)
        if strategy == NATIVE and self._overlap:
            work = dist.all_reduce(values, group=self._engine, async_op=True)
            averaged: Future = work.get_future().then(lambda done: done.value()[0])
            return averaged
        future: Future = torch.futures.Future()
        self._held.append((values, strategy, future))
        if self._overlap or bucket.is_last():
            for job in self._held:
                self._thread.submit(self._reduce, *job)
            self._held = []
        return future

    def _reduce(self, values: torch.Tensor, strategy: str, future: Future) -> None:
        """Reduce one bucket; runs on the communication thread, and after a failure only passes that on."""
        try:
            if self.failure is not None:
                raise self.failure
            self._communicator.all_reduce(values, strategy=strategy)
            future.set_result(values)
        except Exception as error:
            self.failure = self.failure or error
            future.set_exception(error)  # type: ignore[arg-type]  # torch's stub has the result's type here

    def close(self) -> None:
        """End the communication thread once it has sent what it was given."""
        self._thread.shutdown()
