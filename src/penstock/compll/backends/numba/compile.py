"""From a program to a compiled kernel: source is generated and compiled by numba once, and both are kept on disk.

The source of a kernel is written to a cache directory under a name that hashes everything it depends on, and numba
keeps its machine code beside it. A process that finds both generates and compiles nothing.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.compll.backends.numba.arguments import signature
from penstock.compll.cache import file_states, write_whole
from penstock.compll.functions import Function
from penstock.compll.ir import Program
from penstock.compll.operators import Operator, lowerings


def compile_kernel(
    program: Program, kind: str, functions: Mapping[str, Function], operators: Mapping[str, Operator], folder: Path
) -> Callable[..., int]:
    """Return one kernel of a program; `folder` holds sources and machine code."""
    path, wanted = _source(program, kind, functions, operators, folder), signature(program, kind)
    kernel = _dispatcher(_load_bare(path), kind)
    if not _take_from_cache(kernel, wanted):
        kernel = _dispatcher(_load(path), kind)
        kernel.compile(wanted)
    kernel.disable_compile()
    compiled: Callable[..., int] = kernel
    return compiled


def _dispatcher(module: ModuleType, kind: str) -> Any:
    from numba import njit

    return njit(nogil=True, cache=True, error_model="numpy")(getattr(module, kind))


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
) -> Path:
    """Return the file with a kernel's source, written to the cache the first time.

    A program that came from the cache of programs has a key, and its source need not even be generated again.
    """
    name = f"{program.name}_{kind}"
    if program.key:
        made_from = lowerings(program, functions, operators)
        path = folder / f"{name}_{_digest(program.key, made_from, _writers())}.py"
        source = "" if path.exists() else _generate(program, kind, functions, operators)
    else:
        source = _generate(program, kind, functions, operators)
        path = folder / f"{name}_{_digest(source, _support_text())}.py"
    if not path.exists():
        write_whole(path, source.encode())
    return path


def _generate(program: Program, kind: str, functions: Mapping[str, Function], operators: Mapping[str, Operator]) -> str:
    from penstock.compll.backends.numba.source import generate

    return generate(program, functions, operators, (kind,))


def _digest(*texts: str) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def _load_bare(path: Path) -> ModuleType:
    """Return the module of a kernel without what its source calls: enough to load machine code that is on disk."""
    module = ModuleType(f"penstock_generated_{path.stem}")
    module.__dict__["helper"] = lambda function: function
    # numba finds what it has kept by the line and the byte code of a function: lines keep their numbers, and
    # `import numpy as np` stays, since Python compiles a call of a module's function otherwise than another.
    lines = ["" if line.startswith("from ") else line for line in path.read_text().splitlines()]
    exec(compile("\n".join(lines), str(path), "exec"), module.__dict__)  # our own text, from our own IR
    sys.modules[module.__name__] = module  # numba looks it up by name
    return module


def _load(path: Path) -> ModuleType:
    """Return the module of a kernel, ready to be compiled."""
    spec = importlib.util.spec_from_file_location(f"penstock_generated_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def _writers() -> str:
    """Return something that changes when what writes kernels does; a program's key covers the rest of compll."""
    return file_states(sorted(Path(__file__).parent.glob("*.py")))


@cache
def _support_text() -> str:
    """Return the helpers' source: machine code kept on disk holds copies of them."""
    here = Path(__file__).parent
    helpers = [here / f"{name}.py" for name in ("support", "bits", "payload", "random")]
    used = (*helpers, here.parents[1] / "philox.py", here.parents[1] / "select.py")
    return "".join(path.read_text() for path in used)
