"""Holds in a wrapper what was decided: torch's buckets as planned, and a thread that sends them where torch would not.

torch's own all-reduce does where the plan asks for nothing else. A codec, momentum, clipping or another engine needs a
hook of ours, from the first iteration on; a hook of the user's goes before it.
"""

from typing import Any

import torch.distributed as dist

from penstock.plan import Plan, Route
from penstock.torch.buckets import Hook, TorchDDP, bucket_limits, gradient_nbytes, take_buckets, trained
from penstock.torch.compression import NATIVE
from penstock.torch.memory import Memory
from penstock.torch.sender import TIMEOUT_SECONDS, BucketSender
from penstock.torch.traffic import Traffic, ring_nbytes


class Holder:
    """The buckets of one wrapper and who sends them."""

    def __init__(
        self, wrapper: TorchDDP, arguments: dict[str, Any], memory: Memory, engine: str | None, is_watched: bool
    ) -> None:
        """`arguments` are those that torch's wrapper was made with; `is_watched`: drift is, at every iteration."""
        self.user_hook: Hook | None = None
        self._wrapper, self._arguments, self._memory = wrapper, arguments, memory
        self._engine, self._is_watched = engine, is_watched
        self._sender: BucketSender | None = None
        self._traffic = Traffic(0, 0)  # of iterations that torch communicated by itself

    @property
    def sender(self) -> BucketSender | None:
        """Who sends buckets; None where torch does."""
        return self._sender

    def traffic(self) -> Traffic:
        """Return what this rank has sent so far."""
        return self._traffic + (self._sender.bytes_sent() if self._sender else Traffic(0, 0))

    def recover(self) -> None:
        """Go on after a gradient that was not finite: what is owed is known again."""
        if self._sender is not None:
            self._sender.recover()

    def hang_up(self) -> None:
        """Let ranks fail that wait for our buckets; nothing can be sent afterwards."""
        if self._sender is not None:
            self._sender.hang_up()

    def begin_iteration(self) -> None:
        """Get ready for the buckets of an iteration."""
        if self._sender is not None:
            self._sender.begin()

    def count_iteration(self) -> None:
        """Count what torch sent, where it did."""
        if self._sender is None:
            nbytes = ring_nbytes(gradient_nbytes(self._wrapper), dist.get_world_size(self._wrapper.process_group))
            self._traffic += Traffic(nbytes, nbytes)

    def hold(self, plan: Plan) -> None:
        """Make the plan's buckets."""
        hook = self.user_hook
        ours = not plan.overlap or any(bucket.route != Route(NATIVE) for bucket in plan.buckets)
        if hook is None and (ours or self._always_ours):
            self._sender = self._sender or self._make_sender(Route(NATIVE))
            self._sender.follow(plan)
            hook = (None, self._sender.hook)
        elif self._sender is not None:
            self._sender.close()
            self._traffic, self._sender = self.traffic(), None
        take_buckets(self._wrapper, self._arguments, bucket_limits(plan), hook)
        self._time_iterations()

    def keep(self, route: Route) -> None:
        """Leave torch's own buckets as they are and send all of them by one route."""
        if route != Route(NATIVE) or self._always_ours:
            if self._sender is None:
                self._sender = self._make_sender(route)
                TorchDDP.register_comm_hook(self._wrapper, None, self._sender.hook)
            self._sender.otherwise = route
        self._time_iterations()

    def take_back(self) -> None:
        """Make torch's own buckets again, after they were released."""
        ours = None if self._sender is None else (None, self._sender.hook)
        take_buckets(self._wrapper, self._arguments, None, self.user_hook or ours)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: the communication thread."""
        return vars(self) | {"_sender": None, "_traffic": self.traffic()}

    @property
    def _always_ours(self) -> bool:
        """Whether torch's own all-reduce would not do, whatever the plan says."""
        memory = self._memory
        return memory.compression.momentum.is_used or memory.compresses or self._engine is not None

    def _make_sender(self, otherwise: Route) -> BucketSender:
        names = {id(parameter): name for name, parameter in trained(self._wrapper)}
        leaves_out, group = self._wrapper.find_unused_parameters, self._wrapper.process_group
        return BucketSender(group, TIMEOUT_SECONDS, otherwise, self._memory, names, leaves_out, self._engine)

    def _time_iterations(self) -> None:
        """Have torch time every iteration; on a GPU only where somebody watches, since it waits for the device then."""
        if trained(self._wrapper)[0][1].device.type != "cpu" and not self._is_watched:
            return  # the first ten, and every hundredth
        self._wrapper._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]
