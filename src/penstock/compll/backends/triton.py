"""Kernels for the GPU: runs the generated Triton source of a program on torch tensors, on the current stream.

Nothing here waits for the device or copies from it, and sizes are plain arguments of the kernels, so that a new size
compiles nothing and every call can be captured in a CUDA graph. What a kernel finds wrong (a payload that encode cannot
have written, a gradient that is not finite) is a bit in `status`, in device memory; `check` is where the host looks.

With TRITON_INTERPRET=1 in the environment the same source runs on CPU tensors, which is how it is tested without a GPU.
"""

import linecache
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from penstock.compll.backends import triton_operators, triton_prelude, triton_select
from penstock.compll.backends.reference import evaluate_static
from penstock.compll.backends.triton_kernels import UNIT, Kernels, Launch
from penstock.compll.backends.triton_operators import Call, Operand
from penstock.compll.ir import GRADIENT, Apply, Expr, Filter, GroupReduce, Length, Map, Program, Read, is_static
from penstock.compll.layout import max_nbytes, size_at
from penstock.compll.types import Scalar
from penstock.errors import CodecError, NonFiniteError

BLOCK = 2048
WARPS = 4
PROGRAMS_PER_PROCESSOR = 8  # of kernels that reduce: enough to keep memory busy, few enough to add up at the end
MAX_PROGRAMS = 2048
FILTER_PROGRAMS = 1024
DTYPES = {
    "float32": torch.float32,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "uint16": torch.int32,
    "bool_": torch.bool,
}
NO_HEADER = None


def load_source(name: str, text: str) -> dict[str, Any]:
    """Return the functions of a generated module; Triton finds its text through `linecache`."""
    path = f"<penstock {name} {hash(text):x}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module: dict[str, Any] = {"__name__": f"penstock_generated_{name}"}
    exec(compile(text, path, "exec"), module)  # our own text, from our own IR
    return module


@dataclass(slots=True)
class Workspace:
    """Device memory that kernels of one stream leave zero behind them."""

    ticket: Any
    scratch: Any


@dataclass(slots=True)
class TritonKernels:
    """Encode and decode of one program, on one device."""

    program: Program
    device: Any
    kernels: Kernels = field(init=False)
    status: Any = field(init=False)  # int32: see `triton_prelude`
    _functions: dict[str, Any] = field(init=False)
    _workspaces: dict[int, Workspace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = torch.device(self.device)
        self.kernels = Kernels(self.program)
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._functions = load_source(self.program.name, self.kernels.text)

    @property
    def source(self) -> str:
        """The generated module."""
        return self.kernels.text

    def encode(
        self,
        gradient: Any,
        arguments: Mapping[str, Any],
        seed: int = 0,
        residual: Any = None,
        out: Any = None,
        last: Any = None,
        header: Any = None,
    ) -> Any:
        """Return the body of the payload, at the start of `out` where that is given.

        With a `residual`, v = gradient + (residual - decode(last)) is encoded and left in `residual`: the error of this
        call is v - decode(this payload), taken off by the next one, or by `decode_add(payload, residual, -1)`. `header`
        is written before `out`, which must have room there.
        """
        numel = gradient.numel()
        most = max_nbytes(self.program, numel, arguments)
        out = torch.empty(most, dtype=torch.uint8, device=self.device) if out is None else out
        if residual is not None and last is not None and not self.kernels.is_elementwise:
            self.decode_add(last, residual, arguments, -1.0)
            last = None
        run = Run(self, "encode", arguments, seed, numel, {"gradient_ptr": gradient, "latest_ptr": gradient}, out)
        run.pointers |= {
            "residual_ptr": gradient if residual is None else residual,
            "last_ptr": out if last is None else last,
        }
        run.constants |= {"FEEDBACK": residual is not None, "LAST": last is not None} | _header(run, header)
        if residual is not None and self.kernels.prepare is not None:
            run.launch(self.kernels.prepare)
            run.pointers["gradient_ptr"] = residual
            run.constants["FEEDBACK"] = False
        for launch in self.kernels.encode:
            run.launch(launch)
            if residual is not None and "FEEDBACK" in launch.constants:
                run.pointers["gradient_ptr"] = residual
                run.constants["FEEDBACK"] = False
        return out[:most]

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
        numel = out.numel()
        most = max_nbytes(self.program, numel, arguments)
        exact = not any(item.counts for item in self.program.layout.fields)
        if payload.numel() != most if exact else not 0 < payload.numel() <= most:
            raise CodecError(f"a body of {payload.numel()} bytes; wanted {most} for {numel} elements")
        run = Run(self, "decode", arguments, 0, numel, {"out_ptr": out}, payload)
        run.factor = factor
        run.constants |= {"ADD": add} | _header(run, header)
        for launch in self.kernels.decode:
            step = launch.step
            if isinstance(step, Apply) and step.name == self.program.decode.result:
                assert step.operator == "scatter", step.operator
                triton_operators.scatter_into(run.call(step), out, add, factor)
            else:
                run.launch(launch)

    def check(self, tensor: str = "the gradient") -> None:
        """Raise what kernels found wrong since the last check; waits for the device."""
        found = int(self.status.item())
        if not found:
            return
        self.status.zero_()
        if found & triton_prelude.WRONG_GRADIENT.value:
            raise NonFiniteError(f"{tensor} holds values that are not finite")
        if found & triton_prelude.WRONG_INDEX.value:
            raise CodecError("an index lies outside the gradient: the payload is damaged")
        raise CodecError("the header or a field is not what encode writes: the payload is damaged")

    def workspace(self) -> Workspace:
        """Return zeroed memory for the current stream; while a graph is captured, memory of the graph's own."""
        if self.device.type != "cuda":
            return self._workspaces.setdefault(0, self._new_workspace())
        if torch.cuda.is_current_stream_capturing():
            return self._new_workspace()
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if stream not in self._workspaces:
            self._workspaces[stream] = self._new_workspace()
        return self._workspaces[stream]

    def _new_workspace(self) -> Workspace:
        ints = triton_select.GUESS_BINS + triton_select.STATE_INTS
        zeros = torch.zeros(ints + 1, dtype=torch.int32, device=self.device)
        return Workspace(zeros[ints:], zeros[:ints])

    def processors(self) -> int:
        """Return how many multiprocessors the device has."""
        if self.device.type != "cuda":
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)


