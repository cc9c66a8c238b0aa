"""Kernels for the GPU: runs the generated Triton source of a program on torch tensors, on the current stream.

Nothing here waits for the device or copies from it, and sizes are plain arguments of the kernels, so that a new size
compiles nothing and every call can be captured in a CUDA graph. What a kernel finds wrong (a payload that encode cannot
have written, a gradient that is not finite) is a bit in `status`, in device memory; `check` is where the host looks.

With TRITON_INTERPRET=1 in the environment the same source runs on CPU tensors, which is how it is tested without a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.compll.backends.triton import prelude, select_kernels
from penstock.compll.backends.triton.run import MAX_PROGRAMS, Run, Workspace, load_source
from penstock.compll.backends.triton.starter import Starter
from penstock.compll.backends.triton.write_triton import Kernels
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.ir import Apply, Program
from penstock.compll.lower.host_known import Sizes
from penstock.compll.operators import OPERATORS, Operator
from penstock.errors import CodecError, NonFiniteError


@dataclass(slots=True)
class TritonKernels:
    """Encode and decode of one program, on one device."""

    program: Program
    device: Any
    functions: Mapping[str, Function] = field(default_factory=lambda: FUNCTIONS)
    operators: Mapping[str, Operator] = field(default_factory=lambda: OPERATORS)
    kernels: Kernels = field(init=False)
    status: Any = field(init=False)  # int32: see `prelude`
    processors: int = field(init=False)  # multiprocessors of the device
    in_order: bool = False  # calls captured on a stream are replayed on it: they may share its memory
    _functions: dict[str, Any] = field(init=False)
    _workspaces: dict[int, Workspace] = field(default_factory=dict)
    _sizes: dict[Any, Sizes] = field(default_factory=dict)
    _starter: Starter = field(default_factory=Starter)

    def __post_init__(self) -> None:
        self.device = torch.device(self.device)
        self.kernels = Kernels(self.program, self.functions)
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._functions = load_source(self.program.name, self.kernels.text)
        is_cuda = self.device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count if is_cuda else 1

    @property
    def source(self) -> str:
        """The generated module."""
        return self.kernels.text

    @property
    def draws(self) -> bool:
        """Whether encode draws random numbers: its seed is an argument that differs from call to call."""
        steps = (launch.step for launch in self.kernels.encode)
        return "seed" in self.source or any(isinstance(step, Apply) and step.stream for step in steps)

    def encode(
        self,
        gradient: Any,
        arguments: Mapping[str, Any],
        seed: int = 0,
        residual: Any = None,
        out: Any = None,
        last: Any = None,
        header: Any = None,
        status: Any = None,
        settle: bool = False,
    ) -> Any:
        """Return the body of the payload, at the start of `out` where that is given.

        With a `residual`, v = gradient + (residual - decode(last)) is encoded and left in `residual`: the error of this
        call is v - decode(this payload), taken off by the next one, or here where that is to be `settle`d. `header`
        is written before `out`, which must have room there. `status` is where this call reports, if not to `check`.
        """
        sizes = self.sizes("encode", gradient.numel(), arguments)
        out = torch.empty(sizes.nbytes, dtype=torch.uint8, device=self.device) if out is None else out[: sizes.nbytes]
        if residual is not None and last is not None and not self.kernels.is_elementwise:
            self.decode_add(last, residual, arguments, -1.0)
            last = None
        run = Run(self, sizes, seed, out, header)
        run.given["gradient_ptr"] = run.given["latest_ptr"] = gradient
        run.given["residual_ptr"] = gradient if residual is None else residual
        run.given["last_ptr"] = out if last is None else last
        run.given["FEEDBACK"], run.given["LAST"] = residual is not None, last is not None
        run.given["status_ptr"] = self.status if status is None else status
        run.given["SETTLE"] = settle and self.kernels.settles
        if residual is None:
            for launch in self.kernels.encode:
                run.launch(launch)
            return out
        if self.kernels.prepare is not None:
            run.launch(self.kernels.prepare)
            run.read_residual(residual)
        for launch in self.kernels.encode:
            run.launch(launch)
            if "FEEDBACK" in launch.constants:
                run.read_residual(residual)
        if settle and not self.kernels.settles:
            self.decode_add(out, residual, arguments, -1.0)
        return out

    def decode(
        self, payload: Any, numel: int, arguments: Mapping[str, Any], out: Any = None, header: Any = None
    ) -> Any:
        """Return the gradient, in `out` where that is given; a damaged payload leaves it and sets `status`."""
        out = torch.empty(numel, dtype=torch.float32, device=self.device) if out is None else out
        self._decode(payload, out, arguments, False, 1.0, header)
        return out

    def decode_add(
        self, payload: Any, out: Any, arguments: Mapping[str, Any], scale: float = 1.0, header: Any = None
    ) -> None:
        """Add `scale` times the decoded gradient to `out`: the product and the sum each rounded to float."""
        self._decode(payload, out, arguments, True, scale, header)

    def _decode(
        self, payload: Any, out: Any, arguments: Mapping[str, Any], add: bool, factor: float, header: Any
    ) -> None:
        sizes = self.sizes("decode", out.numel(), arguments)
        if payload.numel() != sizes.nbytes if sizes.is_exact else not 0 < payload.numel() <= sizes.nbytes:
            raise CodecError(f"a body of {payload.numel()} bytes; wanted {sizes.nbytes} for {out.numel()} elements")
        run = Run(self, sizes, 0, payload, header)
        run.given["out_ptr"], run.given["factor"], run.given["ADD"] = out, factor, add
        for launch in self.kernels.decode:
            run.launch(launch)

    def check(self, tensor: str = "the gradient") -> None:
        """Raise what kernels found wrong since the last check; waits for the device."""
        found = int(self.status.item())
        if not found:
            return
        self.status.zero_()
        if found & prelude.WRONG_GRADIENT.value:
            raise NonFiniteError(f"{tensor} holds values that are not finite")
        if found & prelude.WRONG_INDEX.value:
            raise CodecError("an index lies outside the gradient, or a value is not finite: the payload is damaged")
        raise CodecError("the header or a field is not what encode writes: the payload is damaged")

    # What calls share

    def sizes(self, procedure: str, numel: int, arguments: Mapping[str, Any]) -> Sizes:
        """Return what follows from a size and the parameters; worked out once."""
        key = (procedure, numel, *arguments.values())
        if key not in self._sizes:
            self._sizes[key] = Sizes(self.program, procedure, numel, arguments)
        return self._sizes[key]

    def workspace(self) -> tuple[Workspace, int]:
        """Return memory for the current stream, and the stream; while a graph is captured, memory of its own."""
        if self.device.type != "cuda":
            return self._workspaces.setdefault(0, self._new_workspace()), 0
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if torch.cuda.is_current_stream_capturing() and not (self.in_order and stream in self._workspaces):
            return self._new_workspace(), stream
        if stream not in self._workspaces:
            self._workspaces[stream] = self._new_workspace()
        return self._workspaces[stream], stream

    def _new_workspace(self) -> Workspace:
        ints = select_kernels.GUESS_BINS + select_kernels.STATE_INTS
        zeros = torch.zeros(ints + 4, dtype=torch.int32, device=self.device)
        most = max(launch.parts for launch in (*self.kernels.encode, *self.kernels.decode))
        slots = max(len(slots) for slots in self.kernels.slots.values())
        return Workspace(
            zeros[ints:],
            zeros[:ints],
            torch.empty(slots + 1, dtype=torch.int32, device=self.device),
            torch.empty(max(1, most) * MAX_PROGRAMS, dtype=torch.float64, device=self.device),
        )
