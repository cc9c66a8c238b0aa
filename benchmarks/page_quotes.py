"""What pages written by hand quote of the benchmark records: short tables, and sentences with their figures."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import page_soak
from casync import least_gain, simulated, spread_of, verdict
from page_tables import markdown_rows
from penstock.cli.check import described_by, predicted, shipped_about, shown
from penstock.cluster.topology import parse_rate
from penstock.traces import load_shipped
from run_all import JOINT_RECORDS, ONE_CORE_JOINT, ONE_CORE_STEPS, STEP_RECORDS

Record = Mapping[str, Any]
Row = Mapping[str, Any]
METHODS = {
    "no-communication": "no communication at all",
    "ddp": "stock DDP",
    "best": "stock DDP, best of bucket_cap_mb 1, 5, 25, 100",
    "ddp-fp16": "stock DDP, fp16 hook",
    "ddp-powersgd": "stock DDP, PowerSGD hook",
    "penstock-exact": "penstock, exact plan",
    "penstock-bsp-split": "penstock, half of the all-reduce during the next forward pass",
    "penstock-terngrad": 'penstock, `codec="terngrad"`',
    "penstock-gtopk": 'penstock, `codec="gtopk"`, density 0.001',
    "penstock-onebit": 'penstock, `codec="onebit"`',
}
GPU, TIME_TO_LOSS = "gpu", "time-to-loss"  # not one file each: all records of that kind
TIME_TO_LOSS_PICTURE = "pictures/time-to-loss.png"  # beside the page of benchmarks
TIME_TO_LOSS_PAGE = "https://github.com/penstock/penstock/blob/main/docs/benchmarks.md#time-to-loss"
STEPS = ("stock", "+ codec", "+ pipelining", "+ bulk", "+ selective")
SPARSE = ("ring", "topk_allgather", "gtopk", "gtopk_doubling")
TUNED = ("ddp-1", "ddp-5", "ddp-25", "ddp-100")


def links_table(record: Record) -> str:
    """Return what links of each rate deliver, pairs of hosts alone and together."""
    rows = [
        (
            row["rate"],
            row["pairs"],
            f"{row['median_bits_per_second'] / 1e6:.1f} Mb/s",
            f"{row['least_deviation']:+.2%} to {row['largest_deviation']:+.2%}",
        )
        for row in record["rows"]
    ]
    return markdown_rows(("rate", "pairs", "median payload", "deviation"), rows)


def messages_table(record: Record) -> str:
    """Return how long one message takes after a pause, beside its size over the rate."""
    rows = [
        (row["rate"], str(row["nbytes"]), _shown(row["asked_seconds"]), _shown(row["seconds"]))
        for row in record["messages"]
    ]
    return markdown_rows(("rate", "bytes", "size / rate", "one message after a pause"), rows)


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


@dataclass(frozen=True, slots=True)
class Quote:
    """A piece of a page, and the records that it is made from."""

    files: tuple[str, ...]
    write: Callable[..., str]  # takes the records
    further: tuple[str, ...] = ()  # that it takes too where they are there


def train_table(record: Record) -> str:
    """Return seconds per iteration and bytes of each method."""
    rows = {row["method"]: row for row in record["rows"]}
    rows["best"] = min((rows[name] for name in TUNED), key=lambda row: float(row["iteration_seconds"]))
    cells = [_method(title, rows[name]) for name, title in METHODS.items()]
    return markdown_rows(("method", "iteration", "against stock DDP", "MB sent"), cells)


def _method(title: str, row: Row) -> tuple[str, ...]:
    if "error" in row:
        return title, "crashes", "", ""
    sent = row["bytes_sent"] / 1e6
    shown = "0" if sent < 0.01 else f"{sent:.0f}" if sent >= 10 else f"{sent:.1f}"
    return title, f"{row['iteration_seconds']:.3f}", f"{row['ratio_to_ddp']:.2f}x", shown


def train_text(vgg: Record, resnet: Record, lstm: Record) -> str:
    """Return how dense plans fare against stock DDP tuned by hand."""
    rows = {row["method"]: row for row in vgg["rows"]}
    plan, split = (against(rows[name]["ratio_to_best_ddp"]) for name in ("penstock-exact", "penstock-bsp-split"))
    others = [_of(record, "penstock-exact")["ratio_to_best_ddp"] for record in (resnet, lstm)]
    spread = max(row["spread"] for row in rows.values() if "error" not in row)
    return (
        f"Spreads are up to {spread:.2f} s. With a codec, communication is almost gone. Without one every byte has to "
        f"travel: against the best of stock DDP's bucket sizes our plan takes {plan}, and {split} with half of each "
        f"all-reduce during the next forward pass; on ResNet-50 {against(others[0])}, on an LSTM of 66 million "
        f"parameters {against(others[1])} (`train-resnet50.json`, `train-lstm_ptb.json`)."
    )


def against(ratio: float) -> str:
    """Return a ratio of times in words.

    >>> against(0.977), against(1.02), against(1.001)
    ('2% less time', '2% more', 'as long')
    """
    percent = round(100 * (ratio - 1))
    return "as long" if percent == 0 else f"{-percent}% less time" if percent < 0 else f"{percent}% more"


def split_text(record: Record) -> str:
    """Return what half of an all-reduce during the next forward pass gains."""
    rows = {row["method"]: row for row in record["rows"]}
    ours, stock = (rows[name]["iteration_seconds"] for name in ("penstock-bsp-split", "ddp"))
    return (
        f"On VGG-16 (batch 8, 4 hosts at 1 Gb/s, four ranks on two cores) `split` takes {ours:.2f} s an iteration "
        f"beside stock DDP's {stock:.2f}: {stock / ours:.2f}x as fast ([benchmarks](benchmarks.md#training))."
    )


def gains_text(record: Record) -> str:
    """Return what exact merging gains over stock buckets and over greedy merging, and how right predictions were."""
    over = {how: [row for row in record["rows"] if row["how"] == how] for how in ("threshold", "greedy")}
    worst = max(abs(row["error"]) for row in record["rows"])
    return (
        f"Replayed in seven settings, the exact plan is {_range(over['threshold'])} as fast as stock DDP's buckets and "
        f"{_range(over['greedy'])} as fast as the published greedy merging; predictions are off by {100 * worst:.0f}% "
        "at most (`gains.json`)."
    )


def _range(rows: Sequence[Row]) -> str:
    gains = [row["measured_gain"] for row in rows]
    return f"{min(gains):.2f}x to {max(gains):.2f}x"


MODELS = {
    "vgg16": "VGG-16", "bert_base": "BERT-base", "resnet50": "ResNet-50", "googlenet": "GoogLeNet", "lstm_ptb": "LSTM",
}  # fmt: skip


def casync_table(*records: Record) -> str:
    """Return what each step of HiPress's Fig. 11 takes, and whether that is a gain."""
    rows = []
    for record in sorted(records, key=_place):
        found = {row["how"]: row for row in record["rows"]}
        first, steps = found["stock"], [found[how] for how in STEPS]
        name = f"{MODELS[first['what']]}, {first['hosts']} hosts, {_rate(first)}"
        cells = [_step_text("gains", steps[0]), *(_step_text(verdict(*pair), pair[1]) for pair in pairwise(steps))]
        rows.append((name, f"{_core_speed(record):g}x", _iterations(record), *cells))
    return markdown_rows(("", "a host's core", "iterations", "stock DDP", *STEPS[1:]), rows)


