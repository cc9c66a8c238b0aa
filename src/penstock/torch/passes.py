"""Tells of every backward pass that torch's reducer synchronises, and of no other.

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
