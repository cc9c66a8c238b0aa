"""The wrapper a job trains with: torch's own DistributedDataParallel, or ours with the job's plan and codec."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from penstock.network import Network
from penstock.plan import Plan
from penstock.timeline import Timeline
from penstock.torch import DistributedDataParallel as PlannedDDP
from penstock.trace import Trace
from penstock.train.job import Job
from penstock.train.timing import stock_timeline

PROFILED = 5  # iterations that the wrapper profiles before it plans


class Wrapped:
    """A model that is trained by several workers, with the questions that a report asks of it."""

    def __init__(self, module: nn.Module, job: Job, device: torch.device, plan: Plan | None) -> None:
        """`plan` is that of the run which is resumed, where there is one."""
        options: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" else {}
        self._ours: Any = None
        if job.is_stock:
            self.model: TorchDDP = TorchDDP(module, **options)
            self.model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]
        else:
            how: dict[str, Any] = {
                "planner": job.planner,
                "strategy": job.strategy,
                "codec": job.codec_spec,
                "plan": plan,
                "network": job.network or None,
            }
            self.model = self._ours = PlannedDDP(module, profile_iterations=PROFILED, **how, **options)
        # Once planned, torch settles its buckets in the second iteration; from then on nothing changes any more.
        self.settling_iterations = 2 if job.is_stock or plan is not None else PROFILED + 2
        self._iterations = 0

    @property
    def plan(self) -> Plan | None:
        """The plan in force, where one is."""
        return self._ours.plan if self._ours is not None else None

    @property
    def found(self) -> tuple[Trace | None, Network | None]:
        """What the plan was made from."""
        decision = getattr(self._ours, "decision", None)
        return (None, None) if decision is None else (decision.trace, decision.network)

    def explain(self) -> str:
        """Say in words what was decided."""
        return self._ours.explain() if self._ours is not None else "torch's own DistributedDataParallel"

    def count_iteration(self) -> None:
        """Take note of a synchronised iteration: torch's own wrapper does not count."""
        self._iterations += 1

    def traffic(self) -> tuple[int, int]:
        """Return the bytes this rank has sent so far, and those of dense gradients; of torch's all-reduce, a ring's."""
        if hasattr(self._ours, "bytes_sent"):
            traffic = self._ours.bytes_sent()
            return traffic.sent_nbytes, traffic.dense_nbytes
        world_size = self.model.process_group.size()
        nbytes = self._iterations * (2 * (world_size - 1) * gradient_nbytes(self.model.module) // world_size)
        return nbytes, nbytes

    def measured_timeline(self) -> Timeline | None:
        """Return the last iteration as it was, on this rank."""
        if hasattr(self._ours, "measured_timeline"):
            found: Timeline | None = self._ours.measured_timeline()
            return found
        return stock_timeline(self.model)

    def exchange_state(self) -> dict[str, Any] | None:
        """Return what this rank still owes; None where nothing is ever owed."""
        owed: dict[str, Any] | None = None
        if hasattr(self._ours, "exchange_state_dict"):
            owed = self._ours.exchange_state_dict()
        return owed

    def load_exchange_states(self, states: list[dict[str, Any] | None]) -> None:
        """Take over from the states of all ranks of an earlier run."""
        if hasattr(self._ours, "load_exchange_state_dict"):
            self._ours.load_exchange_state_dict([state for state in states if state is not None])


def gradient_nbytes(module: nn.Module) -> int:
    """Return the bytes of all gradients."""
    return sum(each.numel() * each.element_size() for each in module.parameters() if each.requires_grad)
