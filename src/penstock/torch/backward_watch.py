"""Tells of every backward pass that torch's reducer synchronises, and of no other; and of the end of one.

A forward pass says nothing: an evaluation without `no_grad` is one too, and ranks need not evaluate alike. The reducer
waits for gradients once a synchronised forward pass has run, and the next gradient of a parameter starts its work. So
does this: it is told of forward passes, and the first gradient after one is a backward pass. Ranks that train together
therefore count alike, whatever they do in between.
"""

import weakref
from collections.abc import Callable, Sequence

import torch


class BackwardPasses:
    """Calls `told()` once per synchronised backward pass, when its first gradient is there."""

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
