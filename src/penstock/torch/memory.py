"""What an exchange of gradients remembers from one iteration to the next: what is owed, velocities, counters.

The model keeps it, not the communication thread, and saves it with its checkpoints.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from penstock.codecs.header import ON_NONFINITE
from penstock.errors import CodecError, NonFiniteError
from penstock.torch.checkpoint import FORMAT, State, state_for
from penstock.torch.compression import Compression
from penstock.torch.residuals import Residuals


class Scaler(Protocol):
    """What is asked of torch's GradScaler."""

    def get_scale(self) -> float:
        """Return what losses are multiplied by now."""


class Memory:
    """Residuals and velocities of all parameters, with what it takes to undo an iteration or to resume."""

    def __init__(
        self,
        compression: Compression | None = None,
        on_nonfinite: str = "raise",
        scaler: Scaler | None = None,
    ) -> None:
        """`scaler` is the GradScaler of the training loop, where there is one: residuals follow its scale."""
        if on_nonfinite not in ON_NONFINITE:
            raise CodecError(f"on_nonfinite is {on_nonfinite!r}; wanted one of {', '.join(ON_NONFINITE)}")
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise CodecError(f"grad_scaler is {scaler!r}; wanted torch's GradScaler, whose get_scale residuals follow")
        self.compression = compression or Compression()
        self.residuals, self.velocities = Residuals(), Residuals()
        self.skips = on_nonfinite == "skip" or scaler is not None
        self.spoilt = False  # this iteration's gradients are not finite on some rank: its step will be skipped
        self.compresses = False  # some bucket is or was compressed, on all ranks alike: something may be owed
        self._failed = False  # a gradient was not finite, and nothing was saved to go back to
        self._scaler, self._scale = scaler, 1.0
        self.iterations = 0  # that compressed something; warm-up counts them
        self._counted = False  # this one is among them

    def begin(self) -> None:
        """Begin an iteration: undo what a skipped step sent, and follow the gradient scaler."""
        self._check()
        self._undo()
        if (scale := self.loss_scale) != self._scale:  # also without a scaler, after one whose state was loaded
            for store in self._stores.values():
                store.multiply(scale / self._scale)
            self._scale = scale
        if self.skips:
            for store in self._stores.values():
                store.save()
        self.spoilt = self._counted = False

    def count(self) -> bool:
        """Count this iteration as one that compresses; say whether it was not counted before."""
        counted, self._counted = self._counted, True
        self.iterations += not counted
        return not counted

    def fail(self) -> None:
        """Note that this iteration's gradients were not finite, and are not to be skipped."""
        self._failed = True

    @property
    def options(self) -> dict[str, str]:
        """What all ranks must have asked for, as text."""
        return {**self.compression.options, "on_nonfinite": repr("skip" if self.skips else "raise")}

    @property
    def loss_scale(self) -> float:
        """What losses, and so gradients, are multiplied by now."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def state_dict(self, rank: int, world_size: int) -> State:
        """Return this rank's state: what a skipped step sent is not part of it."""
        self._check()
        self._undo()
        kept = {
            kind: {name: torch.from_numpy(values) for name, values in store.values().items()}
            for kind, store in self._stores.items()
        }
        counters = {"iterations": self.iterations, "scale": self._scale}
        return {"format": FORMAT, "rank": rank, "world_size": world_size, "memories": kept, **counters}

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> None:
        """Take this rank's share of the states of all ranks that there were."""
        state = state_for(states, rank, world_size)
        for kind, store in self._stores.items():
            store.load(state["memories"].get(kind, {}))
        self.iterations, self._scale = int(state["iterations"]), float(state["scale"])
        self.spoilt = self._failed = False
        self.compresses |= any(each["memories"].get("residual") for each in states)

    @property
    def _stores(self) -> dict[str, Residuals]:
        return {"residual": self.residuals, "velocity": self.velocities}

    def _check(self) -> None:
        """Refuse to go on after `fail`: part of that iteration was sent and never applied."""
        if self._failed:
            raise NonFiniteError(
                "a gradient was not finite before, so what is owed is no longer known; load the exchange state of the "
                'last checkpoint, or train with on_nonfinite="skip" to leave out such steps'
            )

    def _undo(self) -> None:
        """Forget what an iteration did whose step was skipped."""
        if self.skips and self.spoilt:
            for store in self._stores.values():
                store.restore()
