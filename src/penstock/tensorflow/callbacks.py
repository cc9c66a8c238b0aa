"""Keras callbacks: the same initial weights on all ranks, and metrics of all of them."""

from typing import Any

import keras
import numpy as np

from penstock.adaptor.current import world
from penstock.errors import PlanError
from penstock.tensorflow.ops import broadcast_variables


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the root's weights and optimizer state when training begins."""

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank

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
        broadcast_variables([*self.model.weights, *optimizer.variables], self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics of an epoch by their averages over all ranks; put it before callbacks that read them."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average what was logged, all of it in one message; ranks must log the same metrics."""
        if not logs:
            return
        names = sorted(logs)
        world().gather(names, f"averaging the metrics {', '.join(names)}")
        (means,) = world().all_reduce([np.array([float(logs[name]) for name in names])])
        logs.update(zip(names, means.tolist(), strict=True))
