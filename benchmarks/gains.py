"""Does the plan that is predicted to be faster turn out to be, and by as much? Replayed beside DDP and greedy merging.

Where messages take far longer than computing, or far less, every way of merging them takes the same. These settings
lie between: computing as measured on a CPU, links from 200 Mb/s to 2 Gb/s, some of them long. `stock` are the fixed
buckets of torch's DistributedDataParallel (1 MiB first, then 25 MiB), `greedy` is MG-WFBP's Algorithm 1 as published.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.bench.jobs import Done, Place
from penstock.bench.record import make_record, save_record
from penstock.bench.replayed import ReplayJob, replay_rows
from penstock.cli.options import JsonOption, RecordOption
from penstock.cli.output import format_seconds, print_json, print_table, progress
from penstock.cluster.topology import parse_delay
from penstock.errors import PenstockError
from penstock.traces import find_trace
from study import Claim, claim_documents, print_claims, start

STOCK, GREEDY, EXACT = "threshold", "greedy", "exact"
PLANNERS = (STOCK, GREEDY, EXACT)
LEAST_GAIN = 1.15  # of a setting that counts
LEAST_SHARE = 0.8  # of the predicted gain, that is to be measured
LEAST_SETTINGS = 3  # with such a gain over each of the two
MOST_OFF = 0.1  # of a prediction
TELLING_GAIN = 1.02  # below, the order of two planners is a matter of noise
DEFAULT = (
    "resnet20-cpu:4:200mbit:0ms,googlenet-cpu:4:2gbit:0ms,vgg16_cifar-cpu:4:2gbit:50ms,resnet50-cpu:4:2gbit:50ms,"
    "resnet50-cpu:4:2gbit:20ms,densenet201-cpu:4:2gbit:20ms,resnet20-cpu:8:200mbit:0ms"
)
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """A trace on a network of a size."""

    trace: str  # a name or a file
    hosts: int
    rate: str  # of each NIC
    latency_seconds: float  # added to every message


def parse_settings(text: str, folder: str) -> list[Setting]:
    """Return settings written as TRACE:HOSTS:RATE:LATENCY; traces that end in -cpu are files of `folder`.

    >>> parse_settings("resnet20-cpu:4:200mbit:5ms", "traces")
    [Setting(trace='traces/resnet20-cpu.json', hosts=4, rate='200mbit', latency_seconds=0.005)]
    """
    found = []
    for part in text.split(","):
        pieces = part.strip().split(":")
        if len(pieces) != 4 or not (pieces[1].isascii() and pieces[1].isdigit() and int(pieces[1]) > 1):
            raise PenstockError(f"--settings: found {part!r}; wanted TRACE:HOSTS:RATE:LATENCY, as resnet50:4:1gbit:5ms")
        name, hosts, rate, latency = pieces
        trace = f"{folder}/{name}.json" if name.endswith("-cpu") else name
        found.append(Setting(trace, int(hosts), rate, parse_delay(latency)))
    return found


def gain_rows(settings: Sequence[Setting], iterations: int, done: Done) -> Iterator[dict[str, Any]]:
    """Replay each setting by all three plans; yield a row for each, with what exact gains over it."""
    for setting in settings:
        job = ReplayJob((setting.trace,), PLANNERS, iterations, latency_seconds=setting.latency_seconds)
        rows = list(replay_rows([Place(setting.hosts, setting.rate)], job, done))
        exact = next(row for row in rows if row["how"] == EXACT)
        yield from (_with_gain(row, exact, setting) for row in rows)


def _with_gain(row: Row, exact: Row, setting: Setting) -> dict[str, Any]:
    place = {"hosts": row["hosts"], "rate": row["rate"], "latency_seconds": setting.latency_seconds}
    found = {**place, **row, "what": _name(setting.trace)}
    if row["how"] == EXACT:
        return found
    return found | {
        "predicted_gain": row["simulated_seconds"] / exact["simulated_seconds"],
        "measured_gain": row["measured_seconds"] / exact["measured_seconds"],
    }


def _name(trace: str) -> str:
    return trace.rsplit("/", 1)[-1].removesuffix(".json")


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return what the rows were asked to show: gains, predictions, and the planners' order."""
    gains = [row for row in rows if row.get("predicted_gain", 0.0) >= LEAST_GAIN]
    counted = [
        Claim(f"settings predicted {LEAST_GAIN} or more over {_called(how)}", _count(gains, how), LEAST_SETTINGS)
        for how in (STOCK, GREEDY)
    ]
    shares = [
        Claim(f"part of the predicted gain over {_called(row['how'])}, {_where(row)}", _share(row), LEAST_SHARE)
        for row in gains
    ]
    order = [
        Claim(f"greedy over exact, {_where(row)}", row["measured_gain"], 1.0)
        for row in rows
        if row["how"] == GREEDY and row["predicted_gain"] > TELLING_GAIN
    ]
    off: dict[str, float] = {}
    for row in rows:
        off[_where(row)] = max(off.get(_where(row), 0.0), abs(row["error"]))
    worst = [Claim(f"worst of three predictions off, {where}", value, MOST_OFF, True) for where, value in off.items()]
    return [*counted, *shares, *order, *worst]


def _count(gains: Sequence[Row], how: str) -> float:
    return float(sum(row["how"] == how for row in gains))


def _share(row: Row) -> float:
    return float((row["measured_gain"] - 1) / (row["predicted_gain"] - 1))


def _called(how: str) -> str:
    return "stock" if how == STOCK else how


def _where(row: Row) -> str:
    latency = f" and {1e3 * row['latency_seconds']:g} ms" if row["latency_seconds"] else ""
    return f"{row['what']} on {row['hosts']} hosts at {row['rate']}{latency}"


def gains(
    settings: Annotated[
        str, typer.Option(help="TRACE:HOSTS:RATE:LATENCY, with commas between; default: seven of ours")
    ] = "",
    traces: Annotated[str, typer.Option(metavar="FOLDER", help="of the traces that end in -cpu")] = "benchmarks/traces",
    iterations: Annotated[int, typer.Option(help="of each plan, after one to warm up", min=1)] = 3,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Replay settings in which the exact plan is predicted to gain, and see whether it does. Needs root."""
    chosen = parse_settings(settings or DEFAULT, traces)
    for setting in chosen:
        find_trace(setting.trace)
    with progress("gains", len(chosen) * len(PLANNERS) * (iterations + 1)) as done:
        rows = list(gain_rows(chosen, iterations, done))
    answers = claim_documents(claims(rows))
    if out:
        save_record(make_record("gains", rows, claims=answers), out)
    if json:
        print_json({"rows": rows, "claims": answers})
        return
    _print(rows)
    print_claims(answers)


def _print(rows: list[dict[str, Any]]) -> None:
    print_table(
        "replayed on emulated hosts: what the exact plan gains",
        (
            "trace",
            "hosts",
            "rate",
            "latency",
            "plan",
            "messages",
            "measured",
            "simulated",
            "error",
            "gain",
            "predicted",
        ),
        [
            (
                *(row[name] for name in ("what", "hosts", "rate")),
                format_seconds(row["latency_seconds"]),
                *(row[name] for name in ("how", "messages")),
                *(format_seconds(row[name]) for name in ("measured_seconds", "simulated_seconds")),
                f"{100 * row['error']:+.1f}%",
                *(f"{row[name]:.3f}x" if name in row else "" for name in ("measured_gain", "predicted_gain")),
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    start(gains)
