"""What an exchange of gradients remembers from one iteration to the next: what is owed, velocities, factors, counters.

The model keeps it, not the communication thread, and saves it with its checkpoints.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.codecs.header import ON_NONFINITE
from penstock.errors import CodecError, FormatError, NonFiniteError, PenstockError, PlanError
from penstock.exchange.arrays import NUMPY, Arrays, Buffer, Floats
from penstock.exchange.compression import Scheme
from penstock.exchange.factors import Factors
from penstock.exchange.residuals import Layout, Residuals
from penstock.exchange.state import FACTOR, FORMAT, State, check_states, state_for


class Scaler(Protocol):
    """torch's GradScaler, as far as residuals follow it."""

    def get_scale(self) -> float:
        """Return what losses are multiplied by now."""


class Moments(Protocol):
    """An optimizer whose momentum is exchanged instead of gradients (`torch/optim.py`)."""

    def codec(self, spec: str) -> str | None:
        """Return what a bucket travels by in this iteration whose plan says `spec`; None: dense."""

    def before(self, gradients: Sequence[tuple[str, Buffer]], loss_scale: float) -> None:
        """Replace what is to be compressed, flat and by name, by what is to be sent."""

    def after(self, averages: Sequence[tuple[str, Buffer]]) -> None:
        """Replace what came of it by what the optimizer is to find."""


class Loads(Protocol):
    """What lets ranks load a state together (`torch/checkpoint.py`)."""

    by_exchange: bool  # whether the exchange, and not a wrapper, tells of backward passes

    def went_on(self) -> None:
        """Count a backward pass; raise where another rank waits for this one to load."""

    def agree(self, states: Sequence[State], complaint: PenstockError | None) -> None:
        """Raise the same on every rank unless all of them load the same states, and find nothing wrong with them."""


