"""Kernels for the CPU: generated source, compiled by numba once and kept on disk, run without the interpreter lock.

The source of a program's kernels is written to a cache directory under a name that hashes everything it depends on, and
numba keeps its machine code beside it. A process that finds both compiles nothing. Kernels are single-threaded and keep
no state, so any number of threads may call them.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.compll.backends import Arguments
from penstock.compll.backends.numba_source import generate, kernel_arguments
from penstock.compll.cache import default_cache, write_whole
from penstock.compll.feedback import last_decode
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.fuse import schedule_encode
from penstock.compll.ir import Program
from penstock.compll.layout import Bytes, max_nbytes
from penstock.compll.operators import OPERATORS, Operator
from penstock.compll.philox import split
from penstock.errors import CodecError, NonFiniteError

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
_TYPES = {
    "gradient": "Array(float32, 1, 'C', readonly=True)",
    "residual": "float32[::1]",
    "payload": "Array(uint8, 1, 'C', readonly=True)",
    "last": "Array(uint8, 1, 'C', readonly=True)",
    "seed_low": "uint32",
    "seed_high": "uint32",
    "factor": "float32",
    "boundaries": "int64[::1]",
    "sizes": "int64[::1]",
    "calls": "uint32[::1]",
}


@dataclass(slots=True)
class NumbaKernels:
    """Encode and decode of one program, on one CPU core."""

    program: Program
    functions: Mapping[str, Function] = field(default_factory=lambda: FUNCTIONS)
    operators: Mapping[str, Operator] = field(default_factory=lambda: OPERATORS)
    cache_dir: Path = field(default_factory=default_cache)
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
    ) -> Bytes:
        """Return the payload; see `Kernels`."""
        if out is None:
            out = np.empty(max_nbytes(self.program, gradient.size, arguments), np.uint8)
        low, high = split(seed)
        own = self._own(arguments)
        if residual is None:
            nbytes = self.kernel("encode")(gradient, out, low, high, *own)
        else:
            nbytes = self.kernel("encode_feedback")(gradient, residual, out, low, high, *own)
        if nbytes < 0:
            raise NonFiniteError("the gradient holds values that are not finite")
        if residual is not None and self.subtracts:
            self.decode_add(out[:nbytes], residual, arguments, -1.0)
        return out[:nbytes]

    def encode_later(
        self, gradient: Floats, arguments: Arguments, seed: int, residual: Floats, last: Bytes, out: Bytes
    ) -> Bytes:
        """Return the payload of gradient + (residual - decode(last)), which is left in `residual`."""
        nbytes = self.kernel("encode_later")(gradient, residual, last, out, *split(seed), *self._own(arguments))
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

    # Several tensors, the segments of one flat array

    def encode_many(
        self,
        gradient: Floats,
        boundaries: Integers,
        arguments: Arguments,
        seed: int,
        calls: NDArray[np.uint32],
        residual: Floats | None,
        out: Bytes,
    ) -> Integers:
        """Write the bodies of all segments; see `ManyKernels`."""
        sizes = np.empty(boundaries.size - 1, np.int64)
        shared = (out, boundaries, sizes, calls, np.uint32(seed), *self._own(arguments))
        if residual is None:
            found = self.kernel("encode_many")(gradient, *shared)
        else:
            found = self.kernel("encode_many_feedback")(gradient, residual, *shared)
        if found < 0:
            raise NonFiniteError(-1 - found)
        if residual is not None and self.subtracts:
            self.decode_many(out[:found], boundaries, sizes, residual, arguments, -1.0)
        return sizes

    def decode_many(
        self,
        payload: Bytes,
        boundaries: Integers,
        sizes: Integers,
        out: Floats,
        arguments: Arguments,
        scale: float | None = None,
    ) -> None:
        """Write or add the values of all segments; see `ManyKernels`."""
        kind, factor = ("decode_many", ()) if scale is None else ("decode_add_many", (np.float32(scale),))
        try:
            found = self.kernel(kind)(payload, out, boundaries, sizes, *factor, *self._own(arguments))
        except IndexError:  # which segment it was is lost; the reference finds it again
            found = -1
        if found == 0:
            return
        ends = np.cumsum(sizes)
        for j in range(-1 - found, sizes.size):
            numel = int(boundaries[j + 1] - boundaries[j])
            self._explain(payload[ends[j] - sizes[j] : ends[j]], numel, arguments)
        raise CodecError("the payload is damaged")

    def _run(self, kind: str, payload: Bytes, out: Floats, arguments: Arguments, *scale: np.float32) -> None:
        try:
            status = self.kernel(kind)(payload, out, *scale, *self._own(arguments))
        except IndexError:  # from an operator; its message knows less than the reference's
            status = -1
        if status != 0:
            self._explain(payload, out.size, arguments)
            raise CodecError("the payload is damaged")

    @property
    def subtracts(self) -> bool:
        """Whether feedback leaves the payload to be subtracted from the residual."""
        if self._subtracts is None:  # found once: planning takes longer than encoding a small tensor
            self._subtracts = schedule_encode(self.program, feedback=True).subtracts
        return self._subtracts

    @property
    def defers(self) -> bool:
        """Whether feedback can be put off: `encode_later` is there."""
        if self._defers is None:
            self._defers = last_decode(self.program) is not None
        return self._defers

    def kernel(self, kind: str) -> Callable[..., int]:
        """Return a kernel, compiled or loaded on first use."""
        if kind not in self._compiled:
            self._compiled[kind] = _compile(self.program, kind, self.functions, self.operators, self.cache_dir)
        return self._compiled[kind]

    def _own(self, arguments: Arguments) -> tuple[Any, ...]:
        return tuple(arguments[parameter.name] for parameter in self.program.arguments)

    def _explain(self, payload: Bytes, numel: int, arguments: Arguments) -> None:
        """Raise the error that the reference raises for a payload, where it raises one."""
        from penstock.compll.backends.reference import ReferenceKernels

        ReferenceKernels(self.program, self.functions, self.operators).decode(payload, numel, arguments)


def _compile(
    program: Program, kind: str, functions: Mapping[str, Function], operators: Mapping[str, Operator], folder: Path
) -> Callable[..., int]:
    from numba import njit

    source = generate(program, functions, operators, (kind,))
    module = _load(f"{program.name}_{kind}", source, folder)
    types = [_TYPES.get(name) or _out_type(kind) for name in kernel_arguments(program, kind)]
    types += ["float32" if parameter.type.is_float else "int32" for parameter in program.arguments]
    signature = f"int64({', '.join(types)})"
    kernel: Any = njit(nogil=True, cache=True, error_model="numpy")(getattr(module, kind))
    if not _take_from_cache(kernel, signature):
        kernel.compile(signature)
    kernel.disable_compile()
    compiled: Callable[..., int] = kernel
    return compiled


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


def _out_type(kind: str) -> str:
    return "uint8[::1]" if kind.startswith("encode") else "float32[::1]"


def _load(name: str, source: str, folder: Path) -> ModuleType:
    """Return the module with this source, written to the cache the first time."""
    digest = hashlib.sha256((source + _support_text()).encode()).hexdigest()[:16]
    path = folder / f"{name}_{digest}.py"
    if not path.exists():
        write_whole(path, source.encode())
    spec = importlib.util.spec_from_file_location(f"penstock_generated_{name}_{digest}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # numba looks it up by name when it loads machine code
    spec.loader.exec_module(module)
    return module


@cache
def _support_text() -> str:
    """Return the helpers' source: machine code kept on disk holds copies of them."""
    here = Path(__file__).parent
    used = (here / "numba_support.py", here.parent / "philox.py", here.parent / "select.py")
    return "".join(path.read_text() for path in used)
