"""Holds in a wrapper what was decided: torch's buckets as planned, and a thread that sends them where torch would not.

torch's own all-reduce does where the plan asks for nothing else. A codec, momentum, clipping or another engine needs a
hook of ours, from the first iteration on; a hook of the user's goes before it.
"""

from typing import Any

import torch.distributed as dist

from penstock.exchange.compression import NATIVE
from penstock.exchange.traffic import Traffic, ring_nbytes
from penstock.plan import Plan, Route
from penstock.run_record import RouteUse
from penstock.torch.buckets import (
    Hook,
    TorchDDP,
    averaged,
    bucket_limits,
    gradient_nbytes,
    sending_order,
    take_buckets,
)
from penstock.torch.checkpoint import TorchMemory
from penstock.torch.sender import TIMEOUT_SECONDS, BucketSender


class Holder:
    """The buckets of one wrapper and who sends them."""

    def __init__(
        self, wrapper: TorchDDP, arguments: dict[str, Any], memory: TorchMemory, engine: str | None, is_watched: bool
    ) -> None:
        """`arguments` are those that torch's wrapper was made with; `is_watched`: drift is, at every iteration."""
        self.user_hook: Hook | None = None
        self.user_sample_rate: int | None = None  # of torch's clocks, where the user set it
        self.logged_before = 0  # iterations that loggers of earlier reducers counted
        self._wrapper, self._arguments, self._memory = wrapper, arguments, memory
        self.parameters = averaged(wrapper)
        self._engine, self._is_watched = engine, is_watched
        self._sender: BucketSender | None = None
        self._plan: Plan | None = None
        self._counted = 0  # iterations
        self._traffic = Traffic(0, 0)  # of iterations that torch communicated by itself

    @property
    def sender(self) -> BucketSender | None:
        """Who sends buckets; None where torch does."""
        return self._sender

    def traffic(self) -> Traffic:
        """Return what this rank has sent so far."""
        return self._traffic + (self._sender.bytes_sent() if self._sender else Traffic(0, 0))

    def routes_used(self) -> tuple[RouteUse, ...]:
        """Return what each route carried in the last iteration; by a hook of the user's, that is not known."""
        if self._sender is not None:
            return self._sender.exchange.routes_used()
        if self.user_hook is not None or not self._counted:
            return ()
        nbytes = gradient_nbytes(self.parameters)
        return (RouteUse(NATIVE, 1, nbytes, ring_nbytes(nbytes, self._world_size)),)

    def recover(self) -> None:
        """Go on after a gradient that was not finite: what is owed is known again."""
        if self._sender is not None:
            self._sender.exchange.recover()

    def hang_up(self) -> None:
        """Let ranks fail that wait for our buckets; nothing can be sent afterwards."""
        if self._sender is not None:
            self._sender.exchange.hang_up()

    def count_iteration(self) -> None:
        """Count an iteration, and what torch sent of it, where it did."""
        self._counted += 1
        if self._sender is None:
            nbytes = ring_nbytes(gradient_nbytes(self.parameters), self._world_size)
            self._traffic += Traffic(nbytes, nbytes)

    def hold(self, plan: Plan) -> None:
        """Make the plan's buckets."""
        self._plan = plan
        ours = not plan.overlap or any(bucket.route != Route(NATIVE) for bucket in plan.buckets)
        hook = self.user_hook
        if hook is None and (ours or self._always_ours):
            self._sender = self._sender or self._make_sender(Route(NATIVE))
            self._sender.follow(plan)
            hook = Hook(self._sender.hook)
        elif self._sender is not None:
            self._sender.close()
            self._traffic, self._sender = self.traffic(), None
        self._take(bucket_limits(plan, sending_order(self._wrapper)), hook)

    def keep(self, route: Route) -> None:
        """Leave torch's own buckets as they are and send all of them by one route."""
        if self.user_hook is None and (route != Route(NATIVE) or self._always_ours):
            if self._sender is None:
                self._sender = self._make_sender(route)
                Hook(self._sender.hook).register(self._wrapper)
            self._sender.exchange.send_others_by(route)
        self.time_iterations()

    def register(self, hook: Hook) -> None:
        """Register a hook of the user's, in the place of ours where a plan brought one; all ranks together."""
        if self._sender is None:
            hook.register(self._wrapper)
            self.user_hook = hook
        else:
            self._wrapper._check_comm_hook(hook.function)  # type: ignore[no-untyped-call]
            self.user_hook = hook
            assert self._plan is not None
            self.hold(self._plan)

    def take_back(self) -> None:
        """Make torch's own buckets again, after they were released."""
        ours = None if self._sender is None else Hook(self._sender.hook)
        self._take(None, self.user_hook or ours)

    def forget(self) -> None:
        """Drop the plan and who sent its buckets: the process group is another one, whose ranks plan anew."""
        self._traffic = self.traffic()
        if self._sender is not None:
            self._sender.exchange.close()  # without the other ranks, some of which may be gone
        self._plan = self._sender = None
        self._take(None, self.user_hook)

    def time_iterations(self) -> None:
        """Have torch time every iteration, or as often as the user said.

        On a GPU it waits for the device then: only where drift is watched. Otherwise the first ten and every hundredth.
        """
        if "reducer" not in vars(self._wrapper):
            return  # all gradients are delayed by torch's own option, and nothing is timed
        if self.user_sample_rate is not None:
            self._wrapper.reducer._set_ddp_runtime_logging_sample_rate(self.user_sample_rate)
        elif self._wrapper.device.type == "cpu" or self._is_watched:
            self._wrapper.reducer._set_ddp_runtime_logging_sample_rate(1)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: the communication thread."""
        return vars(self) | {"_sender": None, "_traffic": self.traffic(), "parameters": ()}

    def resume(self) -> None:
        """Take the parameters of a wrapper that was copied or unpickled."""
        self.parameters = averaged(self._wrapper)

    def _take(self, limits: list[float] | None, hook: Hook | None) -> None:
        self._memory.know_parameters(
            {each.name: each.parameter for each in self.parameters}
        )  # as they lie in memory now
        take_buckets(self._wrapper, self.parameters, self._arguments, limits, hook)
        self.logged_before = self._counted
        self.time_iterations()

    @property
    def _always_ours(self) -> bool:
        """Whether torch's own all-reduce would not do, whatever the plan says."""
        memory = self._memory
        return memory.compression.momentum.is_used or memory.compresses or self._engine is not None

    @property
    def _world_size(self) -> int:
        return dist.get_world_size(self._wrapper.process_group)

    def _make_sender(self, otherwise: Route) -> BucketSender:
        names = {id(each.parameter): each.name for each in self.parameters}
        leaves_out, group = self._wrapper.find_unused_parameters, self._wrapper.process_group
        return BucketSender(group, TIMEOUT_SECONDS, otherwise, self._memory, names, leaves_out, self._engine)
