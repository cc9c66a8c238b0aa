"""`penstock train`: the main job. Starts local workers, or joins those that torchrun, mpirun or Slurm started."""

from typing import Annotated

import typer

from penstock.cli.options import (
    JsonOption,
    complete_codecs,
    complete_planners,
    complete_strategies,
    complete_tasks,
    new_folder,
)


def train(
    task: Annotated[
        str,
        typer.Option(
            help="a name, FILE.py:function or package.module:function; default chars", autocompletion=complete_tasks
        ),
    ] = "",
    workers: Annotated[int | None, typer.Option(help="local workers to start; default 4", min=1, max=1024)] = None,
    steps: Annotated[int | None, typer.Option(help="iterations in all; default 100", min=1)] = None,
    epochs: Annotated[float, typer.Option(help="or passes over the training data", min=0.0)] = 0.0,
    batch: Annotated[
        int | None, typer.Option(help="samples per worker and iteration; default the task's own", min=1)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of weights and data; default 1", min=0)] = None,
    codec: Annotated[
        str,
        typer.Option(help="compresses gradients: onebit, terngrad, ...; default none", autocompletion=complete_codecs),
    ] = "",
    density: Annotated[float, typer.Option(help="of a sparse codec: the part that is sent", min=0.0)] = 0.0,
    warmup: Annotated[str, typer.Option(help="densities before that: paper, dgc or 0.25,0.05")] = "",
    warmup_every: Annotated[int, typer.Option(help="iterations for each of them; default 1", min=0)] = 0,
    dense_below: Annotated[int, typer.Option(help="tensors of fewer elements travel dense", min=0)] = 0,
    momentum: Annotated[float, typer.Option(help="of SGD; with a codec corrected in the exchange", min=0.0)] = 0.0,
    clip: Annotated[float, typer.Option(help="L2 norm that gradients have at most", min=0.0)] = 0.0,
    lr_warmup: Annotated[int, typer.Option(help="steps in which the learning rate rises", min=0)] = 0,
    accumulate: Annotated[int | None, typer.Option(help="batches of each step; default 1", min=1)] = None,
    amp: Annotated[str, typer.Option(help="mixed precision: bf16, or fp16 with a gradient scaler")] = "",
    servers: Annotated[int, typer.Option(help="so many workers at the end only aggregate", min=0)] = 0,
    planner: Annotated[
        str,
        typer.Option(
            help="exact, wfbp, ..., or stock: torch's own DDP; default exact", autocompletion=complete_planners
        ),
    ] = "",
    strategy: Annotated[
        str,
        typer.Option(
            help="all-reduce of every bucket; default auto: the planner's choice", autocompletion=complete_strategies
        ),
    ] = "",
    network: Annotated[str, typer.Option(metavar="FILE", help="from `penstock measure`; default: measured")] = "",
    stock: Annotated[bool, typer.Option("--stock", help="the same as --planner stock")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="train with stock DDP first, and print both")] = False,
    rate: Annotated[str, typer.Option(help="put workers on emulated hosts with NICs of this rate: 1gbit")] = "",
    engine: Annotated[str, typer.Option(help="what carries gradients: gloo, or mpi; default gloo")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[int, typer.Option(help="per worker; default the cores shared out", min=0)] = 0,
    evaluate_every: Annotated[int, typer.Option(help="steps; default a tenth of all", min=0)] = 0,
    save: Annotated[
        str, typer.Option(metavar="DIR", help="keep checkpoints here; Ctrl-C saves too", callback=new_folder)
    ] = "",
    save_every: Annotated[int, typer.Option(help="steps; default only at the end", min=0)] = 0,
    resume: Annotated[str, typer.Option(metavar="DIR", help="go on from the newest checkpoint there")] = "",
    out: Annotated[
        str, typer.Option(metavar="DIR", help="write DIR/NAME/run.json for `penstock report`", callback=new_folder)
    ] = "",
    name: Annotated[str, typer.Option(help="of the run; default after its method")] = "",
    tensorboard: Annotated[
        str, typer.Option(metavar="DIR", help="write TensorBoard events here", callback=new_folder)
    ] = "",
    json: JsonOption = False,
) -> None:
    """Train a real model on real data with several workers, evaluate it, and say where the time went."""
    from penstock.cli.train_jobs import check_job, check_pairs, make_job, stock_of, with_epochs
    from penstock.cli.train_run import Shown, print_runs, run

    check_pairs(planner, stock, compare, steps, epochs, save or resume, save_every)
    given = {
        "task": task, "workers": workers, "steps": steps, "batch": batch, "seed": seed, "codec": codec,
        "density": density, "warmup": warmup, "warmup_every": warmup_every, "dense_below": dense_below,
        "momentum": momentum, "clip": clip, "lr_warmup": lr_warmup, "accumulate": accumulate, "amp": amp,
        "servers": servers,
        "planner": "stock" if stock else planner, "strategy": strategy, "network": network,
        "engine": engine, "device": device, "evaluate_every": evaluate_every, "save": save, "save_every": save_every,
        "resume": resume, "name": name,
    }  # fmt: skip
    job = make_job({option: value for option, value in given.items() if value or (option == "seed" and value == 0)})
    check_job(job, rate)
    if epochs:
        job = with_epochs(job, epochs)
    shown = Shown(json, out, tensorboard)
    records = [run(each, rate, threads, shown) for each in ([stock_of(job), job] if compare else [job])]
    print_runs([record for record in records if record is not None], json)
    shown.raise_failures()
