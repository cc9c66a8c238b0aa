"""`penstock bench casync` and `joint`: what each idea of HiPress adds; all choices at once beside hand-made ones."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import JsonOption, RecordOption, parse_counts, split_list
from penstock.cli.routes import check_routes

if TYPE_CHECKING:
    from penstock.bench.casync_worker import CasyncJob

CODECS = "onebit,terngrad(bitwidth=2)"
TRACES = "vgg16,bert_base,resnet50,googlenet,lstm_ptb"


def bench_casync(
    hosts: Annotated[str, typer.Option(help="numbers of emulated hosts")] = "4",
    rate: Annotated[str, typer.Option(help="of each NIC")] = "1gbit",
    traces: Annotated[str, typer.Option(help="what to replay, each with the strategy of its buckets")] = (
        "vgg16:parameter_server,bert_base:ring"
    ),
    codecs: Annotated[str, typer.Option(help="compressors; the first one in the steps of Fig. 11")] = CODECS,
    study: Annotated[str, typer.Option(help="steps (Fig. 11), or joint: beside the best hand-made ones")] = "steps",
    iterations: Annotated[int, typer.Option(help="of each configuration, after one to warm up", min=1)] = 2,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Replay stock, + codec, + pipelining, + bulk, + selective on emulated hosts. Needs root."""
    from penstock.bench.casync import casync_rows
    from penstock.bench.casync_worker import CasyncJob
    from penstock.bench.jobs import Place
    from penstock.bench.record import make_record, save_record
    from penstock.cli.output import print_json
    from penstock.cli.progress import progress

    jobs = [_job(each, CasyncJob, split_list(codecs), iterations, study) for each in traces.split(",")]
    places = [Place(count, rate) for count in parse_counts(hosts, "--hosts")]
    total = len(places) * len(jobs) * 5 * (iterations + 1)
    with progress("casync", total) as done:
        rows = [row for place in places for job in jobs for row in casync_rows(place, job, done)]
    if out:
        save_record(make_record("casync" if study == "steps" else "joint_replayed", rows), out)
    if json:
        print_json(rows)
    else:
        _print(rows)


def _job(text: str, make: "type[CasyncJob]", codecs: list[str], iterations: int, study: str) -> "CasyncJob":
    from penstock.errors import PenstockError
    from penstock.traces import find_trace

    if study not in ("steps", "joint"):
        raise PenstockError(f"--study: found {study!r}; wanted steps or joint")
    trace, _, strategy = text.partition(":")
    find_trace(trace)
    check_routes(f"{strategy or 'ring'}+{codec}" for codec in codecs)
    return make(trace, strategy or "ring", tuple(codecs), iterations, study)


def _print(rows: list[dict[str, Any]]) -> None:
    from penstock.cli.output import format_seconds, print_table

    print_table(
        "replayed on emulated hosts",
        ("hosts", "what", "how", "messages", "compressed", "measured", "spread", "times as fast", "simulated", "error"),
        [
            (
                *(row[name] for name in ("hosts", "what", "how", "messages")),
                f"{100 * row['compressed_share']:.0f}%",
                *(format_seconds(row[name]) for name in ("measured_seconds", "spread")),
                f"{row['times_as_fast']:.2f}",
                format_seconds(row["simulated_seconds"]),
                f"{100 * row['error']:+.1f}%",
            )
            for row in rows
        ],
    )


def bench_joint(
    traces: Annotated[str, typer.Option(help="what to plan")] = TRACES,
    codecs: Annotated[str, typer.Option(help="compressors to choose from")] = CODECS,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Compare joint with twenty hand-made configurations, simulated on published clusters."""
    from penstock.bench.joint import joint_rows
    from penstock.bench.record import make_record, save_record
    from penstock.cli.output import format_seconds, print_json, print_table
    from penstock.curves import codec_curves_document
    from penstock.runtime.measure_codecs import measure_codecs
    from penstock.traces import find_trace

    names = traces.split(",")
    for name in names:
        find_trace(name)
    curves = measure_codecs(split_list(codecs))
    rows = list(joint_rows(names, curves))
    if out:
        notes = {codec: codec_curves_document(each) for codec, each in curves.items()}
        save_record(make_record("joint", rows, codec_curves=notes), out)
    if json:
        print_json(rows)
        return
    print_table(
        "simulated iterations: the best of twenty hand-made configurations, and joint",
        ("network", "workers", "trace", "best dense", "best hand-made", "", "joint", "against it"),
        [
            (
                *(row[name] for name in ("network", "workers", "trace")),
                format_seconds(row["best_dense_seconds"]),
                row["best_hand_made"],
                format_seconds(row["best_hand_made_seconds"]),
                format_seconds(row["joint_seconds"]),
                f"{row['joint_over_best']:.3f}x",
            )
            for row in rows
        ],
    )