class Memory:
    """Residuals, velocities and factors of all parameters, with what it takes to undo an iteration or to resume."""

    def __init__(
        self,
        compression: Scheme | None = None,
        on_nonfinite: str = "raise",
        scaler: Scaler | None = None,
        arrays: Arrays = NUMPY,
    ) -> None:
        """`scaler` is the GradScaler of the training loop, where there is one: residuals follow its scale.

        `arrays`: what the framework does with its gradients where they are not numpy arrays.
        """
        if on_nonfinite not in ON_NONFINITE:
            raise CodecError(f"on_nonfinite is {on_nonfinite!r}; wanted one of {', '.join(ON_NONFINITE)}")
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise CodecError(f"grad_scaler is {scaler!r}; wanted torch's GradScaler, whose get_scale residuals follow")
        self.compression = compression or Scheme()
        self.arrays = arrays
        self.residuals, self.velocities = Residuals(arrays), Residuals(arrays)
        self.factors = Factors(arrays)
        self.skips = on_nonfinite == "skip" or scaler is not None
        self.moments: Moments | None = None  # of the optimizer, where that exchanges its momentum
        self.has_nonfinite = False  # this iteration's gradients are not finite on some rank: its step will be skipped
        self.compresses = False  # some bucket is or was compressed, on all ranks alike: something may be owed
        self._failed = False  # a gradient was not finite, and nothing was saved to go back to
        self._scaler, self._scale = scaler, 1.0
        self.iterations = 0  # that compressed something; warm-up counts them
        self.counted = False  # this one is among them
        self.loads: Loads | None = None  # tells other ranks of loads, where there are any
        self._known: dict[str, None] = {}  # names of parameters, as far as they are known
        self._layouts: dict[str, Layout] = {}  # of what is kept, by name

    def know(self, layouts: Mapping[str, Layout]) -> None:
        """Take note that buckets are made of these parameters, as they lie in memory now; what is owed follows."""
        for name, now in layouts.items():
            before = self._layouts.get(name)
            if before is not None and before.shape != now.shape:
                found = f"has shape {before.shape}, its parameter {now.shape}"
                raise PlanError(f"residual of {name!r} {found}; load the state of this model")
            if before is not None and before != now:
                for store in self.stores.values():
                    store.rearrange(name, before, now)
                self.factors.rearrange(name)
            self._layouts[name] = now
            self._known[name] = None

    def layout(self, name: str) -> Layout | None:
        """Return how a parameter lies in memory; None where it is not known."""
        return self._layouts[name] if name in self._known else None

    def check_parameters(self) -> None:
        """Raise where parameters lie in memory otherwise than when buckets were made; an adaptor may know that."""

    def begin(self) -> None:
        """Begin an iteration: undo what a skipped step sent, and follow the gradient scaler."""
        self._check()
        self.check_parameters()
        if self.loads is not None and self.loads.by_exchange:
            self.goes_on()
        self.undo()
        if (scale := self.loss_scale) != self._scale:  # also without a scaler, after one whose state was loaded
            for store in self.stores.values():
                store.multiply(scale / self._scale)
            self._scale = scale
        if self.skips:
            for store in self.stores.values():
                store.save()
            self.factors.save()
        self.has_nonfinite = self.counted = False

    def goes_on(self) -> None:
        """Tell other ranks that a backward pass begins, where anything is kept from one to the next."""
        momentum = self.compression.momentum.factor
        if self.loads is not None and (self.compression.codec is not None or momentum or self.compresses):
            self.loads.went_on()

    def count(self) -> None:
        """Count this iteration as one that compresses, once."""
        self.iterations += not self.counted
        self.counted = True

    def fail(self) -> None:
        """Note that this iteration's gradients were not finite, and are not to be skipped."""
        self._failed = True

    def recover(self) -> None:
        """Note that what is owed was replaced, and no longer that of an iteration which failed or was skipped."""
        self.has_nonfinite = self._failed = False

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
        self.undo()
        kept = {
            kind: {name: self._logical(name, values) for name, values in store.values().items()}
            for kind, store in self.stores.items()
        }
        if factors := self.factors.values():
            kept[FACTOR] = {name: self.arrays.saved(values) for name, values in factors.items()}
        counters = {"iterations": self.iterations, "scale": self._scale}
        return {"format": FORMAT, "rank": rank, "world_size": world_size, "memories": kept, **counters}

    def _logical(self, name: str, values: Floats) -> Any:
        layout = self._layouts.get(name) or Layout.contiguous(values.shape)
        return self.arrays.saved(layout.logical(values))

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> None:
        """Take this rank's share of the states of all ranks that there were; all ranks of a group must do so.

        Nothing is changed where any of them finds something wrong, which all of them raise then.
        """
        complaint, checked = None, list[State]()
        try:
            checked = check_states(states, {name: self._layouts[name].shape for name in self._known}, self.arrays)
        except FormatError as error:
            complaint = error
        if self.loads is not None:
            self.loads.agree(checked, complaint)
        elif complaint is not None:
            raise complaint
        self._take(state_for(checked, rank, world_size))
        self.recover()
        self.compresses |= any(each["memories"].get("residual") for each in checked)

    def _take(self, state: State) -> None:
        """Keep what a state has, in memory order; that of parameters which are not known yet will follow theirs."""
        self._layouts = {name: self._layouts[name] for name in self._known}
        for kind, store in self.stores.items():
            values: dict[str, Floats] = state["memories"][kind]
            for name, value in values.items():
                self._layouts.setdefault(name, Layout.contiguous(value.shape))
            store.load({name: self._layouts[name].in_memory(value) for name, value in values.items()})
        self.factors.load(state["memories"][FACTOR])
        self.iterations, self._scale = int(state["iterations"]), float(state["scale"])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process and its group."""
        return vars(self) | {"loads": None}

    @property
    def stores(self) -> dict[str, Residuals]:
        """What is kept by parameter, by its kind in checkpoints (`OWED` in `state.py`)."""
        return {"residual": self.residuals, "velocity": self.velocities}

    def _check(self) -> None:
        """Refuse to go on after `fail`: part of that iteration was sent and never applied."""
        if self._failed:
            raise NonFiniteError(
                "a gradient was not finite before, so what is owed is no longer known; load the exchange state of the "
                'last checkpoint, or train with on_nonfinite="skip" to leave out such steps'
            )

    def undo(self) -> None:
        """Forget what an iteration did whose step was skipped; between iterations, as often as wanted."""
        if self.skips and self.has_nonfinite:
            for store in self.stores.values():
                store.restore()
            self.factors.restore()
