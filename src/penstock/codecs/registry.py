"""Codecs by name: algorithms that we ship, `.cll` files, sparse and low-rank codecs, and objects of the user's."""

import os
import re
from collections.abc import Callable, Mapping
from copy import copy
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.codecs.codec import NOTE, Codec
from penstock.codecs.header import MAX_PARAMETERS, ON_NONFINITE
from penstock.codecs.low_rank import NAME as LOW_RANK
from penstock.codecs.low_rank import LowRank
from penstock.codecs.spec import parse_spec
from penstock.errors import CodecError, did_you_mean

if TYPE_CHECKING:  # imported with their compiler when a codec is made: dense training does without
    from penstock.codecs.dense.dense_codec import DenseCodec
    from penstock.codecs.sparse.sparse_codec import SparseCodec
    from penstock.compll.ir import Program

_DENSITY = 0.001  # the paper's
_OBJECTS: dict[str, Codec] = {}  # the user's, by name: a plan writes a codec as text


def codec_name(codec: str | Codec) -> str:
    """Return a codec as plans write it; an object of the user's is found by its name from now on."""
    if isinstance(codec, str):
        return codec
    if not re.fullmatch(r"[A-Za-z][\w.-]*(\([^()+/]*\))?", codec.name, re.ASCII):
        raise CodecError(f"a codec called {codec.name!r}; wanted letters, as in a plan: mine, or mine(bits=4)")
    if parse_spec(codec.name)[0] in (*codec_names(), *SPARSE_CODECS, LOW_RANK):
        raise CodecError(f"codec {codec.name!r} of {type(codec).__qualname__} is called as one of ours; rename it")
    _OBJECTS[codec.name] = codec
    return codec.name


def is_object(spec: str) -> bool:
    """Say whether a name stands for an object that `codec_name` was given."""
    return spec in _OBJECTS


def is_low_rank(spec: str | None) -> bool:
    """Say whether a name stands for a codec whose factors are summed as they are, by dense strategies."""
    return spec is not None and parse_spec(spec)[0] == LOW_RANK


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


def fingerprint(spec: str) -> str:
    """Return what differs between codecs of one name whose text, class, or an operator that it calls, do."""
    if spec in _OBJECTS:
        return _OBJECTS[spec].fingerprint
    name, parameters = parse_spec(spec)
    return "" if name in (*SPARSE_CODECS, LOW_RANK) else _compile(name, parameters).fingerprint


def codec_digest(spec: str) -> str:
    """Return what changes when a codec computes something else: its text, its parameters, and the compiler's."""
    if spec in _OBJECTS:
        return f"{spec} {_OBJECTS[spec].fingerprint}"
    name, given = parse_spec(spec)
    return spec if name in (*SPARSE_CODECS, LOW_RANK) else f"{spec} {_compile(name, given).key}"


def make_codec(
    spec: str | Codec,
    seed: int = 0,
    on_nonfinite: str = "raise",
    defers_nonfinite_check: bool = False,
    **parameters: float,
) -> Codec:
    """Return the codec that a name stands for, such as `topk(density=0.01)`, a path to a `.cll`, or a name we were
    given an object for; of an object, a copy.

    `sparse(density=0.001)` can also have `value_bits`; `published(density=0.001)` keeps residuals as gTop-k published.
    `seed` differs between ranks. `on_nonfinite` says what becomes of NaN and infinity: they are raised, the step is
    skipped, or (`note`) the owner asks `saw_nonfinite`. `defers_nonfinite_check`: on a GPU, one call later will do.
    """
    if on_nonfinite not in (*ON_NONFINITE, NOTE):
        raise CodecError(f"on_nonfinite is {on_nonfinite!r}; wanted one of {', '.join(ON_NONFINITE)}")
    found = spec if isinstance(spec, Codec) else _OBJECTS.get(spec)
    if found is not None:
        found = copy(found)
        object.__setattr__(found, "on_nonfinite", on_nonfinite)
        return found
    name, given = parse_spec(str(spec))
    policy = {"on_nonfinite": on_nonfinite, "defers_nonfinite_check": defers_nonfinite_check}
    if name in SPARSE_CODECS:
        unknown = sorted((given | parameters).keys() - {"density", "value_bits"})
        if unknown:
            raise CodecError(f"codec {spec!r}: no parameter {unknown[0]!r}; wanted density and value_bits")
        return SPARSE_CODECS[name](**{"density": _DENSITY, **given, **parameters, **policy})
    if name == LOW_RANK:
        return _low_rank(str(spec), given | parameters, on_nonfinite)
    return _dense(name, given | parameters, seed, policy)