def _place(record: Record) -> tuple[float, float, int, bool]:
    """Return what rows are sorted by: the rate, the speed of cores, the hosts, and the model, VGG-16 first."""
    first = record["rows"][0]
    return parse_rate(first["rate"]) or 0.0, _core_speed(record), first["hosts"], first["what"] != "vgg16"


def _core_speed(record: Record) -> float:
    """Return how many times as fast as one of this machine the core of a host is, against its links."""
    first = record["rows"][0]
    return float(record["machine"]["cores"] * first.get("slower", 1) / first["hosts"])


def _rate(row: Row) -> str:
    return str(row["rate"]).replace("gbit", " Gb/s").replace("mbit", " Mb/s")


def _iterations(record: Record) -> str:
    """Return of how many iterations compressed rows are the median, as the record's command says."""
    words = str(record["command"]).split()
    return words[words.index("--iterations") + 1] if "--iterations" in words else "5"


def _step_text(found: str, row: Row) -> str:
    """Return a time in ms: plain where the step gains, in bold where it loses, and in brackets where it shows neither.

    >>> _step_text("same", {"measured_seconds": 0.0291})
    '(29.1)'
    """
    seconds = row["measured_seconds"]
    text = f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
    return text if found == "gains" else f"**{text}**" if found == "loses" else f"({text})"