def _header(run: "Run", header: Any) -> dict[str, int]:
    run.pointers["header_ptr"] = run.pointers["payload_ptr"] if header is None else header
    return {"HEADER": 0 if header is None else header.numel()}


@dataclass(slots=True)
class Run:
    """One call: its memory, and the steps it is made of."""

    owner: TritonKernels
    procedure: str
    arguments: Mapping[str, Any]
    seed: int
    numel: int
    pointers: dict[str, Any]
    payload: Any
    factor: float = 1.0
    constants: dict[str, Any] = field(default_factory=dict)
    operands: dict[str, Operand] = field(default_factory=dict)
    workspace: Workspace = field(init=False)

    def __post_init__(self) -> None:
        owner = self.owner
        self.workspace = owner.workspace()
        slots = owner.kernels.slots[self.procedure]
        self.pointers |= {
            "payload_ptr": self.payload,
            "status_ptr": owner.status,
            "ticket_ptr": self.workspace.ticket,
            "scalars_ptr": torch.empty(len(slots) + 1, dtype=torch.int32, device=owner.device),
        }
        self.constants |= {"BLOCK": BLOCK, "UNIT": UNIT, "ALIGNED": self.payload.data_ptr() % 4 == 0}

    # Sizes

    def most(self, length: Length) -> int:
        """Return the most elements a length can have."""
        return -(-self._most(length.of) // length.group)

    def _most(self, vector: str) -> int:
        if vector in (GRADIENT, "latest"):
            return self.numel
        statement = self._statement(vector)
        if isinstance(statement, Filter):
            return self.most(statement.over)
        if isinstance(statement, Apply) and statement.bound is not None:
            return max(0, min(self.numel, int(evaluate_static(statement.bound, self.numel, self.arguments))))
        return self.numel  # of a vector that decode counts: checked to be no more

    def _statement(self, name: str) -> Any:
        program = self.owner.program
        statements = program.encode.statements if self.procedure == "encode" else program.decode.statements
        return next((statement for statement in statements if statement.name == name), None)

    def size(self, length: Length) -> Any:
        """Return the size of a length as a device integer; None where the host knows it."""
        slot = self.owner.kernels.slots[self.procedure].get(f"{length.of}.size")
        if slot is None:
            return None
        assert length.group == 1, "groups of counted vectors are not handed to operators"
        return self.pointers["scalars_ptr"][slot : slot + 1]

    # Steps

    def launch(self, launch: Launch) -> None:
        """Run one step."""
        match launch.step:
            case Apply():
                self.apply(launch.step)
            case Filter():
                self._filter(launch, launch.step)
            case GroupReduce():
                self._group(launch, launch.step)
            case _:
                self._pass(launch)

    def _start(self, launch: Launch, programs: int, **more: Any) -> None:
        given = {"numel": self.numel, "seed": self.seed, "factor": self.factor, "nbytes": self.payload.numel()}
        given |= {f"float_{k}": float(v) for k, v in self.arguments.items()}
        given |= {f"int_{k}": int(v) for k, v in self.arguments.items()}
        given |= self.pointers | self.constants | more
        chosen = [given[name] for name in (*launch.arguments, *launch.constants)]
        self.owner._functions[launch.kernel][(programs,)](*chosen, num_warps=WARPS, enable_fp_fusion=False)

    def _pass(self, launch: Launch) -> None:
        blocks = max(1, triton.cdiv(self.most(launch.length), BLOCK))
        for item in getattr(launch.step, "keeps", ()):
            self._keep(item.name, self.most(item.length), item.expr.type, item.length)
        if "PROGRAMS" not in launch.constants:
            self._start(launch, max(1, triton.cdiv(blocks, 2)))
            return
        programs = min(blocks, MAX_PROGRAMS, PROGRAMS_PER_PROCESSOR * self.owner.processors())
        count = len(launch.step.reduces)  # type: ignore[union-attr]
        self.pointers["partials_ptr"] = torch.empty(count * MAX_PROGRAMS, dtype=torch.float64, device=self.owner.device)
        self._start(launch, programs, PROGRAMS=MAX_PROGRAMS)

    def _keep(self, name: str, most: int, scalar: Scalar, length: Length) -> None:
        """Make room for a vector."""
        values = torch.empty(most, dtype=DTYPES[scalar.storage], device=self.owner.device)
        self.pointers[f"{name}_ptr"] = values
        self.operands[name] = Operand(values, self.size(length))

    def _filter(self, launch: Launch, step: Filter) -> None:
        units = max(1, triton.cdiv(self.most(step.over), UNIT))
        each = triton.cdiv(units, FILTER_PROGRAMS)
        programs = triton.cdiv(units, each)
        if launch.kernel.endswith("_mask"):
            self.pointers["mask_ptr"] = torch.empty(
                programs * each * UNIT // 8, dtype=torch.uint8, device=self.owner.device
            )
            self.pointers["counts_ptr"] = torch.empty(programs, dtype=torch.int32, device=self.owner.device)
            self._keep(step.name, self.most(step.over), step.value.type, step.length)
        self._start(launch, programs, units=each, PROGRAMS=FILTER_PROGRAMS)

    def _group(self, launch: Launch, step: GroupReduce) -> None:
        lanes = triton.next_power_of_2(step.group)
        rows = max(1, BLOCK // lanes)
        self._keep(step.name, self.most(step.length), step.expr.type, step.length)
        programs = max(1, triton.cdiv(self.most(step.length), rows))
        self._start(launch, programs, ROWS=rows, LANES=lanes)

    def call(self, step: Apply) -> Call:
        """Return an operator's operands."""
        operands = tuple(self.operand(name) for name in step.vectors)
        scalars = tuple(self._scalar(expr) for expr in step.scalars)
        return Call(step, operands, scalars, self.seed, self.workspace.scratch, self.owner.status)

    def operand(self, name: str) -> Operand:
        """Return a vector in memory."""
        if name == GRADIENT:
            return Operand(self.pointers["gradient_ptr"].reshape(-1), None)
        return self.operands[name]

    def _scalar(self, expr: Expr) -> int:
        if not is_static(expr):
            raise CodecError(f"{self.owner.program.name}: an operator's argument is computed from data; not on Triton")
        return int(evaluate_static(expr, self.numel, self.arguments))

    def apply(self, step: Apply) -> None:
        """Run a whole-vector operator."""
        if step.operator not in triton_operators.OPERATORS:
            raise CodecError(f"{self.owner.program.name}: operator {step.operator} has no Triton version")
        made = triton_operators.OPERATORS[step.operator](self.call(step))
        size = self.size(step.length) if step.length.group == 1 else None
        if size is not None:
            size.copy_(made.size) if made.size is not None else size.fill_(made.values.numel())
            made = Operand(made.values, size)
        self.operands[step.name] = made
        self.pointers[f"{step.name}_ptr"] = made.values


__all__ = ["Map", "Read", "TritonKernels", "load_source", "size_at"]
