"""Kernels for the CPU: generated source, compiled by numba once and kept on disk, run without the interpreter lock.

Kernels are single-threaded and keep no state, so any number of threads may call them. The source of a kernel is written
to a cache directory under a name that hashes everything it depends on, and numba keeps its machine code beside it. A
process that finds both generates and compiles nothing. The source ends with its digest, and a file beside it has those
of the machine code: what differs from its digest is made anew, never run.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.compll.backends import Arguments
from penstock.compll.cache import default_cache, file_states, write_whole
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.ir import Program
from penstock.compll.lower.payload_layout import Bytes, max_nbytes
from penstock.compll.operators import OPERATORS, Operator, lowerings
from penstock.compll.philox import split
from penstock.errors import CodecError, NonFiniteError

Floats = NDArray[np.float32]
_SIGNED = "\n# sha256 "  # before the digest of all that stands above it, in a file of generated source
_COMPILING = Lock()  # threads that want the same kernel would each write its module


@dataclass(slots=True)
class NumbaKernels:
    """Encode and decode of one program, on one CPU core."""

    program: Program
    functions: Mapping[str, Function] = field(default_factory=lambda: FUNCTIONS)
    operators: Mapping[str, Operator] = field(default_factory=lambda: OPERATORS)
    cache_dir: Path | None = field(default_factory=default_cache)  # None: kernels are kept in this process only
    _compiled: dict[str, Callable[..., int]] = field(default_factory=dict)
    _subtracts: bool | None = None
    _defers: bool | None = None

    def encode(
        self,
        gradient: Floats,
        arguments: Arguments,
        seed: int = 0,
        residual: Floats | None = None,
        out: Bytes | None = None,
        factor: float = 1.0,
    ) -> Bytes:
        """Return the payload; see `Kernels`. With a residual, of `factor` times the gradient."""
        if out is None:
            out = np.empty(max_nbytes(self.program, gradient.size, arguments), np.uint8)
        low, high = split(seed)
        own = self._own(arguments)
        if residual is None:
            nbytes = self.kernel("encode")(gradient, out, low, high, *own)
        else:
            nbytes = self.kernel("encode_feedback")(gradient, np.float32(factor), residual, out, low, high, *own)
        if nbytes < 0:
            raise NonFiniteError("the gradient holds values that are not finite")
        if residual is not None and self.subtracts:
            self.decode_add(out[:nbytes], residual, arguments, -1.0)
        return out[:nbytes]

    def encode_later(
        self,
        gradient: Floats,
        arguments: Arguments,
        seed: int,
        residual: Floats,
        last: Bytes,
        out: Bytes,
        factor: float = 1.0,
    ) -> Bytes:
        """Return the payload of factor * gradient + (residual - decode(last)), which is left in `residual`."""
        scaled = gradient, np.float32(factor), residual
        nbytes = self.kernel("encode_later")(*scaled, last, out, *split(seed), *self._own(arguments))
        if nbytes < 0:
            raise NonFiniteError("the gradient holds values that are not finite")
        return out[:nbytes]

    def decode(self, payload: Bytes, numel: int, arguments: Arguments, out: Floats | None = None) -> Floats:
        """Return the gradient; see `Kernels`."""
        out = np.empty(numel, np.float32) if out is None else out
        self._run("decode", payload, out, arguments)
        return out

    def decode_add(self, payload: Bytes, out: Floats, arguments: Arguments, scale: float = 1.0) -> None:
        """Add a multiple of the decoded gradient; see `Kernels`."""
        self._run("decode_add", payload, out, arguments, np.float32(scale))

    def decode_add_to(
        self, payload: Bytes, source: Floats, out: Floats, arguments: Arguments, scale: float = 1.0
    ) -> None:
        """Write `source` with a multiple of the decoded gradient added; see `CpuKernels`."""
        self._run("decode_add_to", payload, out, arguments, np.float32(scale), source=(source,))

    def _run(
        self,
        kind: str,
        payload: Bytes,
        out: Floats,
        arguments: Arguments,
        *scale: np.float32,
        source: tuple[Floats, ...] = (),
    ) -> None:
        try:
            status = self.kernel(kind)(payload, *source, out, *scale, *self._own(arguments))
        except IndexError:  # from an operator; its message knows less than the reference's
            status = -1
        if status != 0:
            self._explain(payload, out.size, arguments)
            raise CodecError("the payload is damaged")

    @property
    def subtracts(self) -> bool:
        """Whether feedback leaves the payload to be subtracted from the residual."""
        if self._subtracts is None:  # found once: planning takes longer than encoding a small tensor
            from penstock.compll.lower.fuse import schedule_encode

            self._subtracts = schedule_encode(self.program, feedback=True).subtracts
        return self._subtracts

    @property
    def defers(self) -> bool:
        """Whether to defer feedback, by `encode_later`: where subtracting at once takes several passes."""
        if self._defers is None:
            from penstock.compll.lower.fuse import last_decode, schedule_encode

            at_once = schedule_encode(self.program, feedback=True)
            self._defers = last_decode(self.program) is not None and at_once.passes() > 1
        return self._defers

    def bound(self, kind: str, arguments: Arguments) -> Callable[..., int]:
        """Return a kernel, the program's parameters bound; it returns a number, below 0 for an error.

        One for several pieces (`<kind>_pieces`) returns how many are done: it stops before one that is not ordinary.
        """
        kernel, own = self.kernel(kind), self._own(arguments)
        return (lambda *operands: kernel(*operands, *own)) if own else kernel

    def kernel(self, kind: str) -> Callable[..., int]:
        """Return a kernel, compiled or loaded on first use."""
        if kind not in self._compiled:
            with _COMPILING:
                if kind not in self._compiled:
                    found = compile_kernel(self.program, kind, self.functions, self.operators, self.cache_dir)
                    self._compiled[kind] = found
        return self._compiled[kind]

    def _own(self, arguments: Arguments) -> tuple[Any, ...]:
        return tuple(arguments[parameter.name] for parameter in self.program.arguments)

    def _explain(self, payload: Bytes, numel: int, arguments: Arguments) -> None:
        """Raise the error that the reference raises for a payload, where it raises one."""
        from penstock.compll.backends.reference import ReferenceKernels

        ReferenceKernels(self.program, self.functions, self.operators).decode(payload, numel, arguments)


def compile_kernel(
    program: Program,
    kind: str,
    functions: Mapping[str, Function],
    operators: Mapping[str, Operator],
    folder: Path | None,
) -> Callable[..., int]:
    """Return one kernel of a program; `folder` holds sources and machine code, without it nothing is kept on disk."""
    wanted = signature(program, kind)
    if folder is not None:
        with suppress(OSError):  # a full or read-only disk costs time, not correctness
            return _kept_kernel(*_source(program, kind, functions, operators, folder), kind, wanted)
    return _compile_here(_generate(program, kind, functions, operators), f"{program.name}_{kind}", kind, wanted)


@cache
def _kept_kernel(path: Path, source: str, kind: str, wanted: str) -> Callable[..., int]:
    """Return a kernel whose machine code is kept beside its source, or will be.

    A process loads each once: LLVM never gives back what it has loaded, and a codec is made anew with every plan.
    """
    kernel = _dispatcher(_load_bare(path, source), kind)
    if not (_is_sealed(kernel, path) and _take_from_cache(kernel, wanted)):
        kernel = _dispatcher(_load(path, source), kind)
        kernel.compile(wanted)
        _seal(kernel, path)
    kernel.disable_compile()
    compiled: Callable[..., int] = kernel
    return compiled


@cache
def _compile_here(source: str, name: str, kind: str, wanted: str) -> Callable[..., int]:
    """Return a kernel that lives as long as this process."""
    kernel = _dispatcher(_load(Path(f"<penstock {name}_{_digest(source)}>"), source), kind, keep=False)
    kernel.compile(wanted)
    kernel.disable_compile()
    compiled: Callable[..., int] = kernel
    return compiled


def _dispatcher(module: ModuleType, kind: str, keep: bool = True) -> Any:
    from numba import njit

    return njit(nogil=True, cache=keep, error_model="numpy")(getattr(module, kind))


def _is_sealed(kernel: Any, path: Path) -> bool:
    """Say whether numba's files of a kernel are those that `_seal` saw; remove them where they are not.

    numba unpickles its files and runs the machine code in them, so a changed bit must not reach it.
    """
    try:
        if json.loads(path.with_suffix(".digests").read_text()) == _machine_code_digests(kernel, path):
            return True
    except (OSError, ValueError, RecursionError):  # never sealed, or the list itself is damaged
        pass
    for file in _machine_code(kernel, path):
        file.unlink(missing_ok=True)
    return False


def _seal(kernel: Any, path: Path) -> None:
    with suppress(OSError):  # the next process compiles again
        write_whole(path.with_suffix(".digests"), json.dumps(_machine_code_digests(kernel, path)).encode())


def _machine_code_digests(kernel: Any, path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in _machine_code(kernel, path)}


def _machine_code(kernel: Any, path: Path) -> list[Path]:
    """Return the files in which numba keeps what it made of the source at `path`."""
    found = Path(kernel.stats.cache_path).iterdir() if Path(kernel.stats.cache_path).is_dir() else ()
    return sorted(file for file in found if file.name.startswith(f"{path.stem}.") and file.suffix in (".nbi", ".nbc"))


def _take_from_cache(kernel: Any, signature: str) -> bool:
    """Load machine code kept by numba, without the tables that only its compiler needs; return whether it was there.

    numba's own way first imports some seventy modules, a tenth of a second that a new process need not spend. This
    looks inside numba; where it finds something else than expected, the caller goes numba's own way.
    """
    try:
        from numba.core.compiler_lock import global_compiler_lock
        from numba.core.runtime.nrt import rtsys

        with global_compiler_lock:
            rtsys.initialize(kernel.targetctx)
            found = kernel._cache._load_overload(signature, kernel.targetctx)
            if found is None:
                return False
            kernel.add_overload(found)
            kernel._cache_hits[signature] += 1
            return True
    except Exception:
        return False


def _source(
    program: Program, kind: str, functions: Mapping[str, Function], operators: Mapping[str, Operator], folder: Path
) -> tuple[Path, str]:
    """Return the file with a kernel's source, written to the cache the first time, and the source.

    A program that came from the cache of programs has a key, and its source need not even be generated again.
    """
    name = f"{program.name}_{kind}"
    if program.key:
        made_from = lowerings(program, functions, operators)
        path = folder / f"{name}_{_digest(program.key, made_from, _writers())}.py"
        if (kept := _read_signed(path)) is not None:
            return path, kept
        source = _generate(program, kind, functions, operators)
    else:
        source = _generate(program, kind, functions, operators)
        path = folder / f"{name}_{_digest(source, _support_text())}.py"
        if _read_signed(path) == source:
            return path, source
    write_whole(path, f"{source}{_SIGNED}{hashlib.sha256(source.encode()).hexdigest()}\n".encode())
    return path, source


def _read_signed(path: Path) -> str | None:
    """Return the source in a file; None where there is none or it differs from the digest in its last line."""
    try:
        source, signed, digest = path.read_text().rpartition(_SIGNED)
    except (OSError, UnicodeError):
        return None
    return source if signed and digest == f"{hashlib.sha256(source.encode()).hexdigest()}\n" else None


def _generate(program: Program, kind: str, functions: Mapping[str, Function], operators: Mapping[str, Operator]) -> str:
    from penstock.compll.backends.numba.write_numba import generate

    return generate(program, functions, operators, (kind,))


def _digest(*texts: str) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def _load_bare(path: Path, source: str) -> ModuleType:
    """Return the module of a kernel without what its source calls: enough to load machine code that is on disk."""
    # numba finds what it has kept by the line and the byte code of a function: lines keep their numbers, and
    # `import numpy as np` stays, since Python compiles a call of a module's function otherwise than another.
    lines = ["" if line.startswith("from ") else line for line in source.splitlines()]
    return _load(path, "\n".join(lines), {"helper": lambda function: function})


def _load(path: Path, source: str, given: Mapping[str, Any] | None = None) -> ModuleType:
    """Return the module of a kernel: with its whole source, ready to be compiled."""
    module = ModuleType(f"penstock_generated_{path.stem}")
    module.__dict__.update(given or {})
    exec(compile(source, str(path), "exec"), module.__dict__)  # our own text, from our own IR or as its digest says
    sys.modules[module.__name__] = module  # numba looks it up by name
    return module


@cache
def _writers() -> str:
    """Return a text that changes with any file that writes kernels; a program's key covers the rest of the compiler."""
    return file_states(kernel_files())


