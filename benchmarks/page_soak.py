"""What the page of hostile conditions, docs/soak.md, says of the records of `make soak`."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from page_tables import markdown_rows

Record = Mapping[str, Any]
Row = Mapping[str, Any]
GOOD = ("named", "cannot know")  # of a survivor


def kills_text(record: Record) -> str:
    """Return how survivors of kills ended, by engine and signal, and each case that did not end well."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in record["rows"]:
        groups.setdefault((row["engine"], row["signal"]), []).append(row)
    cells = [_kill_cells(*key, rows) for key, rows in sorted(groups.items())]
    table = markdown_rows(("engine, signal", "kills", "survivors", "named it", "cannot know", "other"), cells)
    slowest = ", ".join(f"{seconds:g} s after {name}" for name, seconds in sorted(record["slowest_seconds"].items()))
    limit = record["hangs_after"]
    counts = (
        f"{sum(row['cases'] for row in record['rows']):,} kills: {record['good']:.2%} of survivors named the rank or "
        f"said that they cannot know. The last process ended {slowest}, one that hangs excepted: after "
        f"{limit['times_the_timeout']:g} times the job's timeout and {limit['and_seconds']:g} s a survivor counts as "
        f"hanging.{_not_begun(record)}{_rest(record)} {_origin(record)}"
    )
    return "\n\n".join([table, counts, *_kill_findings(record)])


def _not_begun(record: Record) -> str:
    """Say which cases have no kill: their jobs failed before the signal, whatever the timeout."""
    seeds = ", ".join(map(str, record.get("not_begun", ())))
    return f" **No kill** in the cases of seeds {seeds}: their jobs failed before the signal came." if seeds else ""


def _rest(record: Record) -> str:
    """Say which cases are of another commit than the record's last one."""
    if "rest" not in record:
        return ""
    rest = record["rest"]
    number = sum(row["cases"] for row in record["rows"] if row["route"] == rest["without"])
    return f" The {number:,} cases of {rest['without']} were run again with newer code, the others before that."


def _kill_cells(engine: str, signal: str, rows: Sequence[Row]) -> tuple[str, ...]:
    ends = _sum(row["outcomes"] for row in rows)
    other = ", ".join(f"**{number} {outcome}**" for outcome, number in sorted(ends.items()) if outcome not in GOOD)
    numbers = (sum(row["cases"] for row in rows), ends.total(), *(ends[each] for each in GOOD))
    return f"{engine}, {signal}", *map("{:,}".format, numbers), other or "0"


def _kill_findings(record: Record) -> list[str]:
    """Return lists of the cases that did not end well, those that were run again since apart."""
    titles = {"findings": "Not good:", "earlier": "Not good on an earlier version, and run again since:"}
    return [
        "\n".join([title, "", *map(_kill_line, record[name])]) for name, title in titles.items() if record.get(name)
    ]


def _kill_line(found: Mapping[str, Any]) -> str:
    case = found["case"]
    ends = ", ".join(f"{number} {outcome}" for outcome, number in found["outcomes"].items())
    what = f"{case['signal']} to rank {case['victim']} of {case['ranks']} over {case['engine']}, {case['route']}"
    return f"- seed {case['seed']}: {what}, phase {found['phase']}: {ends}"


def damage_text(record: Record) -> str:
    """Return how many damaged payloads and files of each format were read, refused, or anything else."""
    rows = [row for row in record["rows"] if row["kind"] == "files"]
    payloads = [row for row in record["rows"] if row["kind"] == "payloads"]
    title = f"payloads of {len(payloads)} codecs"
    cells = [_damage_cells(title, payloads), *(_damage_cells(row["of"], [row]) for row in rows)]
    table = markdown_rows(("what was damaged", "cases", "read", "refused", "crashes, other errors, slow"), cells)
    parts = [table, _origin(record)]
    for name, said in {"findings": "Found, and open:", "earlier": "Found by earlier runs, and mended:"}.items():
        lines = [f"- {each['of']}, {each['damage']}: {each['result']}" for each in record[name]]
        parts += ["\n".join([said, "", *lines])] if lines else []
    return "\n\n".join(parts)


def _damage_cells(title: str, rows: Sequence[Row]) -> tuple[str, ...]:
    ends = _sum(row["outcomes"] for row in rows)
    other = ends.total() - ends["loaded"] - ends["refused"]
    shown = f"{other:,}" if not other else f"**{other:,}**"
    return title, f"{ends.total():,}", f"{ends['loaded']:,}", f"{ends['refused']:,}", shown