def casync_text(*records: Record) -> str:
    """Return how many steps gain, for each speed of a host's core."""
    found: dict[tuple[float, float, str], Counter[str]] = {}
    for record in records:
        where = parse_rate(record["rows"][0]["rate"]) or 0.0, _core_speed(record), _rate(record["rows"][0])
        steps = {row["how"]: row for row in record["rows"]}
        pairs = pairwise(steps[how] for how in STEPS)
        found.setdefault(where, Counter()).update(verdict(*pair) for pair in pairs)
    told = (
        f"{counts['gains']} of {counts.total()} at {rate} with a core {speed:g} times as fast{_not_shown(counts)}"
        for (_, speed, rate), counts in sorted(found.items())
    )
    return f"Steps that gain for certain: {'; '.join(told)}."


def _not_shown(counts: Mapping[str, int]) -> str:
    words = {"loses": "slower", "within": "uncertain", "same": "the same plan", "once": "measured once"}
    found = [f"{counts[name]} {text}" for name, text in words.items() if counts[name]]
    return f" ({', '.join(found)})" if found else ""


def simulated_table(*records: Record) -> str:
    """Return how often simulations are within 5% of what was replayed, beside the null predictor."""
    found: dict[tuple[str, float, float], list[tuple[int, int, int]]] = {}
    for record in records:
        kind = "steps" if record["benchmark"] == "casync" else "`joint` and others"
        place = kind, parse_rate(record["rows"][0]["rate"]) or 0.0, _core_speed(record)
        found.setdefault(place, []).append(simulated(record["rows"]))
    rows = []
    for (kind, rate, speed), counts in sorted(found.items(), reverse=True):
        total, close, null = map(sum, zip(*counts, strict=True))
        shown = f"{rate / 1e9:g} Gb/s" if rate >= 1e9 else f"{rate / 1e6:g} Mb/s"
        rows.append((f"{kind}, {shown}", f"{speed:g}x", str(total), str(close), str(null)))
    heads = ("", "a host's core", "settings with codecs", "simulated within 5%", "null predictor within 5%")
    return markdown_rows(heads, rows)


def joint_table(*records: Record) -> str:
    """Return the time of `joint` over that of the best hand-made plan; in brackets what it certainly lies between.

    Of records without turns there stands the larger spread of both instead.
    """
    traces = list(dict.fromkeys(row["what"] for record in records for row in record["rows"]))
    rows = []
    for record in sorted(records, key=_place):
        cells = [_joint_text([row for row in record["rows"] if row["what"] == trace]) for trace in traces]
        rows.append((_rate(record["rows"][0]), f"{_core_speed(record):g}x", _iterations(record), *cells))
    return markdown_rows(("", "a host's core", "iterations", *(MODELS[trace] for trace in traces)), rows)


def _joint_text(rows: Sequence[Row]) -> str:
    *parts, joint = rows
    best = min(parts, key=lambda row: float(row["measured_seconds"]))
    seconds = best["measured_seconds"]
    low, high = least_gain(joint, best) / seconds, -least_gain(best, joint) / seconds  # of what joint takes more
    has_turns = bool(joint.get("turns_seconds"))
    known = f"{low:+.1%} to {high:+.1%}" if has_turns else f"spread {spread_of(best, joint) / seconds:.1%}"
    return f"{joint['measured_seconds'] / seconds:.3f} ({known})"


