"""The backward time of each tensor, and the forward time, from real training iterations.

MG-WFBP (section 5.1) waits for the GPU after every gradient, which slows the pass it measures; here a hook only marks
the moment and the marks are read afterwards. The code that runs the iterations drives the profiler, by calling the
model. A forward pass of the model starts an iteration, the gradient of its output ends the forward time (so the loss
counts as forward; nothing can be sent before either way), and the hook of each parameter marks its gradient as ready.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.errors import ProfileError
from penstock.planning.profile_summary import Pass, Profile, Times, summarise
from penstock.torch.clocks import Clock, HostClock, clock_for, device_name, one_device
from penstock.trace import ITEMSIZE, Trace
from penstock.trace import Tensor as TracedTensor

__all__ = ["Profile", "Profiler", "profile_backward"]


def profile_backward(
    model: nn.Module,
    step: Callable[[], object],
    *,
    iterations: int = 20,
    warmup: int = 5,
    name: str = "",
    batch: int = 0,
    source: str = "",
    on_step: Callable[[], object] = lambda: None,
) -> Profile:
    """Run `step` (a forward and a backward pass of `model`) and return what each gradient took.

    `name` and `batch` are for the trace; where missing they are the class of the model and the first dimension of
    its first input. `on_step` is called after each step, for a progress bar. What `step` raises is passed on.
    """
    profiler = Profiler(warmup=warmup, iterations=iterations)
    with profiler.attached(model):
        for _ in range(warmup + iterations):
            step()
            profiler.finish()
            on_step()
    return profiler.profile(name=name, batch=batch, source=source)


class _Marks:
    """An iteration under way: clock marks, not yet seconds."""

    __slots__ = ("end", "ready", "start")

    def __init__(self, start: Any) -> None:
        self.start, self.end = start, start  # end of the forward pass
        self.ready: list[tuple[str, Any]] = []  # in the order of the gradients


class Profiler:
    """Watches the iterations of a live training loop through hooks on a model.

    >>> profiler = Profiler(warmup=0)
    >>> model = nn.Linear(4, 2)
    >>> with profiler.attached(model):
    ...     model(torch.ones(3, 4)).sum().backward()
    >>> ", ".join(tensor.name for tensor in profiler.profile().trace.tensors)
    'bias, weight'
    """

    def __init__(self, *, warmup: int = 2, iterations: int = 10, counts: Callable[[], bool] = lambda: True) -> None:
        """Skip the first `warmup` iterations, and every one in which `counts()` is false as its forward pass starts.

        With gradient accumulation, `counts` says which backward pass is the one that synchronises. `iterations` is
        how many are likely to follow the warm-up: the clock is made ready for them, but more are welcome.
        """
        self._warmup, self._expected, self._counts = warmup, warmup + iterations, counts
        self._clock: Clock = HostClock()
        self._model: nn.Module | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._handles: list[RemovableHandle] = []
        self._current: _Marks | None = None
        self._finished: list[_Marks] = []
        self._batch = 1

    @property
    def iterations(self) -> int:
        """Finished iterations that count, warm-up excluded."""
        return max(0, len(self._finished) - self._warmup)

    def attach(self, model: nn.Module, hears_forward: bool = True) -> None:
        """Hook into `model`: parameters that require gradients, shared ones once, and its forward pass.

        Without `hears_forward`, `before_forward` and `after_forward` are to be called: torch.compile compiles a module
        with hooks otherwise than one without.
        """
        assert not self._handles, "detach before attaching to another model"
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        device = one_device(each.device for each in self._parameters.values())
        self._clock = clock_for(device, marks=self._expected * (len(self._parameters) + 3))
        self._model = model
        self._handles = [self._watch(name, parameter) for name, parameter in self._parameters.items()]
        if hears_forward:
            before = model.register_forward_pre_hook(self._on_forward, prepend=True, with_kwargs=True)
            after = model.register_forward_hook(self._on_output)
            self._handles += [before, after]

    def _watch(self, name: str, parameter: nn.Parameter) -> RemovableHandle:
        def hook(_: Tensor) -> None:
            marks = self._current
            if marks is not None:
                marks.ready.append((name, mark()))

        mark = self._clock.mark
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle

    def detach(self) -> None:
        """Remove every hook; what was seen is kept."""
        self.finish()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator["Profiler"]:
        """Attach for the length of a `with` block, however it ends."""
        self.attach(model)
        try:
            yield self
        finally:
            self.detach()

    def begin(self) -> None:
        """Start an iteration. The model's forward pass calls this; call it where that is not what comes first.

        A second forward pass before any gradient belongs to the same iteration (two views of one sample, say).
        """
        if self._current is not None and self._current.ready:
            self.finish()
        if self._current is None:
            self._current = _Marks(self._clock.start())

    def finish(self) -> None:
        """End the iteration under way, if gradients have come; gradients after this belong to none."""
        done, self._current = self._current, None
        if done is not None and done.ready:
            self._finished.append(done)

    def profile(self, *, name: str = "", batch: int = 0, source: str = "") -> Profile:
        """Return what was seen so far; waits for the device. Warns of tensors that changed their place."""
        self.finish()
        if not self.iterations:
            raise ProfileError(
                f"{len(self._finished)} backward passes seen, {self._warmup} of them to warm up; wanted at least one "
                "more: call the model itself (not its methods), then backward()"
            )
        times = summarise([self._read(marks) for marks in self._finished[self._warmup :]])
        _warn(times, self.iterations)
        return self._profile(times, name or type(self._model).__name__, batch or self._batch, source)

    def trace(self, *, name: str = "", batch: int = 0) -> Trace:
        """Return the trace of `profile()`."""
        return self.profile(name=name, batch=batch).trace

    def _read(self, marks: _Marks) -> Pass:
        since = partial(self._clock.seconds, marks.start)
        last: dict[str, Any] = {}
        for name, mark in marks.ready:
            last.pop(name, None)  # of several backward passes, the last completes the gradient
            last[name] = mark
        return Pass(since(marks.end), tuple((name, since(mark)) for name, mark in last.items()))

    def _profile(self, times: Times, name: str, batch: int, source: str) -> Profile:
        dtype, numels = gradient_sizes({each: self._parameters[each] for each in times.intervals})
        total = sum(time for time, _ in times.intervals.values())
        how = f"median of {self.iterations} iterations after {self._warmup} to warm up, backward spread "
        how += f"{times.backward_spread_seconds / total if total > 0 else 0.0:.1%}"
        trace = Trace(
            model=name,
            device=device_name(next(iter(self._parameters.values())).device),
            batch=batch,
            dtype=dtype,
            forward_seconds=times.forward_seconds,
            tensors=tuple(TracedTensor(each, numels[each], time) for each, (time, _) in times.intervals.items()),
            source=f"{source}; {how}" if source else f"penstock.torch.profile: {how}",
        )
        return Profile(
            trace=trace,
            iterations=self.iterations,
            forward_spread_seconds=times.forward_spread_seconds,
            backward_spread_seconds=times.backward_spread_seconds,
            tensor_spread_seconds=tuple(spread for _, spread in times.intervals.values()),
            moved=times.moved,
            occasional=times.occasional,
            unused=tuple(each for each in self._parameters if each not in times.intervals),
        )

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.before_forward(args, kwargs)

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self.after_forward(output)

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that the model's forward pass begins with these arguments."""
        if not torch.is_grad_enabled():
            return  # evaluation between two steps
        if not self._counts():
            self.finish()
            return
        self.begin()
        self._batch = next((len(each) for each in tensors_in((args, kwargs)) if each.dim()), 1)

    def after_forward(self, output: Any) -> None:
        """Note that the model's forward pass has ended with this output."""
        if self._current is None or not torch.is_grad_enabled():
            return
        self._current.end = self._clock.mark()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]

    def _on_output_gradient(self, gradient: Tensor) -> None:
        if self._current is not None and not self._current.ready:
            self._current.end = self._clock.mark()

    # A copy of the model must not report to this profiler, nor copy its clock marks.

    def __deepcopy__(self, memo: dict[int, Any]) -> "Profiler":
        return Profiler()

    def __reduce__(self) -> tuple[Any, ...]:
        return Profiler, ()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and mappings, such as what a model returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def _warn(times: Times, iterations: int) -> None:
    if times.moved:
        warnings.warn(
            f"gradients became ready in different orders; the most frequent one is kept. Moved: {_list(times.moved)}",
            stacklevel=3,
        )
    if times.occasional:
        warnings.warn(
            f"not every one of {iterations} iterations gave a gradient to {_list(times.occasional)}", stacklevel=3
        )


def _list(names: tuple[str, ...], limit: int = 8) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def gradient_sizes(parameters: Mapping[str, Tensor]) -> tuple[str, dict[str, int]]:
    """Return the type of the gradients and how many elements each has.

    The type is the one that most bytes have. Tensors of another type are counted in elements of that type, rounded
    up, so that their bytes, which is what is sent, are right.
    """
    nbytes = {name: each.numel() * each.element_size() for name, each in parameters.items()}
    by_type: Counter[str] = Counter()
    for name, each in parameters.items():
        by_type[str(each.dtype).removeprefix("torch.")] += nbytes[name]
    dtype = next((found for found, _ in by_type.most_common() if found in ITEMSIZE), "float32")
    return dtype, {name: -(-amount // ITEMSIZE[dtype]) for name, amount in nbytes.items()}
