"""Kernels for the GPU: runs the generated Triton source of a program on torch tensors, on the current stream.

Nothing here waits for the device or copies from it, and sizes are plain arguments of the kernels, so that a new size
compiles nothing and every call can be captured in a CUDA graph. What a kernel finds wrong (a payload that encode cannot
have written, a gradient that is not finite) is a bit in `status`, in device memory; `check` is where the host looks.

With TRITON_INTERPRET=1 in the environment the same source runs on CPU tensors, which is how it is tested without a GPU.
"""

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from penstock.compll.backends import triton_operators, triton_prelude, triton_select
from penstock.compll.backends.reference import evaluate_static
from penstock.compll.backends.triton_kernels import UNIT, Kernels, Launch
from penstock.compll.backends.triton_launch import Starter
from penstock.compll.backends.triton_operators import Call, Operand
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.ir import GRADIENT, LATEST, Apply, Expr, Filter, GroupReduce, Length, Program, is_static
from penstock.compll.layout import max_nbytes
from penstock.compll.operators import OPERATORS, Operator
from penstock.compll.types import Scalar, Vector
from penstock.errors import CodecError, NonFiniteError

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


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel is cut up; found by trying on an H200 (docs/decisions has the figures)."""

    block: int  # elements of a tile
    warps: int
    blocks: int = 1  # tiles of a program, where the crew is not fixed
    stages: int = 1  # tiles being loaded at a time


DECODE, ENCODE = Shape(2048, 4, 1), Shape(2048, 4, 2)
FILTER = Shape(2048, 4, stages=3)
REDUCE, FEEDBACK = Shape(1024, 4, stages=3), Shape(512, 4)


def load_source(name: str, text: str) -> dict[str, Any]:
    """Return the functions of a generated module; Triton finds its text through `linecache`."""
    path = f"<penstock {name} {hash(text):x}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module: dict[str, Any] = {"__name__": f"penstock_generated_{name}"}
    exec(compile(text, path, "exec"), module)  # our own text, from our own IR
    return module


@dataclass(slots=True)
class Workspace:
    """Device memory that calls on one stream share: tickets and histograms, zero between kernels, and scalars."""

    ticket: Any
    scratch: Any
    scalars: Any
    partials: Any


@dataclass(slots=True)
class TritonKernels:
    """Encode and decode of one program, on one device."""

    program: Program
    device: Any
    functions: Mapping[str, Function] = field(default_factory=lambda: FUNCTIONS)
    operators: Mapping[str, Operator] = field(default_factory=lambda: OPERATORS)
    kernels: Kernels = field(init=False)
    status: Any = field(init=False)  # int32: see `triton_prelude`
    processors: int = field(init=False)  # multiprocessors of the device
    _functions: dict[str, Any] = field(init=False)
    _workspaces: dict[int, Workspace] = field(default_factory=dict)
    _sizes: dict[Any, "Sizes"] = field(default_factory=dict)
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
            step = launch.step
            if not isinstance(step, Apply) or step.name != self.program.decode.result:
                run.launch(launch)
            elif step.operator == "scatter":
                triton_operators.scatter_into(run.call(step), out, add, factor)
            else:
                run.launch(launch)
                values = run.operand(step.name).values
                out.add_(values * factor) if add else out.copy_(values)

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

    # What calls share

    def sizes(self, procedure: str, numel: int, arguments: Mapping[str, Any]) -> "Sizes":
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
        if torch.cuda.is_current_stream_capturing():
            return self._new_workspace(), stream
        if stream not in self._workspaces:
            self._workspaces[stream] = self._new_workspace()
        return self._workspaces[stream], stream

    def _new_workspace(self) -> Workspace:
        ints = triton_select.GUESS_BINS + triton_select.STATE_INTS
        zeros = torch.zeros(ints + 4, dtype=torch.int32, device=self.device)
        steps = [launch.step for launch in (*self.kernels.encode, *self.kernels.decode)]
        most = max(len(getattr(step, "reduces", ())) for step in [*steps, None])
        slots = max(len(slots) for slots in self.kernels.slots.values())
        return Workspace(
            zeros[ints:],
            zeros[:ints],
            torch.empty(slots + 1, dtype=torch.int32, device=self.device),
            torch.empty(max(1, most) * MAX_PROGRAMS, dtype=torch.float64, device=self.device),
        )


class Sizes:
    """What follows from a gradient's size and the parameters: the most elements of every vector, and static scalars."""

    def __init__(self, program: Program, procedure: str, numel: int, arguments: Mapping[str, Any]) -> None:
        self.program, self.procedure, self.numel, self.arguments = program, procedure, numel, arguments
        self.nbytes = max_nbytes(program, numel, arguments)
        self.is_exact = not any(item.counts for item in program.layout.fields)
        self.given: dict[str, Any] = {"numel": numel}
        self.given |= {f"float_{name}": float(value) for name, value in arguments.items()}
        self.given |= {f"int_{name}": int(value) for name, value in arguments.items()}
        statements = program.encode.statements if procedure == "encode" else program.decode.statements
        self._statements = {statement.name: statement for statement in statements}
        self._most: dict[Length, int] = {}
        self._scalars: dict[int, int] = {}

    def most(self, length: Length) -> int:
        """Return the most elements a length can have."""
        if length not in self._most:
            self._most[length] = -(-self._most_of(length.of) // length.group)
        return self._most[length]

    def _most_of(self, vector: str) -> int:
        statement = self._statements.get(vector)
        if isinstance(statement, Filter):
            return self.most(statement.over)
        if isinstance(statement, Apply) and statement.bound is not None:
            return max(0, min(self.numel, int(evaluate_static(statement.bound, self.numel, self.arguments))))
        if self.procedure == "encode" or vector == GRADIENT:
            return self.numel
        return self._fitting(vector)

    def _fitting(self, vector: str) -> int:
        """Return how many elements of a vector that decode counts fit into a payload."""
        types = [item.type for item in self.program.layout.fields if item.length == Length(vector)]
        bits = sum(kind.element.bits for kind in types if isinstance(kind, Vector))
        return min(self.numel, self.nbytes * 8 // bits) if bits else self.numel

    def scalar(self, expr: Expr) -> int:
        """Return a scalar that size and parameters settle."""
        if id(expr) not in self._scalars:
            if not is_static(expr):
                name = self.program.name
                raise CodecError(f"{name}: an operator's argument is computed from data, which Triton cannot do")
            self._scalars[id(expr)] = int(evaluate_static(expr, self.numel, self.arguments))
        return self._scalars[id(expr)]


class Run:
    """One call: its memory, and the steps it is made of."""

    def __init__(self, owner: TritonKernels, sizes: Sizes, seed: int, payload: Any, header: Any) -> None:
        self.owner, self.sizes, self.seed = owner, sizes, seed
        self.workspace, self.stream = owner.workspace()
        self.slots = owner.kernels.slots[sizes.procedure]
        self.operands: dict[str, Operand] = {}
        self.given: dict[str, Any] = {
            **sizes.given,
            "seed": seed,
            "factor": 1.0,
            "nbytes": payload.numel(),
            "payload_ptr": payload,
            "header_ptr": payload if header is None else header,
            "status_ptr": owner.status,
            "ticket_ptr": self.workspace.ticket,
            "scalars_ptr": self.workspace.scalars,
            "partials_ptr": self.workspace.partials,
            "UNIT": UNIT,
            "PROGRAMS": MAX_PROGRAMS,
            "HEADER": 0 if header is None else header.numel(),
            "ALIGNED": payload.data_ptr() % 4 == 0,
        }

    def read_residual(self, residual: Any) -> None:
        """Let the steps that follow read what is being encoded from the residual's memory, where a pass has left it."""
        self.given["gradient_ptr"], self.given["FEEDBACK"] = residual, False

    def size(self, length: Length) -> Any:
        """Return the size of a length as a device integer; None where the host knows it."""
        slot = self.slots.get(f"{length.of}.size")
        if slot is None:
            return None
        assert length.group == 1, "groups of counted vectors are not handed to operators"
        return self.workspace.scalars[slot : slot + 1]

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

    def _start(self, launch: Launch, programs: int, shape: Shape = ENCODE) -> None:
        given, function = self.given, self.owner._functions[launch.kernel]
        given["BLOCK"], given["STAGES"] = shape.block, shape.stages
        arguments, constants = [given[n] for n in launch.arguments], [given[n] for n in launch.constants]
        self.owner._starter.start(function, programs, arguments, constants, shape.warps, self.stream)

    def _pass(self, launch: Launch) -> None:
        for item in getattr(launch.step, "keeps", ()):
            self._keep(item.name, item.length, item.expr.type)
        shape = self._shape(launch)
        blocks = max(1, -(-self.sizes.most(launch.length) // shape.block))
        # Where programs leave parts to be added up, or the size is the device's to know, a fixed crew loops.
        crew = min(blocks, MAX_PROGRAMS, PROGRAMS_PER_PROCESSOR * self.owner.processors)
        is_open = "PROGRAMS" not in launch.constants and launch.length.of == GRADIENT
        self._start(launch, -(-blocks // shape.blocks) if is_open else crew, shape)

    def _shape(self, launch: Launch) -> Shape:
        if "FEEDBACK" in launch.constants and self.given["FEEDBACK"]:
            return FEEDBACK
        if "PROGRAMS" in launch.constants:
            return REDUCE
        return DECODE if launch.kernel == "decode" else ENCODE

    def _keep(self, name: str, length: Length, scalar: Scalar) -> None:
        """Make room for a vector."""
        values = torch.empty(self.sizes.most(length), dtype=DTYPES[scalar.storage], device=self.owner.device)
        self.given[f"{name}_ptr"] = values
        self.operands[name] = Operand(values, self.size(length) if length.group == 1 else None)

    def _filter(self, launch: Launch, step: Filter) -> None:
        units = max(1, -(-self.sizes.most(step.over) // UNIT))
        each = -(-units // FILTER_PROGRAMS)
        programs = -(-units // each)
        if launch.kernel.endswith("_mask"):
            ints = programs * each * UNIT // 32
            memory = torch.empty(ints + programs, dtype=torch.int32, device=self.owner.device)
            self.given["mask_ptr"], self.given["counts_ptr"] = memory[:ints].view(torch.uint8), memory[ints:]
            self.given["units"], self.given["PROGRAMS"] = each, FILTER_PROGRAMS
            self._keep(step.name, step.over, step.value.type)
            self.operands[step.name] = Operand(self.operands[step.name].values, self.size(step.length))
        self._start(launch, programs, FILTER)
        self.given["PROGRAMS"] = MAX_PROGRAMS if launch.kernel.endswith("_compact") else FILTER_PROGRAMS

    def _group(self, launch: Launch, step: GroupReduce) -> None:
        lanes = triton.next_power_of_2(step.group)
        self.given["LANES"], self.given["ROWS"] = lanes, max(1, ENCODE.block // lanes)
        self._keep(step.name, step.length, step.expr.type)
        self._start(launch, max(1, -(-self.sizes.most(step.length) // self.given["ROWS"])))

    def call(self, step: Apply) -> Call:
        """Return an operator's operands."""
        operands = tuple(self.operand(name) for name in step.vectors)
        scalars = tuple(self.sizes.scalar(expr) for expr in step.scalars)
        return Call(step, operands, scalars, self.seed, self.workspace.scratch, self.owner.status, self.start)

    def start(
        self, kernel: Any, programs: int, arguments: Sequence[Any], constants: Sequence[Any], warps: int = 4
    ) -> None:
        """Launch a kernel of an operator."""
        self.owner._starter.start(kernel, programs, arguments, constants, warps, self.stream)

    def operand(self, name: str) -> Operand:
        """Return a vector in memory."""
        if name in (GRADIENT, LATEST):
            return Operand(self.given[f"{name}_ptr"].reshape(-1), None)
        return self.operands[name]

    def apply(self, step: Apply) -> None:
        """Run a whole-vector operator."""
        run = triton_operators.OPERATORS.get(step.operator) or self.registered(step.operator)
        made = run(self.call(step))
        size = self.size(step.length) if step.length.group == 1 else None
        if size is not None:
            size.copy_(made.size) if made.size is not None else size.fill_(made.values.numel())
            made = Operand(made.values, size)
        self.operands[step.name] = made
        self.given[f"{step.name}_ptr"] = made.values

    def registered(self, name: str) -> Callable[[Call], Operand]:
        """Return an operator that was registered from Python: its `triton` source is a function on torch tensors."""
        source = self.owner.operators[name].triton
        if not source:
            raise CodecError(f"{self.owner.program.name}: operator {name} has no Triton version")
        function = load_source(name, f"import torch\nimport triton\nimport triton.language as tl\n\n\n{source}")[name]
        return lambda call: Operand(function(*(item.values for item in call.operands), *call.scalars), None)


__all__ = ["TritonKernels", "load_source"]