def python_text(record: Record) -> str:
    """Return the walk's share of all cores by model and planner, and whether that is below what was asked."""
    told = "; ".join(
        f"{row['model']} by `{row['planner']}` {row['share']:.1%} ({row['messages']} messages, "
        f"{row['calls_per_second']:,.0f} calls a second)"
        for row in record["rows"]
    )
    missed = [claim["text"].split(":")[0] for claim in record["claims"] if not claim["holds"]]
    verdict = f"above the 3% asked: {', '.join(missed)}" if missed else "all planned rows are below the 3% asked"
    return f"Of all cores at most: {told}. So {verdict}."


def sparse_table(record: Record) -> str:
    """Return the exchanges of one density beside the dense ring."""
    rows = {row["strategy"]: row for row in record["rows"] if row["density"] in (None, 0.005)}
    ring = rows["ring"]["seconds"]
    cells = [
        (f"`{name}`", f"{1e3 * rows[name]['seconds']:,.0f}", f"{ring / rows[name]['seconds']:.1f}") for name in SPARSE
    ]
    return markdown_rows(("", "ms", "times as fast as the dense ring"), cells)


def sparse_text(*records: Record) -> str:
    """Return how often the model of sparse exchanges is right."""
    claims = [claim for record in records for claim in record["claims"]]
    choices = [claim["holds"] for claim in claims if "faster as predicted" in claim["text"]]
    models = [claim for claim in claims if claim["text"].startswith("model off")]
    dense = [claim["holds"] for claim in models if "density 0.005" in claim["text"]]
    worst = max(claim["value"] for claim in models if "density 0.001" in claim["text"])
    return (
        f"The model is within 20% in {sum(dense)} of {len(dense)} rows of density 0.005 on 4, 8 and 16 hosts, gloo and "
        f"MPI. Where it says that one of tree and all-gather is faster, it is right in {sum(choices)} of "
        f"{len(choices)} rows. At density 0.001, where a block takes 1.6 ms, it is off by up to a factor of "
        f"{1 + worst:.1f}."
    )


def coordinator_table(record: Record) -> str:
    """Return how long pushing takes by each decider, on every number of hosts."""
    found = {(row["hosts"], row["how"]): row["measured_seconds"] for row in record["rows"]}
    hosts = sorted({count for count, _ in found})
    deciders = [how for how in ("at will", "bulks", "steady", "online") if (hosts[0], how) in found]
    rows = [(how, *(f"{1e3 * found[count, how]:.0f}" for count in hosts)) for how in deciders]
    return markdown_rows(("ms", *(f"{count} hosts" for count in hosts)), rows)


GPU_METHODS = {  # of benchmarks/gpu_ranks.py, in the order of the table
    "none": "no communication at all",
    "stock": "stock DDP",
    "fp16 hook": "stock DDP, torch's fp16 hook",
    "powersgd 4": "stock DDP, PowerSGD hook of rank 4",
    "dense plan": "penstock, dense plan",
    "blocks(bits=4)": 'penstock, `codec="blocks(bits=4)"`',
    "auto": 'penstock, `codec="auto"`',
    "onebit": 'penstock, `codec="onebit"`',
    "none, AdamW": "AdamW, no communication at all",
    "stock, AdamW": "AdamW, stock DDP",
    "CompressedAdamW onebit(block=256)": '`CompressedAdamW`, `codec="onebit(block=256)"`',
}


Column = tuple[str, str]  # of a table of GPU ranks: model and rate
RECORDS_PAGE = "https://github.com/penstock/penstock/blob/main/benchmarks/results/gpu"


def gpu_table(records: Sequence[Record]) -> str:
    """Return milliseconds of every method for each model and rate on four hosts, and the record of each column."""
    return _ranks_table(records, 4)


def one_worker_table(records: Sequence[Record]) -> str:
    """Return the same of one worker, which has nothing to send."""
    return _ranks_table(records, 1)


