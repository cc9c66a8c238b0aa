"""`penstock bench`: measured tables, peers beside us. One file per benchmark; this one collects them."""

import typer

from penstock.cli.bench_casync import bench_casync, bench_joint
from penstock.cli.bench_codecs import bench_codecs
from penstock.cli.bench_collectives import bench_collectives
from penstock.cli.bench_coordinator import bench_coordinator
from penstock.cli.bench_gains import bench_gains
from penstock.cli.bench_gtop_k import bench_gtop_k
from penstock.cli.bench_links import bench_links
from penstock.cli.bench_memory import bench_memory
from penstock.cli.bench_overlap import bench_overlap
from penstock.cli.bench_page import bench_page
from penstock.cli.bench_planners import bench_planners
from penstock.cli.bench_profile import bench_profile
from penstock.cli.bench_replay import bench_rates, bench_replay, bench_scaling
from penstock.cli.bench_sparse import bench_sparse
from penstock.cli.bench_train import bench_train

bench = typer.Typer(help="Measured tables, peers beside us; results kept as JSON.", no_args_is_help=True)
bench.command("links")(bench_links)
bench.command("planners")(bench_planners)
bench.command("profile")(bench_profile)
bench.command("train")(bench_train)
bench.command("memory")(bench_memory)
bench.command("replay")(bench_replay)
bench.command("gains")(bench_gains)
bench.command("scaling")(bench_scaling)
bench.command("rates")(bench_rates)
bench.command("codecs")(bench_codecs)
bench.command("collectives")(bench_collectives)
bench.command("joint")(bench_joint)
bench.command("casync")(bench_casync)
bench.command("coordinator")(bench_coordinator)
bench.command("sparse")(bench_sparse)
bench.command("gtop-k")(bench_gtop_k)
bench.command("overlap")(bench_overlap)
bench.command("page")(bench_page)
