"""Detects each synchronised backward pass, the end of one, and the optimizer that steps with a wrapper's gradients."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.exchange.compression import adam_warning
from penstock.exchange.parameter_state import Memory


class BackwardPasses:
    """Calls `told()` once per synchronised backward pass, when its first gradient is there.

    A forward pass says nothing: an evaluation without `no_grad` is one too, and ranks need not evaluate alike. torch's
    reducer waits for gradients once a synchronised forward pass has run, and the next gradient of a parameter starts
    its work. So does this: it is told of forward passes, and the first gradient after one is a backward pass. Ranks
    that train together therefore count alike, whatever they do in between.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], told: Callable[[], None]) -> None:
        """`parameters`: of which at least one gets a gradient in every pass. `told` is a method, held weakly.

        Parameters outlive wrappers: nothing here keeps one alive, and its hooks go with it.
        """
        self.expected = False  # a forward pass has run, and no gradient has come since
        self._told = weakref.WeakMethod(told)
        handles = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in parameters]  # type: ignore[no-untyped-call]
        weakref.finalize(told.__self__, _remove, handles)  # type: ignore[attr-defined]

    def _on_gradient(self, _: torch.Tensor) -> None:
        if self.expected and (told := self._told()) is not None:
            self.expected = False
            told()


def _remove(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def at_end_of_backward(call: Callable[[], None]) -> bool:
    """Have `call` called once torch has finished the backward pass that is running; say whether one is.

    What a future raises torch turns into a RuntimeError around its text; what is raised here reaches the user as it is.
    Callbacks run in order, and the reducer adds its own, which waits for all buckets, with the last of them: this one
    adds itself again, so as to come after it. In `join`, ranks without data call the hook outside of a backward pass.
    """
    engine = torch.autograd.Variable._execution_engine
    try:
        engine.queue_callback(lambda: engine.queue_callback(call))
    except RuntimeError:
        return False
    return True


_INSTEAD = "codec='blocks(bits=4)', or penstock.torch.optim.CompressedAdamW"
_ADAPTIVE = (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop)


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether steps are divided by gradients of before: Adam's family has `betas`, whatever library it is of."""
    return "betas" in optimizer.defaults or isinstance(optimizer, _ADAPTIVE)


class OptimizerWatch:
    """Waits for the optimizer of some parameters; warns once where a codec is not safe for it.

    SGD follows the average of what arrives, so that an error made up for later is harmless. Adam and its kin divide by
    a second moment, into which a coarse codec's error goes as if it were gradient (`docs/choosing-a-codec.md`). An
    optimizer is seen at its first step, by a hook that torch calls for all optimizers.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], memory: Memory, codecs: Iterable[str], warns: bool) -> None:
        """`codecs` are those that the user named; `warns`: this rank says what is to be said."""
        self.adaptive: bool | None = None  # None: no optimizer has stepped yet
        self._parameters = {id(each) for each in parameters}
        self._memory, self._codecs, self._warns = memory, tuple(codecs), warns
        _watches.add(self)
        _listen()

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that is about to step, if it has parameters of ours."""
        if any(id(each) in self._parameters for group in optimizer.param_groups for each in group["params"]):
            self.adaptive = is_adaptive(optimizer)
            _watches.discard(self)
            self._warn(type(optimizer).__name__)

    def _warn(self, name: str) -> None:
        warning = adam_warning(self._codecs, name, _INSTEAD)
        if warning and self.adaptive and self._warns and self._memory.moments is None:
            warnings.warn(warning, stacklevel=3)


_watches: WeakSet[OptimizerWatch] = WeakSet()
_hooks: list[Any] = []


def _listen() -> None:
    """Have torch tell of every optimizer's steps, once for the process."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_on_step))


def _on_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
    for watch in list(_watches):
        watch.see(optimizer)
