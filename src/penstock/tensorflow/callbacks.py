"""Keras callbacks as Horovod has them: initial weights, metrics of all ranks, and learning rates that warm up."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from penstock.adaptor.current import rank, size, world
from penstock.errors import PlanError
from penstock.tensorflow.ops import broadcast_variables


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the root's weights and optimizer state when training begins; `local_variables` stay as they are.

    `device`, of Horovod, has no effect.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = {id(each) for each in local_variables or ()}

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable as it is on this rank."""
        self._local.add(id(variable))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast what the model and its optimizer hold; the optimizer's variables are made now where they are not.

        Seeds of dropout are not among them: ranks draw different numbers.
        """
        if self.model.jit_compile:
            raise PlanError(
                "the model is compiled with jit_compile=True, and XLA cannot call Python, which averages gradients; "
                "pass jit_compile=False to model.compile"
            )
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        kept = [*self.model.weights, *optimizer.variables]
        broadcast_variables([each for each in kept if id(each) not in self._local], self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics of an epoch by their averages over all ranks; put it before callbacks that read them."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average what was logged, all of it in one message; ranks must log the same metrics."""
        if not logs:
            return
        names = sorted(logs)
        world().gather(names, f"averaging the metrics {', '.join(names)}")
        (means,) = world().all_reduce([np.array([float(logs[name]) for name in names])])
        logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to `initial_lr * multiplier(epoch)`, in epochs from `start_epoch` to before `end_epoch`.

    multiplier: a function, or a number m for m^(epoch - start_epoch). With `staircase` it is asked once an epoch, else
    before every batch, with the part of the epoch that is over. momentum_correction: velocities, which hold past steps
    of another learning rate, are multiplied by the new one over the old (Goyal et al., 2017, section 3).
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise PlanError("initial_lr is None; wanted the learning rate that the multiplier is of")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self._multiplier, self._epoch = multiplier, 0

    def multiplier(self, epoch: float) -> float:
        """Return what the learning rate is multiplied by."""
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return float(self._multiplier ** (epoch - self.start_epoch))

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has."""
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise PlanError("how many batches an epoch has is not known before its end; pass steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Take note of the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of this batch."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = float(self._optimizer.learning_rate)

    @property
    def _optimizer(self) -> Any:
        optimizer = self.model.optimizer
        return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer

    def _set(self, epoch: float) -> None:
        optimizer, new = self._optimizer, self.initial_lr * self.multiplier(epoch)
        old = float(optimizer.learning_rate)
        optimizer.learning_rate = new
        if self.momentum_correction and isinstance(optimizer, keras.optimizers.SGD) and optimizer.built and old:
            for velocity in getattr(optimizer, "momentums", ()):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Lets the learning rate grow from `initial_lr / size()` to `initial_lr`, a little with every batch."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(initial_lr, self._grown, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.warmup_epochs, self.verbose = warmup_epochs, verbose

    def _grown(self, epoch: float) -> float:
        """Return the part of the learning rate at the end of this batch, so that an epoch ends with a round number."""
        assert self.steps_per_epoch is not None
        over = (epoch + 1 / self.steps_per_epoch) / self.warmup_epochs
        return (1 + (size() - 1) * over) / size()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate, and say that it has grown."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self.warmup_epochs - 1 and rank() == 0:
            print(f"\nepoch {epoch + 1}: the learning rate is {float(self._optimizer.learning_rate):g} from now on")