def _low_rank(spec: str, given: Mapping[str, float], on_nonfinite: str) -> Codec:
    if unknown := sorted(given.keys() - {"rank", "rounds"}):
        raise CodecError(f"codec {spec!r}: no parameter {unknown[0]!r}; wanted rank and rounds")
    return LowRank(**given, on_nonfinite=on_nonfinite)


def _dense(name: str, given: Mapping[str, float], seed: int, policy: Mapping[str, Any]) -> "DenseCodec":
    from penstock.codecs.dense.dense_codec import DenseCodec
    from penstock.compll.backends.numba.backend import NumbaKernels
    from penstock.compll.frontend.parameters import bind_arguments

    if not 0 <= seed < 1 << 32:
        raise CodecError(f"seed {seed}; wanted 0 to {(1 << 32) - 1}")
    program = _compile(name, given)
    if len(program.parameters) > MAX_PARAMETERS or len(program.name) > 16:
        raise CodecError(
            f"{program.name}: a payload's header holds a name of 16 letters and {MAX_PARAMETERS} parameters"
        )
    values = bind_arguments(program, given)
    arguments = {item.name: value for item, value in zip(program.arguments, values, strict=True)}
    every = {item.name: float(item.value if item.is_constant else arguments[item.name]) for item in program.parameters}  # type: ignore[arg-type]
    return DenseCodec(program, every, arguments, NumbaKernels(program), seed, **policy)


def _sparse(**settings: Any) -> "SparseCodec":
    from penstock.codecs.sparse.block import VALUE_BITS
    from penstock.codecs.sparse.sparse_codec import SparseCodec

    if settings.get("value_bits") in VALUE_BITS:  # also where it is written as 16.0
        settings["value_bits"] = int(settings["value_bits"])
    return SparseCodec(**settings)


def _published(**settings: Any) -> Codec:
    from penstock.codecs.sparse.published import PublishedCodec

    return PublishedCodec(_sparse(**settings))


SPARSE_CODECS: Mapping[str, Callable[..., Codec]] = {"sparse": _sparse, "published": _published}


def kernel_folder() -> Path:
    """Return the folder that keeps compiled kernels; where none can, a path below which nothing can be made."""
    from penstock.compll.cache import default_cache

    return default_cache() or Path(os.devnull)


def _compile(name: str, parameters: Mapping[str, float]) -> "Program":
    from penstock.compll.cache import load_program

    if name.endswith(".cll"):
        path = Path(name)
        if not path.is_file():
            raise CodecError(f"no compressor at {name}; the shipped ones are {', '.join(codec_names())}")
        return load_program(path, parameters)
    if name not in codec_names():
        near = did_you_mean(name, codec_names())
        raise CodecError(f"codec {name!r}; wanted one of {', '.join(codec_names())}, or a path to a .cll file{near}")
    if parameters and (unknown := sorted(parameters.keys() - set(known := parameter_names(name)))):
        near = did_you_mean(unknown[0], known)
        raise CodecError(f"codec {name!r}: no parameter {unknown[0]!r}; wanted {', '.join(known) or 'none'}{near}")
    with resources.as_file(resources.files("penstock.compll") / "algorithms" / f"{name}.cll") as path:
        return load_program(path, parameters)
