"""All pieces of a bucket in one launch: each kernel of a program, by as many programs as all pieces need together.

A bucket has hundreds of pieces, most of them smaller than what fills a GPU, and every launch waits for room among the
model's kernels. Here a kernel for one piece is called by a kernel for many: a table says which piece each program of
the grid works on, and where that piece and its payload lie. How many programs a piece gets follows from its size alone,
so sums are added up in one order whatever a piece travels with, and its bits are the same in every batch. Kernels that
leave no sums to add up get as many programs as keep the device busy.

What is not finite stays on the device, too: `mark` writes the header that says so over a payload, and decoding such a
payload gives NaN.

Programs qualify whose encode consists of passes over the gradient and whose decode is elementwise: all shipped codecs
with payloads of one size, those with values by block included where a tile holds whole blocks.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.compll.backends.triton.kernel_text import argument_kind, wrapped
from penstock.compll.backends.triton.prelude import look_at_firsts, mark
from penstock.compll.backends.triton.run import load_source, shape_of
from penstock.compll.backends.triton.starter import compile_side_by_side
from penstock.compll.backends.triton.write_triton import Kernels, Launch
from penstock.compll.ir import NUMEL, Reduce
from penstock.compll.lower.passes import Pack, Pass

COLUMNS = 8  # of a row: elements, first element, first byte of the header, ordinal, programs (two kinds); then unused
CROWDS = ((1 << 12, 1), (1 << 16, 8), (1 << 21, 64), (1 << 62, 256))  # elements at most: programs of a piece
PROGRAMS = 256  # the most
OPEN_NUMEL, MOST_OPEN = 1 << 13, 2048  # elements of a program that leaves no sums; the most such programs of a piece
_LOOKS = 1024  # pieces at a time
_PLACES = {
    "payload_ptr": "payload_ptr + place",
    "last_ptr": "last_ptr + place",
    "header_ptr": "header_ptr + header",
    "gradient_ptr": "gradient_ptr + start",
    "latest_ptr": "latest_ptr + start",
    "residual_ptr": "residual_ptr + start",
    "out_ptr": "out_ptr + start",
    "numel": "numel",
    "seed": "seed + ordinal.to(tl.uint64)",
    "ticket_ptr": "ticket_ptr + piece",
    "factor": "factor",
}
_ROW = """
    piece, program = tl.load(work_ptr + tl.program_id(0) * 2), tl.load(work_ptr + tl.program_id(0) * 2 + 1)
    row = table_ptr + piece * {columns}
    numel, start, programs = tl.load(row).to(tl.int32), tl.load(row + 1), tl.load(row + {crew}).to(tl.int32)
    header, ordinal = tl.multiple_of(tl.load(row + 2), 16), tl.load(row + 3)
    if EVEN:
        start = tl.multiple_of(start, 4)
"""
_ENCODE = """
    place = tl.multiple_of(tl.load(places_ptr + piece), 16)
    {call}
"""
_DECODE = """
    for source in tl.range(0, sources):
        place = tl.multiple_of(tl.load(places_ptr + piece * sources + source), 16)
        broken = 0
        if HEADER > 0:
            broken = tl.load(payload_ptr + place - HEADER + FLAGS_OFFSET).to(tl.int32) & NOT_FINITE_FLAG
        if broken != 0:
            fill_nan(program, programs, out_ptr + start, numel, BLOCK)
        elif source == 0:
            {call}
        else:
            {later}
        tl.debug_barrier()  # the next source may have another thread add to an element
"""
_HEAD = "\n\nfrom penstock.compll.backends.triton.prelude import FLAGS_OFFSET, NOT_FINITE_FLAG, fill_nan\n"


def qualifies(kernels: Kernels) -> bool:
    """Say whether a program's kernels can be called for many pieces at once."""
    steps = [launch.step for launch in kernels.encode]
    simple = all(isinstance(step, Pass) and all(isinstance(o, Reduce | Pack) for o in step.outputs) for step in steps)
    return (
        kernels.is_elementwise
        and kernels.prepare is None
        and simple
        and all(launch.length == NUMEL for launch in kernels.encode)
    )


