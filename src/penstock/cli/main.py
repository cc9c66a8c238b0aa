"""The `penstock` command: collects the verbs and turns errors into one line.

A verb's module imports what it needs inside its function, so that `penstock --help` answers at once.
"""

import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli.bench_codecs import bench_codecs
from penstock.cli.bench_collectives import bench_collectives
from penstock.cli.bench_links import bench_links
from penstock.cli.bench_replay import bench_replay
from penstock.cli.bench_train import bench_train
from penstock.cli.check import check
from penstock.cli.cluster import cluster
from penstock.cli.compile import compile_
from penstock.cli.demo import demo
from penstock.cli.doctor import doctor
from penstock.cli.measure import measure
from penstock.cli.plan import plan
from penstock.cli.profile import profile
from penstock.cli.replay import replay
from penstock.cli.report import report
from penstock.cli.reproduce import reproduce
from penstock.cli.simulate import simulate
from penstock.cli.train import train
from penstock.cli.verify import verify
from penstock.errors import PenstockError, what_to_install


class Verbs(TyperGroup):
    """The verbs; Ctrl-C ends each with a line and exit code 130, which is typer's."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("penstock: interrupted", file=sys.stderr)
            raise


UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's, wherever this version of typer keeps it
app = typer.Typer(
    name="penstock",
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(check)
app.command()(train)
app.command()(demo)
app.command()(profile)
app.command()(measure)
app.command()(plan)
app.command()(simulate)
app.command()(replay)
app.command()(verify)
app.command()(doctor)
app.command()(report)
app.command()(reproduce)
app.command(name="compile")(compile_)
bench = typer.Typer(help="Measured tables, peers beside us; results kept as JSON.", no_args_is_help=True)
bench.command("train")(bench_train)
bench.command("replay")(bench_replay)
bench.command("collectives")(bench_collectives)
bench.command("codecs")(bench_codecs)
bench.command("links")(bench_links)
app.add_typer(bench, name="bench")
app.add_typer(cluster, name="cluster")


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Communication-efficient data-parallel training: plan it, prove it, time it, run it."""


def main() -> None:
    """Run the command line."""
    run(app, "penstock")


def run(command: typer.Typer, name: str) -> None:
    """Run an application; exit with 2 and one line where the user's input cannot be used."""
    try:
        raise SystemExit(command(prog_name=name, standalone_mode=False) or 0)
    except PenstockError as error:
        _refuse(str(error))
    except UsageError as error:
        _refuse(_misuse(error))
    except ModuleNotFoundError as error:
        if not (complaint := what_to_install(error)):
            raise
        _refuse(complaint)
    except MemoryError:
        _refuse("found too little memory for what was asked; wanted smaller files or numbers")
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        sys.stderr.close()
        raise SystemExit(141) from None
    except OSError as error:
        if error.filename is None:
            raise
        _refuse(f"{error.filename}: found {error.strerror!r}; wanted a path that can be read or written")


def _refuse(complaint: str) -> NoReturn:
    if complaint:
        print(f"penstock: {complaint}", file=sys.stderr)
    raise SystemExit(2) from None


def _misuse(error: Any) -> str:
    """Return in one line what is wrong with the options; nothing where typer has shown the help instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    checks = getattr(error.__cause__, "errors", None)  # pydantic's, which know the value
    found = f" (found {checks()[0]['input']!r})" if checks else ""
    command = error.ctx.command_path if error.ctx else "penstock"
    return f"{error.format_message().rstrip('.')}{found}; see `{command} --help`"
