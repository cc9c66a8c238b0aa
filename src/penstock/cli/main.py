"""The `penstock` command: collects the verbs and turns errors into one line.

A verb's module imports what it needs inside its function, so that `penstock --help` answers at once.
"""

import sys
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli.bench import bench
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
from penstock.errors import PenstockError

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
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
    """Run the command line; exit with 2 and one line where the user's input cannot be used."""
    try:
        app()
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        sys.stderr.close()
        raise SystemExit(141) from None
