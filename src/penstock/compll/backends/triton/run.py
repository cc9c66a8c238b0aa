"""One call of a program's kernels: its memory, and the steps it is made of."""

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from penstock.compll.backends.triton import operator_calls
from penstock.compll.backends.triton.operator_calls import Call, Operand
from penstock.compll.backends.triton.write_triton import UNIT, Launch
from penstock.compll.ir import GRADIENT, LATEST, Apply, Filter, GroupReduce, Length
from penstock.compll.lower.host_known import Sizes
from penstock.compll.lower.passes import Keep, Pass, Scatter
from penstock.compll.types import Scalar
from penstock.errors import CodecError

if TYPE_CHECKING:
    from penstock.compll.backends.triton.backend import TritonKernels

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
BY_BLOCK = Shape(512, 1, 8, stages=3)  # one warp: blocks are reduced without shared memory
FILTER = Shape(2048, 4, stages=3)
REDUCE, FEEDBACK = Shape(1024, 4, stages=3), Shape(512, 4)


def shape_of(launch: Launch, given: Mapping[str, Any]) -> Shape:
    """Return how the kernel of a pass is cut up; `given` says whether it keeps error feedback."""
    if "FEEDBACK" in launch.constants and given["FEEDBACK"]:
        return FEEDBACK
    if "PROGRAMS" in launch.constants:
        return REDUCE
    if launch.kernel == "decode":
        return DECODE
    return BY_BLOCK if launch.block else ENCODE


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


class Run:
    """One call: its memory, and the steps it is made of."""

    def __init__(self, owner: "TritonKernels", sizes: Sizes, seed: int, payload: Any, header: Any) -> None:
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
        for output in launch.step.outputs if isinstance(launch.step, Pass) else ():
            if isinstance(output, Keep):
                self._keep(output.vector, launch.length, output.element)
            elif isinstance(output, Scatter) and not self.given["ADD"]:
                self.given["out_ptr"].zero_()
        shape = shape_of(launch, self.given)
        blocks = max(1, -(-self.sizes.most(launch.length) // shape.block))
        # Where programs leave parts to be added up, or the size is the device's to know, a fixed crew loops.
        crew = min(blocks, MAX_PROGRAMS, PROGRAMS_PER_PROCESSOR * self.owner.processors)
        is_open = "PROGRAMS" not in launch.constants and launch.length.of == GRADIENT
        self._start(launch, -(-blocks // shape.blocks) if is_open else crew, shape)

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

    def call(self, step: Apply, size: Any = None) -> Call:
        """Return an operator's operands."""
        operands = tuple(self.operand(name) for name in step.vectors)
        scalars = tuple(self.sizes.scalar(expr) for expr in step.scalars)
        return Call(step, operands, scalars, self.seed, self.workspace.scratch, self.owner.status, self.start, size)

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
        run = operator_calls.OPERATORS.get(step.operator) or self.registered(step.operator)
        size = self.size(step.length) if step.length == Length(step.name) else None
        made = run(self.call(step, size))
        if size is None and step.length.group == 1:
            made = Operand(made.values, self.size(step.length))
        elif size is not None and made.size is not size:
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
