"""Codecs by name: every algorithm that penstock ships, and every `.cll` file there is a path to."""

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from penstock.codecs.dense.codec import Codec
from penstock.codecs.header import MAX_PARAMETERS, ON_NONFINITE
from penstock.codecs.spec import parse_spec
from penstock.compll.frontend.parameters import bind_arguments
from penstock.compll.ir import Program
from penstock.errors import CodecError


def codec_names() -> list[str]:
    """Return the names of the shipped algorithms."""
    folder = resources.files("penstock.compll") / "algorithms"
    return sorted(item.name.removesuffix(".cll") for item in folder.iterdir() if item.name.endswith(".cll"))


def parameter_names(name: str) -> list[str]:
    """Return what a shipped algorithm can be told, by name.

    >>> parameter_names("terngrad")
    ['bitwidth', 'block']
    """
    return [parameter.name for parameter in _compile(name, {}).parameters]


def text_fingerprint(spec: str) -> str:
    """Return what differs between codecs of one name whose text, or an operator that it calls, is not the same."""
    return _compile(*parse_spec(spec)).fingerprint


def make_codec(spec: str, seed: int = 0, on_nonfinite: str = "raise", **parameters: float) -> Codec:
    """Return a codec: `spec` is a name, a name with parameters such as `topk(density=0.01)`, or a path to a `.cll`."""
    from penstock.compll.backends.numba.backend import NumbaKernels

    name, given = parse_spec(spec)
    if on_nonfinite not in ON_NONFINITE:
        raise CodecError(f"on_nonfinite is {on_nonfinite!r}; wanted one of {', '.join(ON_NONFINITE)}")
    if not 0 <= seed < 1 << 32:
        raise CodecError(f"seed {seed}; wanted 0 to {(1 << 32) - 1}")
    program = _compile(name, given | parameters)
    if len(program.parameters) > MAX_PARAMETERS or len(program.name) > 16:
        raise CodecError(
            f"{program.name}: a payload's header holds a name of 16 letters and {MAX_PARAMETERS} parameters"
        )
    values = bind_arguments(program, given | parameters)
    arguments = {item.name: value for item, value in zip(program.arguments, values, strict=True)}
    every = {item.name: float(item.value if item.is_constant else arguments[item.name]) for item in program.parameters}  # type: ignore[arg-type]
    return Codec(program, every, arguments, NumbaKernels(program), seed, on_nonfinite)


def codec_digest(spec: str) -> str:
    """Return what changes when a codec computes something else: its text, its parameters, and the compiler's."""
    from penstock.codecs.wire import SPARSE_CODECS

    name, given = parse_spec(spec)
    return spec if name in SPARSE_CODECS else f"{spec} {_compile(name, given).key}"


def kernel_folder() -> Path:
    """Return the folder that keeps compiled kernels; where none can, a path below which nothing can be made."""
    from penstock.compll.cache import default_cache

    return default_cache() or Path(os.devnull)


def _compile(name: str, parameters: Mapping[str, float]) -> Program:
    from penstock.compll.cache import load_program

    if name.endswith(".cll"):
        path = Path(name)
        if not path.is_file():
            raise CodecError(f"no compressor at {name}; the shipped ones are {', '.join(codec_names())}")
        return load_program(path, parameters)
    if name not in codec_names():
        raise CodecError(f"codec {name!r}; wanted one of {', '.join(codec_names())}, or a path to a .cll file")
    if parameters and (unknown := sorted(parameters.keys() - set(known := parameter_names(name)))):
        raise CodecError(f"codec {name!r}: no parameter {unknown[0]!r}; wanted {', '.join(known) or 'none'}")
    with resources.as_file(resources.files("penstock.compll") / "algorithms" / f"{name}.cll") as path:
        return load_program(path, parameters)
