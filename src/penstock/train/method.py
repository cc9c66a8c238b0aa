"""The wrapper a job trains with: torch's own DistributedDataParallel, or ours with the job's plan and codec."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from penstock.exchange.traffic import Traffic
from penstock.network import Network
from penstock.plan import Plan
from penstock.planning.observed import measured_timeline
from penstock.planning.planning import PlannerName, Planning
from penstock.run_record import RouteUse
from penstock.runtime.transport import ring_nbytes
from penstock.timeline import Timeline
from penstock.torch import DistributedDataParallel as PlannedDDP
from penstock.torch import ParameterServers
from penstock.torch.clocks import synchronise
from penstock.torch.collective_errors import GroupRanks, together
from penstock.torch.state_file import parse_state, state_bytes
from penstock.trace import Trace
from penstock.train.job import MPI, Job, Saved
from penstock.train.save_state import undisturbed

PROFILED = 5  # iterations that the wrapper profiles before it plans


class Wrapped:
    """A model that is trained by several workers, with the questions that a report asks of it."""

    def __init__(
        self,
        module: nn.Module,
        job: Job,
        device: torch.device,
        saved: Saved | None = None,
        scaler: torch.amp.GradScaler | None = None,
        servers: ParameterServers | None = None,
    ) -> None:
        """`saved` is the run that goes on with as many workers as before: its plan is kept."""
        plan = saved.plan if saved is not None else None
        self._saved = saved
        options: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" else {}
        self._ours = None if job.is_stock else _planned(module, job, plan, options, scaler, servers)
        self.model: TorchDDP = self._ours or TorchDDP(module, **options)
        # Once planned, torch settles its buckets in the second iteration; from then on nothing changes any more.
        self.settling_iterations = 2 if job.is_stock or plan is not None else PROFILED + 2
        self._iterations = 0
        if self._ours is None:
            self.model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]

    @property
    def plan(self) -> Plan | None:
        """The plan in force, where one is."""
        return self._ours.plan if self._ours is not None else None

    @property
    def found(self) -> tuple[Trace | None, Network | None]:
        """What the plan was made from."""
        decision = self._ours.decision if self._ours is not None else None
        if (decision is None or decision.trace is None) and self._saved is not None:
            return self._saved.trace, self._saved.network
        return (None, None) if decision is None else (decision.trace, decision.network)

    def explain(self) -> str:
        """Say in words what was decided."""
        return self._ours.explain() if self._ours is not None else "torch's own DistributedDataParallel"

    def routes_used(self) -> tuple[RouteUse, ...]:
        """Return how the gradients of the last iteration really travelled; by torch's own wrapper, all as they are."""
        return self._ours.routes_used() if self._ours is not None else ()

    def count_iteration(self) -> None:
        """Take note of a synchronised iteration: torch's own wrapper does not count."""
        self._iterations += 1

    def traffic(self) -> Traffic:
        """Return what this rank has sent so far; of torch's own wrapper, what a ring sends."""
        if self._ours is not None:
            return self._ours.bytes_sent()
        nbytes = self._iterations * ring_nbytes(gradient_nbytes(self.model.module), self.model.process_group.size())
        return Traffic(nbytes, nbytes)

    def record_instructions(self) -> None:
        """Let the measured timeline show every instruction from now on, where our wrapper carries them out."""
        if self._ours is not None:
            self._ours.record_instructions()

    def measured_timeline(self) -> Timeline | None:
        """Return the last iteration as it was, on this rank; of torch's own wrapper, by torch's own clocks."""
        if self._ours is not None:
            return self._ours.measured_timeline()
        assert self.model.logger is not None
        self.model.logger.set_runtime_stats_and_log()
        data = self.model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        return measured_timeline(data, (), 0.0, self.model.process_group.rank())

    def exchange_state(self) -> dict[str, Any] | None:
        """Return what this rank still owes; None where nothing is ever owed."""
        return self._ours.exchange_state_dict() if self._ours is not None else None

    def load_exchange_states(self, states: list[dict[str, Any] | None]) -> None:
        """Take over from the states of all ranks of an earlier run."""
        if self._ours is not None:
            self._ours.load_exchange_state_dict([state for state in states if state is not None])


def _planned(
    module: nn.Module,
    job: Job,
    plan: Plan | None,
    options: dict[str, Any],
    scaler: torch.amp.GradScaler | None,
    servers: ParameterServers | None,
) -> PlannedDDP:
    return PlannedDDP(
        module,
        compression=job.compression,
        planning=Planning(
            cast(PlannerName, job.planner),
            job.all_reduce,
            network=job.network or None,
            plan=plan,
            profile_iterations=PROFILED,
        ),
        engine="mpi" if job.engine == MPI else None,
        grad_scaler=scaler,
        servers=servers,
        **options,
    )


def gradient_nbytes(module: nn.Module) -> int:
    """Return the bytes of all gradients."""
    return sum(each.numel() * each.element_size() for each in module.parameters() if each.requires_grad)


# The iterations before the first step: the wrapper plans, torch settles its buckets, and computing alone is timed.
# They use the first batch, update nothing, and leave no trace: buffers, random generators and residuals are put back.
# So every step that counts runs with the buckets of all later ones, and a resumed run adds up in the same order as an
# unbroken one.


TIMED = 3  # iterations without communication
Loss = Callable[[TorchDDP], torch.Tensor]  # of the first batch


def settle(loss: Loss, wrapped: Wrapped, device: torch.device) -> float:
    """Bring the wrapper into its lasting state and return the seconds that computing alone takes, on the slowest rank.

    Computing alone is a forward and a backward pass under `no_sync`, on all ranks at once: they share what they share.
    """
    buffers = [buffer.clone() for buffer in wrapped.model.module.buffers()]
    group = wrapped.model.process_group
    owed = _all_owed(wrapped.exchange_state(), group)
    with undisturbed():
        for _ in range(wrapped.settling_iterations):
            _compute(loss, wrapped)
            wrapped.count_iteration()
        seconds = median(_alone_seconds(loss, wrapped, device) for _ in range(TIMED))
    wrapped.model.zero_grad(set_to_none=True)
    wrapped.load_exchange_states(owed)
    with torch.no_grad():
        for buffer, before in zip(wrapped.model.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return slowest_seconds(seconds, group)


def _all_owed(mine: dict[str, Any] | None, group: dist.ProcessGroup | None) -> list[dict[str, Any] | None]:
    """Return what every rank owes, by rank."""
    held = GroupRanks(group).gather_bytes(state_bytes({"owed": mine}), "sharing what is owed")
    cpu = torch.device("cpu")
    return [parse_state(bytearray(each), f"what rank {rank} owes", cpu)["owed"] for rank, each in enumerate(held)]


def _compute(loss: Loss, wrapped: Wrapped) -> None:
    wrapped.model.zero_grad(set_to_none=True)
    loss(wrapped.model).backward()  # type: ignore[no-untyped-call]


def _alone_seconds(loss: Loss, wrapped: Wrapped, device: torch.device) -> float:
    group = wrapped.model.process_group
    with together("starting together", group):
        dist.barrier(group)
    start = perf_counter()
    with wrapped.model.no_sync():
        _compute(loss, wrapped)
    synchronise(device)
    return perf_counter() - start


def slowest_seconds(seconds: float, group: dist.ProcessGroup) -> float:
    """Return the largest of all ranks' values."""
    box = torch.tensor([seconds], dtype=torch.float64)
    with together("sharing times", group):
        dist.all_reduce(box, dist.ReduceOp.MAX, group=group)
    return float(box)