def _ranks_table(records: Sequence[Record], hosts: int) -> str:
    """Return a table each of whose columns is one record: that with the most methods, of several the latest.

    Where a later record has fewer methods, its columns follow in a table of their own.
    """
    found: dict[Column, list[tuple[Record, dict[str, float]]]] = {}
    for record in sorted(records, key=lambda each: str(each.get("date", ""))):
        for column, its_times in _by_column(record, hosts).items():
            found.setdefault(column, []).append((record, its_times))
    columns = sorted(found, key=lambda pair: (pair[1] != "1gbit", pair[0] < "R"))
    chosen = {column: max(found[column][::-1], key=lambda pair: len(pair[1])) for column in columns}
    newer = {column: found[column][-1] for column in columns if found[column][-1] is not chosen[column]}
    again = f"\n\nMeasured again later, with fewer methods:\n\n{_with_sources(newer)}" if newer else ""
    return _with_sources(chosen) + again


def _with_sources(columns: Mapping[Column, tuple[Record, Mapping[str, float]]]) -> str:
    """Return a table of methods, and below it a line for each record with the columns that it is."""
    times = {(*column, method): ms for column, (_, row) in columns.items() for method, ms in row.items()}
    shown = [name for name in GPU_METHODS if any((*column, name) in times for column in columns)]
    rows = [(GPU_METHODS[name], *(_ms_beside_stock(times, *column, name) for column in columns)) for name in shown]
    sources: dict[str, list[str]] = {}
    for column, (record, _) in columns.items():
        sources.setdefault(_named(record), []).append(_column_name(column))
    lines = [f"- {'; '.join(names)}: {source}" for source, names in sources.items()]
    return "\n".join([markdown_rows(("method", *map(_column_name, columns)), rows), "", *lines])


def _by_column(record: Record, hosts: int) -> dict[Column, dict[str, float]]:
    """Return the milliseconds that a record has of each method, for each model and rate."""
    found: dict[Column, dict[str, float]] = {}
    for row in record["rows"]:
        if row.get("method") in GPU_METHODS and row.get("ms_per_iteration") and row.get("hosts") == hosts:
            found.setdefault((row["model"], row["rate"]), {})[row["method"]] = median(row["ms_per_iteration"])
    return found


def _named(record: Record) -> str:
    """Return the file of a record with a link, its day and its commit."""
    return f"[{record['file']}]({RECORDS_PAGE}/{record['file']}), {str(record['date'])[:10]}, commit {record['commit']}"


def _column_name(column: Column) -> str:
    model, rate = column
    return model if rate == "none" else f"{model}, {rate.replace('gbit', ' Gb/s')}"


def _ms_beside_stock(found: Mapping[tuple[str, str, str], float], model: str, rate: str, method: str) -> str:
    """Return a time and how many times as fast as stock DDP that is; what is slower than stock says so in bold."""
    if (mine := found.get((model, rate, method))) is None:
        return "-"
    stock = found.get((model, rate, "stock"))
    if method in ("none", "stock", "none, AdamW", "stock, AdamW") or stock is None or "AdamW" in method:
        return _ms(mine)
    ratio = stock / mine
    return f"{_ms(mine)} ({ratio:.2f}x)" if ratio > 1.01 else f"**{_ms(mine)} ({ratio:.2f}x)**"


