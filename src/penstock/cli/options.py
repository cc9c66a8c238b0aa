"""Options that several verbs share, and how their text becomes values."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer

from penstock.errors import PenstockError, PlanError, did_you_mean


def new_file(path: str) -> str:
    """Return a path to write to; refuse before anything runs what could not be written at its end."""
    if path and Path(path).is_dir():
        raise PenstockError(f"{path}: found a folder; wanted the name of a file to write")
    if path:
        _check_writable(path, Path(path).parent)
    return path


def new_folder(path: str) -> str:
    """Return a folder to write into, which need not be there; refuse a file before anything runs."""
    if path and os.path.exists(path) and not Path(path).is_dir():
        raise PenstockError(f"{path}: found a file; wanted a folder, or a name for a new one")
    if path:
        _check_writable(path, Path(path))
    return path


def _check_writable(path: str, folder: Path) -> None:
    """Raise unless files can be made in a folder, or in the one above it that is there, by making one without a name.

    Only the first worker of a launcher's looks: it writes, and others may be on hosts that do not have the folder.
    """
    from penstock.runtime.launch import MPI, SLURM

    if any(os.environ.get(name, "0") != "0" for name in ("RANK", MPI["RANK"], SLURM["RANK"])):
        return
    while not os.path.exists(folder):
        folder = folder.parent
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PenstockError(f"{path}: found {error.strerror!r} in {folder}; wanted a path to write to") from error


# What a shell completes, asked for when a key is pressed.


def completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return what typer asks for the names that begin like what was typed, after its last comma.

    >>> completing(lambda: ["exact", "greedy"])("wfbp,ex")
    ['wfbp,exact']
    """

    def found(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return found


def _traces() -> Iterable[str]:
    from penstock.traces import shipped

    return shipped()


def _tasks() -> Iterable[str]:
    from penstock.task_names import TASK_NAMES

    return TASK_NAMES


def _networks() -> Iterable[str]:
    from penstock.cost.clusters import CLUSTERS

    return CLUSTERS


def _planners() -> Iterable[str]:
    from penstock.planners import PLANNERS

    return PLANNERS


def _strategies() -> Iterable[str]:
    from penstock.strategies import STRATEGIES

    return STRATEGIES


def _codecs() -> Iterable[str]:
    from penstock.exchange.compression import codec_choices

    return codec_choices()


def list_names(wanted: bool) -> None:
    """Print every name that planning takes, a line for each kind, and end."""
    if not wanted:
        return
    kinds = {"traces": _traces, "networks": _networks, "planners": _planners, "strategies": _strategies}
    for kind, names in (kinds | {"codecs": _codecs}).items():
        print(f"{kind}: {', '.join(names())}")
    raise typer.Exit


complete_traces, complete_tasks, complete_networks = completing(_traces), completing(_tasks), completing(_networks)
complete_planners, complete_strategies = completing(_planners), completing(_strategies)
complete_codecs = completing(_codecs)

TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE", help="a penstock-trace/1 .json, a .csv, or a shipped name", autocompletion=complete_traces
    ),
]
NetworkOption = Annotated[
    str,
    typer.Option(
        "--network", help="a penstock-network/1 .json or a published cluster's name", autocompletion=complete_networks
    ),
]
AllReduceOption = Annotated[
    str,
    typer.Option(
        "--all-reduce",
        help="how messages travel: any strategy, or a line measured in the network file; default ring",
        autocompletion=complete_strategies,
    ),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="gradient type, if other than the trace's: float16, bfloat16 ...")
]
ListOption = Annotated[
    bool,
    typer.Option("--list", help="print names of traces, networks, ... and exit", callback=list_names, is_eager=True),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
RecordOption = Annotated[str, typer.Option("--out", metavar="FILE", help="keep the record here", callback=new_file)]
PictureOption = Annotated[str, typer.Option("--picture", metavar="FILE", help="draw it: .png, .svg or .pdf")]


def parse_counts(text: str, option: str) -> list[int]:
    """Return the whole numbers of a comma-separated list.

    >>> parse_counts("4,8,16", "--workers")
    [4, 8, 16]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,18}", part) and int(part) > 0 for part in parts):
        raise PenstockError(f"{option}: found {text!r}; wanted whole numbers > 0 with commas between, such as 4,8,16")
    return [int(part) for part in parts]


def split_codecs(text: str, known: Iterable[str]) -> list[str]:
    """Return the compressors of --codecs; refuse misspelt ones and training's sparse ones, which are strategies here.

    Those of `known` are taken as they are.
    """
    from penstock.exchange.compression import SPARSE, check_known

    codecs = split_list(text)
    for codec in (each for each in codecs if each not in known):
        check_known(codec)
        if found := SPARSE.get(codec.partition("(")[0]):
            name = found.strategies[-1]
            raise PenstockError(
                f"--codecs: found {codec!r}, which sends blocks of {found.codec!r} by all-reduces of its own; wanted "
                f"--all-reduce {name}, or --all-reduce {name} --codecs {found.codec}"
            )
    return codecs


def split_list(text: str) -> list[str]:
    """Return the parts of a comma-separated list; commas inside parentheses do not separate.

    >>> split_list("ring, ring+topk(density=0.01,seed=2)")
    ['ring', 'ring+topk(density=0.01,seed=2)']
    """
    return [part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip()]


def check_routes(routes: Iterable[str]) -> None:
    """Raise unless every route, such as `ring+onebit/4`, names an all-reduce and, where it has one, a codec."""
    from penstock.plan import parse_route
    from penstock.strategies import coded_only_names, names, parse_strategy, sparse_names

    for text in routes:
        route = parse_route(text)
        known = (*names("all_reduce"), *((*coded_only_names(), *sparse_names()) if route.codec else ()))
        name, _ = parse_strategy(route.strategy)
        if name not in known:
            near = did_you_mean(name, known)
            raise PlanError(f"no all-reduce strategy called {name!r}; wanted one of {', '.join(known)}{near}")
        if route.codec:
            from penstock.codecs.registry import make_codec

            make_codec(route.codec)
