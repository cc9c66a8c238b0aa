"""`DistributedOptimizer`: a Keras 3 optimizer that averages gradients over all ranks before it applies them."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from penstock.adaptor.current import take_options
from penstock.adaptor.session import Session
from penstock.errors import PlanError
from penstock.exchange.state import State
from penstock.tensorflow.averaging import Averager, plain

_ADAPTIVE = (
    keras.optimizers.Adam,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
)  # steps are divided by gradients of before; AdamW, Adamax and Nadam are kinds of Adam


class _Distributed:
    """What is put before the class of an optimizer."""

    _penstock_options: Mapping[str, Any]

    @property
    def averager(self) -> Averager:
        """What averages the gradients of this optimizer."""
        if "_penstock" not in vars(self):
            own = ("passes", "average_passes")
            options = {name: value for name, value in self._penstock_options.items() if name not in own}
            if isinstance(self, keras.optimizers.LossScaleOptimizer):
                options["scaler"] = _Scale(self)
            object.__setattr__(self, "_penstock", Averager(**options))
        found: Averager = vars(self)["_penstock"]
        return found

    @property
    def session(self) -> Session:
        """What averages: its `explain()`, `bytes_sent()`, `measured_timeline()`, ...; after the first step."""
        return self.averager.session

    def exchange_state_dict(self) -> State:
        """Return what this rank still owes, for a checkpoint beside the model's; every rank has its own."""
        return self.session.state_dict()

    def load_exchange_state_dict(self, states: Sequence[State]) -> None:
        """Take over from the states of all ranks of an earlier run; on all ranks, also before the first step."""
        self.averager.load_state_dict(states)

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of a variable as it is on this rank, divided by the ranks unless told otherwise."""
        self.averager.local.add(id(variable))

    @plain  # type: ignore[untyped-decorator]
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average the gradients over all ranks, then do what the optimizer does."""
        _refuse_loss_scaling_outside()
        if not len(grads):
            return
        known = self._trainable_variables if trainable_variables is None else list(trainable_variables)  # type: ignore[attr-defined]
        if self._penstock_options["passes"] == 1:
            super().apply(self._averaged(grads, known), known)  # type: ignore[misc]
        else:
            self._apply_after_passes(list(grads), list(known))

    def _averaged(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        averages: list[Any] = self.averager.average(grads, variables, str(self.name), lend=True)  # type: ignore[attr-defined]
        inner = self.inner_optimizer if isinstance(self, keras.optimizers.LossScaleOptimizer) else self
        if self.averager.has_session:
            self.session.watch_optimizer(type(inner).__name__, isinstance(inner, _ADAPTIVE))
        return averages

    def _apply_after_passes(self, grads: list[Any], variables: list[Any]) -> None:
        """Add gradients up on this rank; average and apply their sum every so many passes."""
        passes = self._penstock_options["passes"]
        if not self.built:  # type: ignore[has-type]
            with tf.init_scope():
                self.build(variables)  # type: ignore[attr-defined]
            self.built = True
        if "_penstock_sums" not in vars(self):
            with tf.init_scope():
                pairs = zip(grads, variables, strict=True)
                sums = [None if one is None else tf.Variable(tf.zeros(each.shape, one.dtype)) for one, each in pairs]
                counter = tf.Variable(0, dtype=tf.int32)
            object.__setattr__(self, "_penstock_sums", (sums, counter))
        sums, counter = vars(self)["_penstock_sums"]
        for total, gradient in zip(sums, grads, strict=True):
            if total is not None:
                total.assign_add(tf.convert_to_tensor(gradient))
        counter.assign_add(1)
        scale = 1.0 / passes if self._penstock_options["average_passes"] else 1.0
        above = super()

        def step() -> Any:
            whole = [None if each is None else each * tf.cast(scale, each.dtype) for each in sums]
            above.apply(self._averaged(whole, variables), variables)  # type: ignore[attr-defined]  # of the plain class
            for each in (*(one for one in sums if one is not None), counter):
                each.assign(tf.zeros_like(each))
            return tf.constant(True)

        tf.cond(tf.equal(counter, passes), step, lambda: tf.constant(False))


class _Scale:
    """What losses are multiplied by, of Keras's `LossScaleOptimizer`."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def get_scale(self) -> float:
        """Return what losses are multiplied by now."""
        if not self._optimizer.built:
            return float(self._optimizer.initial_scale)
        return float(self._optimizer.dynamic_scale.value.numpy())


def DistributedOptimizer(  # noqa: N802  # as Horovod calls it
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Make a Keras 3 optimizer average gradients over all ranks before it applies them; return it.

    It stays what it is, with its state, and is saved as what it was: `keras.models.load_model` gives the plain one,
    `penstock.tensorflow.load_model` this. Gradients of a loss that Keras scales: wrap the `LossScaleOptimizer`.
    sparse_as_dense: make `tf.IndexedSlices` dense and average them so; otherwise all ranks' slices are gathered.
    backward_passes_per_step: gradients of so many calls are added up on each rank, and averaged and applied together;
    with `average_aggregated_gradients` divided by their number.
    options: `codec`, `density`, `strategy`, `planner`, `plan`, ..., as in `penstock.torch.DistributedDataParallel`;
    and Horovod's: `op` (Average or Sum), `compression`, `gradient_predivide_factor`, `groups`, `device_dense`, ...
    The first step compares ranks; all of them make it together.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer is {optimizer!r}; wanted a Keras 3 optimizer, such as keras.optimizers.Adam(1e-3)")
    if isinstance(optimizer, _Distributed):
        raise PlanError(f"{type(optimizer).__name__} averages gradients already; wrap it once")
    if backward_passes_per_step < 1:
        raise PlanError(f"backward_passes_per_step is {backward_passes_per_step}; wanted at least 1")
    given = {
        "op": take_options(options),
        "sparse_as_dense": sparse_as_dense,
        "scale_local": scale_local_gradients,
        "passes": backward_passes_per_step,
        "average_passes": average_aggregated_gradients,
        **options,
    }
    kind = type(optimizer)
    body = {"_penstock_options": given, "__module__": kind.__module__, "__doc__": kind.__doc__}
    name_in_files = keras.saving.get_registered_name(kind)  # of one that a user registered; else the class's own
    optimizer.__class__ = type(name_in_files, (_Distributed, kind), body)
    if name is not None:
        optimizer.name = name
    return optimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    **options: Any,
) -> keras.Model:
    """Load a model that Keras saved, with its optimizer's state, and make the optimizer average over all ranks.

    custom_optimizers: classes of a user's own; custom_objects: whatever else the file names. Options are those of
    `DistributedOptimizer`.
    """
    known = {each.__name__: each for each in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if model.optimizer is None:
        raise PlanError(
            f"{filepath} was saved without an optimizer; load it with keras.models.load_model, and compile it"
        )
    DistributedOptimizer(model.optimizer, **options)
    return model


def _refuse_loss_scaling_outside() -> None:
    """Refuse to be the optimizer inside of Keras's `LossScaleOptimizer`.

    That one looks for infinities before it calls us, on each rank by itself, and ranks without would wait for those
    with. `model.compile` wraps optimizers so where the policy is mixed_float16. It tells no one: the stack does.
    """
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_code.co_name == "_stateful_handle_finite_grads":
            raise PlanError(
                "Keras's LossScaleOptimizer around DistributedOptimizer would skip steps on some ranks only; give "
                "model.compile DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), the other way "
                "round"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back