def _ms(value: float) -> str:
    """Return milliseconds with three digits, or whole ones."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


TEXT_MODELS = {"cpu": "a GPT of 3.3M parameters", "gpt": "a GPT of 10.8M parameters"}  # of time_to_loss.py


def time_to_loss(records: Sequence[Record]) -> str:
    """Return the picture, and when each method of each record reached what stock DDP ended with, within 1%."""
    gpus_first = sorted(records, key=lambda record: record["task"] == "cpu")
    tables = "\n\n".join(map(_time_to_loss_table, gpus_first))
    return f"![Held-out loss against seconds of training]({TIME_TO_LOSS_PICTURE})\n\n{tables}"


def time_to_loss_text(records: Sequence[Record]) -> str:
    """Return how many times as fast `auto` was to stock DDP's final loss at each rate, and who was faster still."""
    parts = []
    for rate in sorted({record["rate"] for record in records}, key=lambda rate: parse_rate(rate) or 0):
        found: dict[str, list[float]] = {}
        for row in (row for record in records if record["rate"] == rate for row in record["rows"]):
            if row["times_stock"] is not None:
                found.setdefault(row["method"], []).append(row["times_stock"])
        ours = found.pop("ours: auto")
        faster = {
            name: times for name, times in found.items() if not name.startswith("ours") and max(times) > max(ours)
        }
        others = "".join(f", **{name} {_times(times)}**" for name, times in faster.items())
        parts.append(f"at {rate.replace('gbit', ' Gb/s')} {_times(ours)} as fast{others}")
    return (
        "By the clock, start included, until a small GPT has stock DDP's final loss: "
        f'`codec="auto"` was {"; ".join(parts)} '
        f"([runs and tables]({TIME_TO_LOSS_PAGE}))."
    )