def many_source(kernels: Kernels) -> str:
    """Return the module of a program with a kernel for many pieces behind each kernel for one."""
    slots = max(1, len(kernels.slots["encode"]))
    launches = [(launch, slots, True) for launch in kernels.encode] + [(one, slots, False) for one in kernels.decode]
    text = _by_some_programs(kernels.text, [launch.kernel for launch, _, _ in launches])
    return text + _HEAD + "".join(_wrapper(*each) for each in launches)


def _by_some_programs(text: str, kernels: Sequence[str]) -> str:
    """Return kernels as functions of which program they are, and of how many, instead of asking the grid."""
    for name in kernels:
        text = re.sub(rf"\ndef {name}\(\s*", f"\ndef {name}(\n    program, programs, ", text)
    text = text.replace("tl.program_id(0)", "program").replace("tl.num_programs(0)", "programs")
    return (
        text.replace("is_last(ticket_ptr)", "is_last_of(ticket_ptr, programs)")
        .replace(" partial(", " partial_of(programs, ")
        .replace("(partial(", "(partial_of(programs, ")
    )


def _wrapper(launch: Launch, slots: int, encodes: bool) -> str:
    places = {
        **_PLACES,
        "status_ptr": "status_ptr + piece" if encodes else "status_ptr",
        "scalars_ptr": f"scalars_ptr + piece * {slots}",
        "partials_ptr": f"partials_ptr + piece * {launch.parts} * PROGRAMS",
    }
    handed = [name for name in launch.arguments if name != "numel"]
    typed = [f'{name}: "{argument_kind(name)}"' if argument_kind(name) else name for name in handed]
    typed += [] if encodes else ["sources"]
    constants = [f"{name}: tl.constexpr" for name in (*launch.constants, "EVEN")]
    plain = ", ".join(f'"{name}"' for name in handed if argument_kind(name))
    plain += "" if encodes else ', "sources"'
    decorator = f"@triton.jit(do_not_specialize=[{plain}])" if plain else "@triton.jit"
    given = ["program", "programs", *(places.get(name, name) for name in launch.arguments)]
    adding = ["True" if name == "ADD" else name for name in launch.constants]
    call, later = (f"{launch.kernel}({', '.join([*given, *each])})" for each in (launch.constants, adding))
    body = _ENCODE.format(call=call) if encodes else _DECODE.format(call=call, later=later)
    head = "\n".join(wrapped(f"{launch.kernel}_many", ["work_ptr", "table_ptr", "places_ptr", *typed, *constants]))
    return f"\n\n{decorator}\n{head}{_ROW.format(columns=COLUMNS, crew=5 if is_open(launch) else 4)}{body}"


def is_open(launch: Launch) -> bool:
    """Say whether the programs of a kernel leave no sums to be added up: their number changes no bit."""
    return launch.parts == 0


class Batch:
    """Pieces of a bucket and where their payloads lie, on the device; with what their kernels work in."""

    def __init__(
        self,
        pieces: Sequence[tuple[int, int]],
        places: Sequence[Sequence[int]],  # first byte of each piece's payload, for one source or several
        ordinals: Sequence[int],  # which of the bucket's random numbers a piece draws
        headers: Sequence[torch.Tensor],  # of each piece
        skipped: Sequence[torch.Tensor],  # the same for values that are not finite
        kernels: Kernels,
        flags: torch.Tensor | None = None,  # int32, one for each piece: up where its values are not finite
    ) -> None:
        device, width, count = headers[0].device, headers[0].numel(), len(pieces)
        crews = [(_programs(stop - start), _open_programs(stop - start)) for start, stop in pieces]
        rows = [
            [stop - start, start, piece * width, ordinals[piece], *crews[piece], 0, 0]
            for piece, (start, stop) in enumerate(pieces)
        ]
        self.count, self.width, self.sources = count, width, len(places)
        self.table = torch.tensor(rows, dtype=torch.int64).to(device)
        self.work, self.open_work = (_work(sizes).to(device) for sizes in zip(*crews, strict=True))
        self.places = (torch.tensor(places, dtype=torch.int64) + width).t().contiguous().to(device)
        self.headers, self.skipped = torch.cat([*headers]), torch.cat([*skipped])
        self.starts_even = all(start % 4 == 0 for start, _ in pieces)
        self.flags = torch.zeros(count, dtype=torch.int32, device=device) if flags is None else flags
        self.tickets = torch.zeros(count, dtype=torch.int32, device=device)
        self.scalars = torch.empty(count * max(1, len(kernels.slots["encode"])), dtype=torch.int32, device=device)


