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
    "penstock-onebit,penstock-terngrad,penstock-gtopk"
)


def bench_train(
    hosts: Annotated[int, typer.Option(help="number of emulated hosts", min=1)] = 4,
    rate: Annotated[str, typer.Option(help="of each NIC")] = "1gbit",
    models: Annotated[str, typer.Option(help="of the zoo, each with its batch per host")] = "vgg16_cifar:8",
    methods: Annotated[str, typer.Option(help="ways of training; ddp-5 is DDP with bucket_cap_mb=5")] = METHODS,
    rounds: Annotated[int, typer.Option(help="times that each method has its turn", min=1)] = 3,
    iterations: Annotated[int, typer.Option(help="of each turn", min=1)] = 2,
    warmup: Annotated[int, typer.Option(help="iterations of each method before the first round", min=2)] = 3,
    profile: Annotated[int, typer.Option(help="iterations that planning methods profile before these", min=2)] = 5,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Time iterations of training by every method, taking turns on the same emulated hosts. Needs root."""
    from penstock.bench.jobs import Place
    from penstock.bench.record import make_record, save_record
    from penstock.bench.train import Effort, count_steps, parse_methods, parse_models, train_rows
    from penstock.cli.output import print_json
    from penstock.cli.progress import progress

    names, tasks = parse_methods(methods), parse_models(models)
    effort = Effort(rounds, iterations, warmup, profile)
    rows = []
    with progress("training", len(tasks) * count_steps(names, rounds)) as done:
        for model, batch in tasks:
            told = partial(_tell, done, model)
            rows += train_rows(Place(hosts, rate), model, batch, names, effort, told)
    if out:
        save_record(make_record("train", rows), out)
    if json:
        print_json(rows)
    else:
        _print(rows)


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
    title = f"training on {rows[0]['hosts']} hosts at {rows[0]['rate']}"
    print_table(title, columns, [_cells(row) for row in rows if "error" not in row])
    for row in rows:
        if "error" in row:
            print(f"{row['model']}, {row['method']} failed: {row['error']}")


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
