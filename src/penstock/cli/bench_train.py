"""`penstock bench train`: real training on emulated hosts, stock DDP and its hooks beside us."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import JsonOption, RecordOption

if TYPE_CHECKING:
    from penstock.bench.jobs import Done

METHODS = (
    "no-communication,ddp,ddp-1,ddp-5,ddp-25,ddp-100,ddp-fp16,ddp-bf16,ddp-powersgd,"
    "penstock-exact,penstock-exact-native,penstock-wfbp,penstock-bsp-split,"
    "penstock-onebit,penstock-terngrad,penstock-gtopk,penstock-blocks,penstock-auto,"
    "no-communication-adamw,ddp-adamw,penstock-compressed-adamw"
)
STARTUP = "penstock-exact,penstock-auto"


def bench_train(
    hosts: Annotated[int, typer.Option(help="number of emulated hosts", min=1)] = 4,
    rate: Annotated[str, typer.Option(help="of each NIC")] = "1gbit",
    device: Annotated[str, typer.Option(help="cpu; or cuda: all ranks on one GPU, and NCCL between them")] = "cpu",
    ranks_per_host: Annotated[int, typer.Option(help="those of a host talk over its loopback, unshaped", min=1)] = 1,
    models: Annotated[str, typer.Option(help="of the zoo, each with its batch per rank")] = "vgg16_cifar:8",
    methods: Annotated[str, typer.Option(help="ways of training; ddp-5 is DDP with bucket_cap_mb=5")] = METHODS,
    rounds: Annotated[int, typer.Option(help="times that each method has its turn", min=1)] = 3,
    iterations: Annotated[int, typer.Option(help="of each turn", min=1)] = 2,
    warmup: Annotated[int, typer.Option(help="iterations of each method before the first round", min=2)] = 3,
    profile: Annotated[int, typer.Option(help="iterations that planning methods profile before these", min=2)] = 5,
    startup: Annotated[str, typer.Option(help="methods whose start is timed too, cold and warm, or none")] = STARTUP,
    startup_only: Annotated[bool, typer.Option(help="time starts only; a record keeps its rows")] = False,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Time iterations of training by every method, taking turns on the same emulated hosts. Needs root."""
    from pathlib import Path

    from penstock.bench.jobs import LOOPBACK, Place
    from penstock.bench.record import load_record
    from penstock.bench.training import (
        Effort,
        count_steps,
        parse_methods,
        parse_models,
        parse_startup,
        startup_rows,
        train_rows,
    )
    from penstock.cli.bench_codecs import check_device
    from penstock.cli.output import print_json, progress
    from penstock.errors import PenstockError

    if rate == LOOPBACK:
        raise PenstockError("--rate loopback: bytes are counted at the NICs of emulated hosts; wanted a rate or none")
    check_device(device)
    before = dict(load_record(Path(out))) if startup_only and out and Path(out).exists() else {}
    place = Place(hosts, rate, gpus="shared" if device == "cuda" else "none", ranks_per_host=ranks_per_host)
    names, tasks, starting = parse_methods(methods), parse_models(models), parse_startup(startup)
    effort = Effort(rounds, iterations, warmup, profile)
    steps = (0 if startup_only else count_steps(names, rounds)) + 2 * len(starting)
    rows, starts = [], []
    with progress("training", len(tasks) * steps) as done:
        for model, batch in tasks:
            told = partial(_tell, done, model)
            rows += [] if startup_only else train_rows(place, model, batch, names, effort, told)
            starts += startup_rows(place, model, batch, starting, profile, told)
    if json:
        print_json([*rows, *starts])
    else:
        _print(rows)
        _print_starts(starts)
    if out:
        _save(rows, starts, out, before)


def _save(rows: list[dict[str, Any]], starts: list[dict[str, Any]], out: str, before: dict[str, Any]) -> None:
    """Write the record; starts timed by themselves go into the one there was `before`, with a source of their own."""
    from penstock.bench.record import make_record, save_record

    record = make_record("train", rows)
    source = {name: record[name] for name in ("date", "command", "commit")}
    record = before or record
    save_record(record | {"startup": {**source, "rows": starts}} if starts else record, out)


def _tell(done: "Done", model: str, method: str) -> None:
    done(f"{model}, {method}")


def _print(rows: list[dict[str, Any]]) -> None:
    from penstock.cli.output import print_table

    columns = (
        "model",
        "batch",
        "method",
        "iteration",
        "spread",
        "exposed",
        "MB sent",
        "messages",
        "predicted",
        "x ddp",
        "x best ddp",
    )
    if not rows:
        return
    title = f"training on {rows[0]['hosts']} hosts at {rows[0]['rate']}"
    print_table(title, columns, [_cells(row) for row in rows if "error" not in row])
    for row in rows:
        if "error" in row:
            print(f"{row['model']}, {row['method']} failed: {row['error']}")


def _print_starts(rows: list[dict[str, Any]]) -> None:
    from penstock.cli.output import format_seconds, print_table

    columns = ("model", "method", "start", "ready", "training stood still", "next iteration", "routes")
    times = ("ready_seconds", "held_seconds", "next_iteration_seconds")
    cells = [
        (row["model"], row["method"], row["start"], *(format_seconds(row[each]) for each in times), row["routes"])
        for row in rows
        if "error" not in row
    ]
    if cells:
        print_table(f"until the plan is in force, on {rows[0]['hosts']} hosts at {rows[0]['rate']}", columns, cells)
    for row in rows:
        if "error" in row:
            print(f"{row['model']}, {row['method']}, {row['start']} start failed: {row['error']}")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    from penstock.cli.output import format_seconds

    def seconds(name: str) -> str:
        return "" if row[name] is None else "-" * (row[name] < 0) + format_seconds(abs(row[name]))

    def ratio(name: str) -> str:
        return "" if row[name] is None else f"{row[name]:.3f}"

    return (
        row["model"], row["batch"], row["method"], seconds("iteration_seconds"), seconds("spread"),
        seconds("exposed_seconds"), row["bytes_sent"] / 1e6, row["messages"] or "", seconds("predicted_seconds"),
        ratio("ratio_to_ddp"), ratio("ratio_to_best_ddp"),
    )  # fmt: skip