def _programs(numel: int) -> int:
    """Return how many programs work on a piece: by its size alone, as the order of sums depends on it."""
    return next(programs for most, programs in CROWDS if numel <= most)


def _open_programs(numel: int) -> int:
    """Return how many programs work on a piece where they leave no sums."""
    return min(max(1, -(-numel // OPEN_NUMEL)), MOST_OPEN)


def _work(crews: Sequence[int]) -> torch.Tensor:
    """Return the piece of each program of the grid and its number there; those of the largest pieces come first."""
    pieces = torch.tensor(crews)
    largest_first = torch.argsort(pieces, descending=True, stable=True)
    programs = [torch.arange(crews[piece], dtype=torch.int32) for piece in largest_first.tolist()]
    owners = largest_first.to(torch.int32).repeat_interleave(pieces[largest_first])
    return torch.stack([owners, torch.cat(programs)], dim=1)


class ManyKernels:
    """The kernels of one program for many pieces, on one device."""

    def __init__(self, kernels: Kernels, arguments: Mapping[str, Any], status: torch.Tensor) -> None:
        """`arguments` are the codec's parameters, `status` is where a damaged payload is reported."""
        self.kernels, self._status = kernels, status
        self._functions = load_source(f"{kernels.program.name}_many", many_source(kernels))
        self._new: list[_Bound] = []  # launches whose kernels may not be compiled yet
        self._partials = torch.empty(0, dtype=torch.float64, device=status.device)
        self._parameters = {f"float_{name}": float(value) for name, value in arguments.items()}
        self._parameters |= {f"int_{name}": int(value) for name, value in arguments.items()}

    def encoder(
        self, batch: Batch, bucket: torch.Tensor, residual: torch.Tensor | None, payloads: torch.Tensor
    ) -> "Launches":
        """Return what encodes all pieces; the residual is left without what was encoded, flags are up where it failed.

        `payloads` is memory whose byte `place` is the first of a piece's header.
        """
        given = self._given(batch, payloads) | {
            "gradient_ptr": bucket, "latest_ptr": bucket, "residual_ptr": bucket if residual is None else residual,
            "last_ptr": payloads, "status_ptr": batch.flags, "seed": 0, "FEEDBACK": residual is not None,
            "SETTLE": residual is not None and self.kernels.settles, "partials_ptr": self._partials_for(batch.count),
        }  # fmt: skip
        found: list[_Bound] = []
        for launch in self.kernels.encode:
            found.append(self._bound(launch, batch, given, bucket))
            if residual is not None and "FEEDBACK" in launch.constants:
                given |= {"gradient_ptr": residual, "FEEDBACK": False}  # it holds the sum of both from now on
        if residual is not None and not self.kernels.settles:
            found += self._decodes(batch, payloads, residual, True, -1.0, 0)
        return self._launches(found)

    def _partials_for(self, count: int) -> torch.Tensor:
        """Return memory for what the programs of so many pieces add up.

        All encoders share it, since they run one after the other on one stream; those that were made with less keep
        it. Sizes are powers of two, so that all of them together have at most twice the largest.
        """
        wanted = max(launch.parts for launch in self.kernels.encode) * PROGRAMS * count
        if wanted > self._partials.numel():
            self._partials = torch.empty(
                1 << (wanted - 1).bit_length(), dtype=torch.float64, device=self._status.device
            )
        return self._partials

    def marker(self, batch: Batch, payloads: torch.Tensor) -> "Launches":
        """Return what makes payloads of values that are not finite say so."""
        arguments = [batch.table, batch.places, payloads, batch.skipped, batch.flags]
        return self._launches([_Bound(mark, batch.count, arguments, [COLUMNS, batch.width], 1)])

    def decoder(self, batch: Batch, payloads: torch.Tensor, bucket: torch.Tensor, adds: bool) -> "Launches":
        """Return what decodes all pieces, or adds them, one source after the other; NaN for what was not finite."""
        return self._launches(self._decodes(batch, payloads, bucket, adds, 1.0, batch.width))

    def looker(self, bucket: torch.Tensor, firsts: torch.Tensor, found: torch.Tensor) -> "Launches":
        """Return what says, in two int32, whether a piece is NaN (`firsts`: where each begins) and what was damaged."""
        arguments = [bucket, firsts, firsts.numel(), self._status, found]
        return self._launches([_Bound(look_at_firsts, 1, arguments, [_LOOKS], 4)])

    def compile(self) -> None:
        """Compile the kernels of all launches made so far, side by side."""
        new, self._new = self._new, []
        compile_side_by_side([each.compile for each in new if each.device.type == "cuda"])

    def _launches(self, bound: list["_Bound"]) -> "Launches":
        self._new += bound
        return Launches(bound)

    def _decodes(
        self, batch: Batch, payloads: torch.Tensor, out: torch.Tensor, adds: bool, factor: float, header: int
    ) -> list["_Bound"]:
        given = self._given(batch, payloads) | {"out_ptr": out, "factor": factor, "ADD": adds, "HEADER": header}
        return [self._bound(launch, batch, given, out) for launch in self.kernels.decode]

    def _given(self, batch: Batch, payloads: torch.Tensor) -> dict[str, Any]:
        return {
            **self._parameters, "payload_ptr": payloads, "header_ptr": batch.headers, "status_ptr": self._status,
            "ticket_ptr": batch.tickets, "scalars_ptr": batch.scalars,
            "HEADER": batch.width, "LAST": False, "ALIGNED": True, "PROGRAMS": PROGRAMS,
        }  # fmt: skip

    def _bound(self, launch: Launch, batch: Batch, given: Mapping[str, Any], values: torch.Tensor) -> "_Bound":
        shape, kernel = shape_of(launch, given), self._functions[f"{launch.kernel}_many"]
        names = [name for name in launch.arguments if name != "numel"]
        own = {"BLOCK": shape.block, "STAGES": shape.stages, "EVEN": batch.starts_even and values.data_ptr() % 16 == 0}
        known = {**given, **own}
        work = batch.open_work if is_open(launch) else batch.work
        arguments = [work, batch.table, batch.places, *(known[name] for name in names)]
        arguments += [batch.sources] if launch in self.kernels.decode else []
        constants = [known[name] for name in (*launch.constants, "EVEN")]
        seed_at = names.index("seed") + 3 if "seed" in names else None
        return _Bound(kernel, len(work), arguments, constants, shape.warps, seed_at)


class Launches:
    """Kernels on memory that stays, to be queued again and again."""

    def __init__(self, bound: Sequence["_Bound"]) -> None:
        self._bound = bound

    def start(self, seed: int = 0) -> None:
        """Queue all of them on the current stream."""
        for each in self._bound:
            each.start(seed)


class _Bound:
    """One launch: after the first, the compiled kernel is called without a further look at its arguments."""

    def __init__(
        self, kernel: Any, programs: int, arguments: list[Any], constants: list[Any], warps: int,
        seed_at: int | None = None,
    ) -> None:  # fmt: skip
        self._kernel, self._programs, self._arguments, self._constants = kernel, programs, arguments, constants
        self._seed_at = seed_at
        self._options = {"num_warps": warps, "enable_fp_fusion": False}
        self.device: torch.device = arguments[0].device
        self._compiled: Any = None

    def compile(self) -> None:
        """Have the kernel compiled, or begin with that where Triton compiles side by side."""
        self._kernel.warmup(*self._arguments, *self._constants, grid=(self._programs,), **self._options)

    def start(self, seed: int) -> None:
        if self._seed_at is not None:
            self._arguments[self._seed_at] = seed
        if self._compiled is not None:
            stream = torch._C._cuda_getCurrentRawStream(self.device.index)  # as Triton asks; a stream object is slow
            self._compiled(*self._arguments, *self._constants, stream=stream)
        elif self.device.type != "cuda":
            self._kernel[(self._programs,)](*self._arguments, *self._constants)
        else:
            made = self._kernel[(self._programs,)](*self._arguments, *self._constants, **self._options)
            self._compiled = made[(self._programs, 1, 1)]
