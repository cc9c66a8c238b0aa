"""`penstock compile`: checks a compressor and shows the code that a back end generates for it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import JsonOption, complete_codecs, completing
from penstock.errors import CodecError, did_you_mean

if TYPE_CHECKING:
    from penstock.compll.ir import Program

BACKENDS = ("reference", "numba", "triton")


def compile_(
    file: Annotated[
        str, typer.Argument(help="a .cll file, or the name of a shipped algorithm", autocompletion=complete_codecs)
    ],
    backend: Annotated[
        str,
        typer.Option(
            help="reference (shows the IR and its passes), numba or triton", autocompletion=completing(lambda: BACKENDS)
        ),
    ] = "reference",
    param: Annotated[list[str], typer.Option(help="NAME=VALUE, as often as needed")] = [],  # noqa: B006 typer copies it
    out: Annotated[str, typer.Option(metavar="FILE", help="write the code here instead of printing it")] = "",
    json: JsonOption = False,
) -> None:
    """Check a compressor and show what it compiles to; a mistake in it is shown with its line and a caret."""
    from penstock.compll.cache import read_source
    from penstock.compll.frontend.source import compile_source

    if backend not in BACKENDS:
        near = did_you_mean(backend, BACKENDS)
        raise CodecError(f"unknown back end {backend!r}; use {', '.join(BACKENDS)}{near}")
    path = find_source(file)
    program = compile_source(read_source(path), path.name if path.parent == shipped() else file, parse_params(param))
    text = GENERATORS[backend](program)
    if out:
        Path(out).write_text(text)
    if json:
        from penstock.cli.output import print_json

        print_json(describe(program) | {"backend": backend, "out": out or None, "source": None if out else text})
    elif out:
        print(f"{out}: {program.name} for {backend}, {len(text.splitlines())} lines")
    else:
        print(text, end="")


def shipped() -> Path:
    """Return the folder of the algorithms that come with penstock."""
    import penstock.compll

    return Path(penstock.compll.__file__).parent / "algorithms"


def find_source(file: str) -> Path:
    """Return the path of a .cll file, or of a shipped algorithm by name."""
    names = sorted(path.stem for path in shipped().glob("*.cll"))
    if file in names:
        return shipped() / f"{file}.cll"
    path = Path(file)
    if not path.is_file():
        near = did_you_mean(file, names)
        raise CodecError(f"no file {file!r}; name a .cll file or one of {', '.join(names)}{near}")
    return path


def parse_params(texts: list[str]) -> dict[str, int | float]:
    """Return the parameters given as NAME=VALUE.

    >>> parse_params(["bitwidth=4", "tau=0.5"])
    {'bitwidth': 4, 'tau': 0.5}
    """
    params: dict[str, int | float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            params[name] = int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:
            raise CodecError(f"--param {text!r}; wanted NAME=VALUE with a number") from None
        if not equals:
            raise CodecError(f"--param {text!r}; wanted NAME=VALUE with a number")
    return params


def _reference(program: "Program") -> str:
    from penstock.compll.lower.fuse import schedule_decode, schedule_encode
    from penstock.compll.lower.passes import dump, show_schedule

    plans = {
        "encode": schedule_encode(program),
        "encode with error feedback": schedule_encode(program, feedback=True),
        "decode": schedule_decode(program),
    }
    shown = (
        f"\n{name}: {plan.passes():g} passes over the gradient\n{show_schedule(plan)}" for name, plan in plans.items()
    )
    return dump(program) + "".join(shown)


def _numba(program: "Program") -> str:
    from penstock.compll.backends.numba.write_numba import generate
    from penstock.compll.functions import FUNCTIONS
    from penstock.compll.operators import OPERATORS

    return generate(program, FUNCTIONS, OPERATORS)


def _triton(program: "Program") -> str:
    from penstock.compll.backends.triton.write_triton import Kernels

    return Kernels(program).text


GENERATORS = {"reference": _reference, "numba": _numba, "triton": _triton}


def describe(program: "Program") -> dict[str, Any]:
    """Return a program's parameters, wire format and passes for `--json`."""
    from penstock.compll.lower.fuse import schedule_decode, schedule_encode

    return {
        "name": program.name,
        "parameters": [
            {"name": item.name, "type": item.type.name, "default": item.default, "is_constant": item.is_constant}
            for item in program.parameters
        ],
        "fields": [
            {"name": item.name, "type": item.type.name, "length": str(item.length) if item.length else None}
            for item in program.layout.fields
        ],
        "passes": {
            "encode": schedule_encode(program).passes(),
            "encode_feedback": schedule_encode(program, feedback=True).passes(),
            "decode": schedule_decode(program).passes(),
        },
    }
