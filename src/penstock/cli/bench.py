"""`penstock bench`: measured tables, peers beside us. One file per benchmark; this one collects them."""

import typer

from penstock.cli.bench_links import bench_links
from penstock.cli.bench_planners import bench_planners
from penstock.cli.bench_profile import bench_profile

bench = typer.Typer(help="Measured tables, peers beside us; results kept as JSON.", no_args_is_help=True)
bench.command("links")(bench_links)
bench.command("planners")(bench_planners)
bench.command("profile")(bench_profile)
