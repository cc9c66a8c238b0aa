"""`penstock bench`: measured tables of this machine or cluster, peers beside us. One file per benchmark.

Studies for our own pages are scripts in the repository's `benchmarks/` folder.
"""

import typer

from penstock.cli.bench_codecs import bench_codecs
from penstock.cli.bench_collectives import bench_collectives
from penstock.cli.bench_links import bench_links
from penstock.cli.bench_replay import bench_replay
from penstock.cli.bench_train import bench_train

bench = typer.Typer(help="Measured tables, peers beside us; results kept as JSON.", no_args_is_help=True)
bench.command("train")(bench_train)
bench.command("replay")(bench_replay)
bench.command("collectives")(bench_collectives)
bench.command("codecs")(bench_codecs)
bench.command("links")(bench_links)
