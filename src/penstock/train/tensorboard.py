"""TensorBoard event files, where the optional package is installed."""

from typing import Any

from penstock.errors import TrainError
from penstock.train.events import Event

SCALARS = (
    "loss", "samples_per_second", "iteration_seconds", "compute_seconds", "hidden_seconds", "exposed_seconds",
    "bytes_per_iteration",
)  # fmt: skip


class TensorBoard:
    """Writes what events say as scalars."""

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise TrainError(
                "--tensorboard needs the package tensorboard, which is not here; `pip install 'penstock[tensorboard]'`"
            ) from None
        self._writer: Any = SummaryWriter(folder)

    def __call__(self, event: Event) -> None:
        """Write the scalars of an event."""
        if event.kind == "evaluated" and event.values["metric"] is not None:
            self._writer.add_scalar("metric", event.values["metric"], event.step)
        if event.kind == "steps":
            for name in SCALARS:
                if event.values[name] is not None:
                    self._writer.add_scalar(name, event.values[name], event.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