def kernel_files() -> list[Path]:
    """Return the files that write numba kernels and those that kernels call."""
    return sorted(Path(__file__).parent.glob("*.py"))


@cache
def _support_text() -> str:
    """Return the source of all that kernels call: machine code kept on disk holds copies of it."""
    return "".join(path.read_text() for path in support_files())


def support_files() -> list[Path]:
    """Return the files of the functions that kernels call."""
    compll = Path(__file__).parents[2]
    return [Path(__file__).parent / "support.py", compll / "philox.py", compll / "select.py"]


ARGUMENTS = {
    "encode": ["gradient", "out", "seed_low", "seed_high"],
    "encode_feedback": ["gradient", "factor", "residual", "out", "seed_low", "seed_high"],
    "encode_later": ["gradient", "factor", "residual", "last", "out", "seed_low", "seed_high"],
    "decode": ["payload", "out"],
    "decode_add": ["payload", "out", "factor"],
    "decode_add_to": ["payload", "source", "out", "factor"],
}
# A kernel for several pieces, `<kind>_pieces`, goes through a table with a row for each: elements, bytes of the body of
# its payload, and addresses. The header of a piece stands before its body: encode writes it, decode compares it.
PIECES = "_pieces"
BODY, VALUES, OTHER, LAST = 2, 3, 4, 5  # columns of addresses; VALUES: the gradient, or what decode writes
COLUMNS = {
    "encode_feedback": {"out": BODY, "gradient": VALUES, "residual": OTHER},
    "encode_later": {"out": BODY, "gradient": VALUES, "residual": OTHER, "last": LAST},
    "decode": {"payload": BODY, "out": VALUES},
    "decode_add": {"payload": BODY, "out": VALUES},
    "decode_add_to": {"payload": BODY, "out": VALUES, "source": OTHER},
}
PIECES_ARGUMENTS = {
    "table": "int64[:, ::1]",
    "factors": "float32[::1]",  # one for each piece
    "headers": "Array(uint8, 2, 'C', readonly=True)",
    "first": "int64",  # piece to begin with
    "seed": "uint32",  # low word of that of piece 0; one more for each piece after it
    "seed_high": "uint32",
}
TYPES = {
    "gradient": "Array(float32, 1, 'C', readonly=True)",
    "source": "Array(float32, 1, 'C', readonly=True)",
    "residual": "float32[::1]",
    "payload": "Array(uint8, 1, 'C', readonly=True)",
    "last": "Array(uint8, 1, 'C', readonly=True)",
    "seed_low": "uint32",
    "seed_high": "uint32",
    "factor": "float32",
}


def signature(program: Program, kind: str) -> str:
    """Return the signature of a kernel in numba's notation; the program's parameters come last."""
    out = "uint8[::1]" if kind.startswith("encode") else "float32[::1]"
    types = [out if name == "out" else TYPES[name] for name in ARGUMENTS.get(kind, ())] or [*PIECES_ARGUMENTS.values()]
    types += ["float32" if parameter.type.is_float else "int32" for parameter in program.arguments]
    return f"int64({', '.join(types)})"