def disturbances_text(record: Record) -> str:
    """Return what disturbed links did to averages, by the kind of disturbance."""
    kinds: dict[str, list[Row]] = {}
    for row in record["rows"]:
        kinds.setdefault(row["kind"], []).append(row)
    names = ("disturbances", "same_bits", "error_on_all_ranks", "wrong_or_hanging")
    cells = [
        (kind, *(f"{sum(row[name] for row in rows):,}" for name in names), f"{_longest(rows):.2g} s")
        for kind, rows in kinds.items()
    ]
    columns = ("kind", "times", "same bits", "an error on all ranks", "wrong, or a hang", "longest")
    routes = sorted({row["route"] for row in record["rows"]})
    return f"{markdown_rows(columns, cells)}\n\nRoutes: {'; '.join(routes)}. {_origin(record)}"


def _longest(rows: Sequence[Row]) -> float:
    return max(float(row["longest_seconds"]) for row in rows)


_SAME = {
    True: "ranks ended with the same weights",
    False: "ranks ended with **different weights**",
    None: "cut off, so that ranks **did not compare their weights**",
}


def iterations_text(record: Record) -> str:
    """Return what grew in many iterations, of the rank that grew most."""
    cells = [
        (
            row["quantity"].replace("_nbytes", ", MiB"),
            *(f"{_size(row, name):,.1f}" for name in ("before", "last", "growth", "noise")),
            "**yes**" if row["grows"] else "no",
        )
        for row in record["rows"]
    ]
    table = markdown_rows(("quantity", "after 1,000", "at the end", "growth", "noise", "grows"), cells)
    done, asked = record["iterations"], record["job"]["iterations"]
    whole = f"{done:,} iterations" if done >= asked else f"**{done:,} of the {asked:,} iterations asked for**"
    same = _SAME[record["same_weights"]]
    return f"{table}\n\n{whole}, {record['plans']} plans; {same}.{_private(record)} {_origin(record)}"


def _private(record: Record) -> str:
    """Say by how much private memory rose: a growth below the limit is one, too."""
    rose = [_size(row, "growth") for row in record["rows"] if row["quantity"] == "private_nbytes" and not row["grows"]]
    return f" Private memory rose by {rose[0]:.2f} MiB; from 1 MiB on it is said to grow." if any(rose) else ""


def _size(row: Row, name: str) -> float:
    return float(row[name]) / (2**20 if row["quantity"].endswith("_nbytes") else 1)


def elastic_text(record: Record) -> str:
    """Return what became of training in each round of ranks that die and come back."""
    cells = [_round_cells(row) for row in record["rows"]]
    columns = ("round", "ranks", "steps", "unsent", "lost of any", "loss, last by first", "until two save", "good")
    asked = re.search(r"--rounds (\d+)", record["command"])
    fewer = asked is not None and len(cells) < int(asked[1])
    counts = f"**{len(cells)} of the {asked[1]} rounds asked for.** " if asked and fewer else ""
    return f"{markdown_rows(columns, cells)}\n\n{counts}{_origin(record)}"


def _round_cells(row: Row) -> tuple[str, ...]:
    if "ranks" not in row:
        return str(row["seed"]), *[""] * 6, "**no**"
    ranks, seconds = ", ".join(map(str, row["ranks"])), f"{row['until_fewer_save_seconds']:.0f} s"
    numbers = f"{row['unsent']:.2g}", f"{row['lost']:.1g}", f"{row['loss']:.2f}"
    return str(row["seed"]), ranks, str(row["last_step"]), *numbers, seconds, "yes" if row["good"] else "**no**"


def _sum(outcomes: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in outcomes:
        total.update(each)
    return total


def _origin(record: Record) -> str:
    """Return where figures are from: machine, day, commits and command, and those of parts that were run apart."""
    commits = [*record.get("commits", ()), record["commit"]]
    machine, torch = record["machine"], record["versions"].get("torch", "?")
    where = f"{machine['cores']} cores{', ' + machine['gpus'] if 'gpus' in machine else ''}, torch {torch}"
    ended = f"ended on {record['date'][:10]} with commit {commits[-1]}"
    before = f", begun with {', '.join(commits[:-1])}" if commits[:-1] else ""
    apart = [
        f" Of it, `{each['command']}` was run with commit {each['commit']}."
        for each in record.values()
        if isinstance(each, Mapping) and {"command", "commit"} <= {*each}
    ]
    return f"On {where}, {ended}{before}: `{record['command']}`.{''.join(apart)}"
