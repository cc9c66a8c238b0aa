"""What pages written by hand quote of the benchmark records: short tables, and sentences with their figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import page_soak
from page_tables import markdown_rows
from penstock.cli.check import described_by, predicted, shipped_about, shown
from penstock.traces import load_shipped

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
TIME_TO_LOSS_PICTURE = "https://raw.githubusercontent.com/penstock/penstock/main/docs/pictures/time-to-loss.png"
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


def casync_table(*records: Record) -> str:
    """Return what each step of HiPress's Fig. 11 brings."""
    rows = []
    for record in records:
        found = {row["how"]: row for row in record["rows"]}
        first = found["stock"]
        model = {"vgg16": "VGG-16", "bert_base": "BERT-base"}[first["what"]]
        by = "ring" if found["+ codec"]["routes"].startswith("ring") else "parameter servers"
        rows.append(
            (f"{model}, {by}, {first['hosts']} hosts", *_falling([found[how]["measured_seconds"] for how in STEPS]))
        )
    return markdown_rows(("", "stock DDP", *STEPS[1:]), rows)


def _falling(seconds: Sequence[float]) -> list[str]:
    """Return times as text, in bold where one is longer than the one before."""
    before = [seconds[0], *seconds]
    return [
        f"**{now:.2f}**" if now > 1.005 * last else f"{now:.2f}" for last, now in zip(before, seconds, strict=False)
    ]


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


def gpu_table(records: Sequence[Record]) -> str:
    """Return milliseconds of every method for each model and rate; of several records the latest counts."""
    found: dict[tuple[str, str, str], float] = {}
    for record in sorted(records, key=lambda each: str(each.get("date", ""))):
        for row in record["rows"]:
            if row.get("method") in GPU_METHODS and row.get("ms_per_iteration") and row.get("hosts") == 4:
                found[row["model"], row["rate"], row["method"]] = median(row["ms_per_iteration"])
    columns = sorted({(model, rate) for model, rate, _ in found}, key=lambda pair: (pair[1] != "1gbit", pair[0] < "R"))
    shown = [name for name in GPU_METHODS if any((*column, name) in found for column in columns)]
    heads = [f"{model}, {rate.replace('gbit', ' Gb/s')}" for model, rate in columns]
    rows = [(GPU_METHODS[name], *(_ms_beside_stock(found, *column, name) for column in columns)) for name in shown]
    return markdown_rows(("method", *heads), rows)


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


QUOTES: Mapping[str, Quote] = {
    "check": Quote((), check_output),
    "gpu": Quote((GPU,), gpu_table),
    "time-to-loss": Quote((TIME_TO_LOSS,), time_to_loss),
    "train": Quote(("train.json",), train_table),
    "train-text": Quote(("train.json", "train-resnet50.json", "train-lstm_ptb.json"), train_text),
    "split-text": Quote(("train.json",), split_text),
    "gains-text": Quote(("gains.json",), gains_text),
    "casync": Quote(
        tuple(f"casync-{model}-{hosts}-hosts.json" for hosts in (4, 8) for model in ("vgg", "bert")), casync_table
    ),
    "sparse": Quote(("sparse-16-hosts.json",), sparse_table),
    "sparse-text": Quote(tuple(f"sparse-{hosts}-hosts.json" for hosts in (4, 8, 16)), sparse_text),
    "coordinator": Quote(("coordinator.json",), coordinator_table),
    "links": Quote(("links.json",), links_table),
    "messages": Quote(("links.json",), messages_table),
    "kills": Quote(("soak-kills.json",), page_soak.kills_text),
    "kills-nccl": Quote(("soak-kills-nccl.json",), page_soak.kills_text),
    "damage": Quote(("soak-damage.json",), page_soak.damage_text),
    "disturbances": Quote(("soak-links.json",), page_soak.disturbances_text),
    "iterations": Quote(("soak-iterations.json",), page_soak.iterations_text),
    "elastic": Quote(("soak-elastic.json",), page_soak.elastic_text),
}