def _times(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return f"{least} times" if least == most else f"{least} to {most} times"


def _time_to_loss_table(record: Record) -> str:
    rows = sorted(record["rows"], key=lambda row: row["seconds_to_within_1_percent"] or float("inf"))
    cells = [
        (
            row["method"],
            "never" if row["seconds_to_within_1_percent"] is None else f"{row['seconds_to_within_1_percent']:,.0f} s",
            "-" if row["times_stock"] is None else f"{row['times_stock']:.2f}x",
            f"{row['final']:.3f}",
        )
        for row in rows
    ]
    table = markdown_rows(("method", "to stock's final loss, within 1%", "times as fast", "final loss"), cells)
    rate, machine = record["rate"].replace("gbit", " Gb/s"), record["machine"]
    model = TEXT_MODELS.get(record["task"], record["task"])
    return f"{record['steps']} steps of {model} on {record['hosts']} hosts at {rate} ({machine}):\n\n{table}"


def check_output() -> str:
    """Return what `penstock check gpt2 --workers 8 --rate 10gbit` prints where there is no GPU to profile on."""
    trace = load_shipped("gpt2")
    found = predicted(trace, described_by(8, "10gbit"), "adamw")
    return "\n".join(["```text", *shown(found, shipped_about(trace)), "```"])


def _of(record: Record, method: str) -> Row:
    found: Row = next(row for row in record["rows"] if row["method"] == method)
    return found


def _files(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name}.json" for name in names)


_STEPS, _FURTHER_STEPS = _files(STEP_RECORDS), _files(ONE_CORE_STEPS)
_JOINT, _FURTHER_JOINT = _files(JOINT_RECORDS), _files(ONE_CORE_JOINT)
SHARDED = {
    "no traffic between hosts": "no traffic between hosts: torch's FSDP inside of each",
    "ours, no traffic between hosts": "no traffic between hosts: ours inside of each",
    "torch's HSDP": "torch's HSDP",
    "ours, uncompressed": "ours, uncompressed",
    "ours, blocks(bits=4)": "ours, `blocks(bits=4)`",
}
ACROSS = (  # as the page names a row, bytes that a host sends of P parameters, and its names in records
    ("torch's FSDP over gloo, float32", "6P", ("shards on two hosts: torch's FSDP", "torch's FSDP")),
    ("the same with a real reduce-scatter, as over NCCL", "4P", ()),
    ('`shard_codec="bf16"`', "2P", ("shards on two hosts: ours, shard_codec=bf16", "torch's FSDP, bf16 messages")),
    (
        '`shard_codec="blocks(bits=8)"`',
        "1.02P",
        ("shards on two hosts: ours, shard_codec=blocks(bits=8)", "torch's FSDP, blocks(bits=8) messages"),
    ),
    (
        "two replicas, `blocks(bits=4)`",
        "0.52P, while the backward pass goes on",
        ("a replica on each host: ours, blocks(bits=4)", "ours, blocks(bits=4)"),
    ),
)


def sharded_table(record: Record) -> str:
    """Return milliseconds of each way to train shards inside hosts."""
    found = _medians(record)
    rows = [(title, f"{found[name]:,.0f}") for name, title in SHARDED.items() if name in found]
    return markdown_rows(("method", "ms per iteration"), rows)


def sharded_text(record: Record) -> str:
    """Say how much faster ours is, and how much of that the codec does."""
    found = _medians(record)
    coded, dense, torchs = (found[name] for name in ("ours, blocks(bits=4)", "ours, uncompressed", "torch's HSDP"))
    floors = {"torch's FSDP": found["no traffic between hosts"]}
    if (own := found.get("ours, no traffic between hosts")) is not None:
        floors["ours"] = own
    beside = " and ".join(f"{coded / floor:.2f} times {name}" for name, floor in floors.items())
    return (
        f"On {record['date'][:10]}, {torchs / coded:.2f}x torch's HSDP: ours uncompressed is {torchs / dense:.2f}x, "
        f"the codec {dense / coded:.2f}x that. An iteration takes {beside} without traffic between hosts. Ours "
        "exchanges directly inside of a host, where torch's reduce-scatter over gloo sends twice the bytes."
    )


def across_table(record: Record) -> str:
    """Return bytes and milliseconds where shards lie on two hosts."""
    found = _medians(record)
    rows = [
        (title, nbytes, next((f"{found[name]:,.0f}" for name in names if name in found), "-"))
        for title, nbytes, names in ACROSS
    ]
    return markdown_rows((record["date"][:10], "bytes", "ms per iteration"), rows)


def _medians(record: Record) -> dict[str, float]:
    return {row["method"]: row["median_ms"] for row in record["rows"]}


QUOTES: Mapping[str, Quote] = {
    "check": Quote((), check_output),
    "gpu": Quote((GPU,), gpu_table),
    "one-worker": Quote((GPU,), one_worker_table),
    "time-to-loss": Quote((TIME_TO_LOSS,), time_to_loss),
    "time-to-loss-text": Quote((TIME_TO_LOSS,), time_to_loss_text),
    "train": Quote(("train.json",), train_table),
    "train-text": Quote(("train.json", "train-resnet50.json", "train-lstm_ptb.json"), train_text),
    "split-text": Quote(("train.json",), split_text),
    "gains-text": Quote(("gains.json",), gains_text),
    "casync": Quote(_STEPS, casync_table, _FURTHER_STEPS),
    "casync-text": Quote(_STEPS, casync_text, _FURTHER_STEPS),
    "casync-simulated": Quote(_STEPS + _JOINT, simulated_table, _FURTHER_STEPS + _FURTHER_JOINT),
    "python-share": Quote(("interpreter_share.json",), python_text),
    "joint-replayed": Quote(_JOINT, joint_table, _FURTHER_JOINT),
    "sparse": Quote(("sparse-16-hosts.json",), sparse_table),
    "sparse-text": Quote(tuple(f"sparse-{hosts}-hosts.json" for hosts in (4, 8, 16)), sparse_text),
    "sharded": Quote(("fsdp-2x2-1gbit.json",), sharded_table),
    "sharded-text": Quote(("fsdp-2x2-1gbit.json",), sharded_text),
    "sharded-across": Quote(("fsdp-across-1gbit.json",), across_table),
    "coordinator": Quote(("coordinator.json",), coordinator_table),
    "links": Quote(("links.json",), links_table),
    "messages": Quote(("links.json",), messages_table),
    "kills": Quote(("soak-kills.json",), page_soak.kills_text),
    "kills-later": Quote(("soak-kills-later.json",), page_soak.kills_text),
    "kills-nccl": Quote(("soak-kills-nccl.json",), page_soak.kills_text),
    "damage": Quote(("soak-damage.json",), page_soak.damage_text),
    "disturbances": Quote(("soak-links.json",), page_soak.disturbances_text),
    "iterations": Quote(("soak-iterations.json",), page_soak.iterations_text),
    "elastic": Quote(("soak-elastic.json",), page_soak.elastic_text),
}
