"""What a wrapper can say of itself while it trains, for TensorBoard, Weights & Biases, or any other logger.

log = TensorBoardCallback(SummaryWriter())      # or WandbCallback(wandb.init())
for step, batch in enumerate(data):
    ...
    log(model, step)
"""

from abc import ABC, abstractmethod
from typing import Protocol

from penstock.errors import naming_extra

with naming_extra():
    from torch import nn

from penstock.integrations.exchange_files import wrapper_in
from penstock.torch.ddp import DistributedDataParallel

PREFIX = "penstock/"


def metrics(model: nn.Module | None) -> dict[str, float]:
    """Return what is known of the last iteration and of the whole run so far; nothing for a model that is not ours.

    iteration_seconds is the last forward and backward pass with its communication; waiting_seconds what of it nothing
    was computed in; predicted_seconds what the plan says of it, once there is one. Sent and dense megabytes are those
    of this rank so far. held_seconds is how long training stood still for measuring, compiling and planning.
    """
    if (wrapper := wrapper_in(model)) is None:
        return {}
    traffic, timeline = wrapper.bytes_sent(), wrapper.measured_timeline()
    found = {
        "sent_megabytes": traffic.sent_nbytes / 1e6,
        "dense_megabytes": traffic.dense_nbytes / 1e6,
        "held_seconds": wrapper.held_seconds,
    }
    if timeline is not None:
        found["iteration_seconds"] = timeline.iteration_seconds
        found["waiting_seconds"] = timeline.non_overlapped_seconds
    if wrapper.plan is not None and wrapper.plan.iteration_seconds > 0:
        found["predicted_seconds"] = wrapper.plan.iteration_seconds
    return {PREFIX + name: value for name, value in found.items()}


class Writer(Protocol):
    """What is used of torch.utils.tensorboard.SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write one number of one step."""

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        """Write a text."""


class Run(Protocol):
    """What is used of a run of Weights & Biases."""

    def log(self, data: dict[str, float], step: int) -> None:
        """Write the numbers of one step."""

    @property
    def summary(self) -> dict[str, object]:
        """What stands beside the run's name."""


class _Callback(ABC):
    """Writes a wrapper's metrics every few steps, and once what was decided and why. Make it on one rank only."""

    def __init__(self, every: int = 10) -> None:
        self._every, self._explained = every, ""

    def __call__(self, model: nn.Module, step: int) -> None:
        """Write what there is to say after this step."""
        wrapper = wrapper_in(model)
        if wrapper is None or step % self._every:
            return
        self.write(metrics(wrapper), step)
        if (decided := _plan_hash(wrapper)) != self._explained:
            self._explained = decided
            self.explain(wrapper.explain(), step)

    @abstractmethod
    def write(self, found: dict[str, float], step: int) -> None:
        """Write the numbers of one step."""

    @abstractmethod
    def explain(self, text: str, step: int) -> None:
        """Write what was decided."""


def _plan_hash(wrapper: DistributedDataParallel) -> str:
    return "" if wrapper.plan is None else wrapper.plan.hash


class TensorBoardCallback(_Callback):
    """Writes to a SummaryWriter of torch.utils.tensorboard."""

    def __init__(self, writer: Writer, every: int = 10) -> None:
        super().__init__(every)
        self._writer = writer

    def write(self, found: dict[str, float], step: int) -> None:
        """Write scalars."""
        for name, value in found.items():
            self._writer.add_scalar(name, value, step)

    def explain(self, text: str, step: int) -> None:
        """Write the text of `explain`, as it is laid out."""
        self._writer.add_text(f"{PREFIX}explain", "\n".join(f"    {line}" for line in text.splitlines()), step)


class WandbCallback(_Callback):
    """Writes to a run of Weights & Biases, as `wandb.init` returns it."""

    def __init__(self, run: Run, every: int = 10) -> None:
        super().__init__(every)
        self._run = run

    def write(self, found: dict[str, float], step: int) -> None:
        """Log the numbers as those of this step."""
        self._run.log(found, step=step)

    def explain(self, text: str, step: int) -> None:
        """Keep the text of `explain` in the run's summary."""
        self._run.summary[f"{PREFIX}explain"] = text
