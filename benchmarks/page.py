"""The page of benchmarks, made from the JSON records alone: nothing on it is typed by hand.

`python benchmarks/page.py` writes docs/benchmarks.md with its pictures, where long tables are told in a few rows, and
benchmarks/results/README.md, where they stand whole. It puts figures of the records into pages written by hand, so that
they cannot be out of date. Such a page holds the place open with `<!-- quote NAME -->` and `<!-- end -->`, with an
empty line inside each; what stands between them is made by `QUOTES[NAME]`.
"""

import json as json_module  # `json` is an option
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from casync import claims as casync_claims
from collective_claims import claims as collective_claims
from page_pictures import draw_benchmarks, draw_time_to_loss
from page_quotes import GPU, QUOTES, TIME_TO_LOSS
from page_sections import position, section_of
from page_tables import markdown_table, telling_table
from penstock.bench.record import load_record
from penstock.cli.options import JsonOption
from penstock.cli.output import print_json
from penstock.errors import PenstockError
from study import Claim, claim_documents, start
from training_claims import claims as training_claims

_STUDIES = ("casync", "coordinator", "gains", "gtop_k", "joint", "memory", "overlap", "sparse")
MOVED = {  # verbs of `penstock bench` that records name and that are scripts, or options of another, today
    **{f"penstock bench {name.replace('_', '-')}": f"python benchmarks/{name}.py" for name in _STUDIES},
    "penstock bench planners": "python benchmarks/planning_time.py",
    "penstock bench profile": "python benchmarks/profile_overhead.py",
    "python -m penstock.bench.measure_traces": "python benchmarks/measure_traces.py",
    "penstock bench scaling": "penstock bench replay --name scaling --hosts 2,4,8,16 --traces googlenet "
    "--planners wfbp,threshold,exact --nbytes 16000000",
    "penstock bench rates": "penstock bench replay --name rates --rate 100mbit --rate 500mbit --rate 1gbit "
    "--rate 2gbit --rate none --traces googlenet --planners threshold,exact --iterations 2 --nbytes 16000000",
}
CLAIMS: dict[str, Callable[[Sequence[Mapping[str, Any]]], list[Claim]]] = {
    "collectives": collective_claims,
    "train": training_claims,
    "casync": partial(casync_claims, study="steps"),
    "joint_replayed": partial(casync_claims, study="joint"),
}
BELOW = ("cpu",)  # folders of records that stand on the page too
_SOAK = "soak-"  # begins the names of records that docs/soak.md quotes
_PLACE = re.compile(r"(<!-- quote (\S+) -->\n\n).*?(\n\n<!-- end -->)", flags=re.DOTALL)
Record = Mapping[str, Any]
MOST_TABLES = 1  # of a section on the page; the records after it are told by their claims
MOST_MISSED = 3  # claims that a record missed, on the page
MOST_ROWS = 10  # of a table on the page; of a longer one the rows in which we lose or win the most
WHOLE = "README.md"  # beside the records: every row of every table
_HEAD = """# Benchmarks

Made by `python benchmarks/page.py` from the records in [benchmarks/results]({results}), where every row
[stands whole]({results}/README.md), with machine, versions and commit; `make bench` measures anew what needs no GPU
and fits into half an hour. Times are medians, `spread` is maximum - minimum. Rows in which a peer is faster than we
are say so, in bold; of long tables, those come first.
"""


def claims_text(record: Mapping[str, Any], most: int | None = None) -> str:
    """Return how many of a record's claims hold, each that does not with what it lacks, and the record's note.

    Of more than `most` that do not, those that lack the most.
    """
    claims: Sequence[Mapping[str, Any]] = record.get("claims") or _claims(record)
    missed = [claim for claim in claims if not claim["holds"]]
    lines = []
    if claims:
        held = f"{len(claims) - len(missed)} of {len(claims)}"
        lines += [f"Of what was asked, {held} holds" + (". Missed:\n" if missed else ".\n")]
        worst = sorted(missed, key=lambda claim: -abs(claim["value"] / claim["wanted"] - 1)) if most else missed
        lines += [_line(claim) for claim in worst[:most]]
        lines += [f"- and {len(missed) - most} more, in the record"] if most and len(missed) > most else []
        lines += [""] if missed else []
    lines += [f"{record['note']}\n"] if record.get("note") else []
    return "".join(f"{line}\n" for line in lines)


def _claims(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return what is asked of a record that does not say so: of users' verbs, and of studies before they had claims."""
    found = CLAIMS.get(record.get("benchmark", ""))
    return () if found is None else claim_documents(found(record["rows"]))


def _line(claim: Mapping[str, Any]) -> str:
    """Return one missed claim.

    >>> _line({"text": "ring, speed over gloo's", "value": 0.873, "wanted": 0.97, "at_most": False})
    "- **ring, speed over gloo's: 0.873**, wanted at least 0.97: missed by 10%"
    >>> _line({"text": "memory", "value": 1.0132, "wanted": 1.01, "at_most": True})  # close ones with more digits
    '- **memory: 1.013**, wanted at most 1.01: missed by 0.3%'
    """
    value, wanted = claim["value"], claim["wanted"]
    side = "at most" if claim["at_most"] else "at least"
    missed = abs(value / wanted - 1)
    found, part = (f"{value:.3g}", f"{missed:.0%}") if missed >= 0.01 else (f"{value:.4g}", f"{missed:.1%}")
    return f"- **{claim['text']}: {found}**, wanted {side} {wanted:g}: missed by {part}"


def quoted(text: str, records: Mapping[str, Mapping[str, Any]], where: str) -> str:
    """Return a page with all its quotes made anew; one whose records are not there stays as it is."""

    def fill(place: re.Match[str]) -> str:
        if place[2] not in QUOTES:
            raise PenstockError(f"{where}: quote {place[2]!r}; wanted one of {', '.join(QUOTES)}")
        quote = QUOTES[place[2]]
        if not all(name in records for name in quote.files):
            return place[0]
        try:
            return place[1] + quote.write(*(records[name] for name in quote.files)) + place[3]
        except KeyError as error:
            files = ", ".join(quote.files)
            raise PenstockError(
                f"{where}: quote {place[2]!r}: nothing about {error} in {files}; measure it too"
            ) from None

    return _PLACE.sub(fill, text)


def update_pages(pages: Sequence[Path], records: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Make the quotes of pages anew, and return those that changed."""
    changed = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        new = quoted(text, records, str(page))
        if new != text:
            page.write_text(new, encoding="utf-8")
            changed.append(page)
    return changed


def pages_with_quotes(docs: Path) -> list[Path]:
    """Return the pages of a folder that quote something, and the README beside the folder where it does."""
    readme = docs.parent / "README.md"
    candidates = [*([readme] if readme.is_file() else []), *sorted(docs.rglob("*.md"))]
    return [page for page in candidates if _PLACE.search(page.read_text(encoding="utf-8"))]


def load_records(folder: Path) -> dict[str, Record]:
    """Return the records of a folder by file name, in the order of the page; those of `make soak` count no seconds.

    Those in folders of it that stand on the page too are named with their folder, and come behind the others.
    """
    here = sorted(path for path in folder.glob("*.json") if not path.name.startswith(_SOAK))
    paths = [*here, *(path for name in BELOW for path in sorted((folder / name).glob("*.json")))]
    if not paths:
        raise PenstockError(
            f"no benchmark records in {folder}; wanted .json files written by `penstock bench NAME --out`"
        )
    records = {path.relative_to(folder).as_posix(): load_record(path) for path in paths}

    def place(item: tuple[str, Record]) -> tuple[int, bool, int, str]:
        name, record = item
        return position(record["benchmark"]), "/" in name, len(name), name

    return dict(sorted(records.items(), key=place))


def quotable(folder: Path) -> dict[str, Any]:
    """Return what pages may quote: records by file name, and those below the folder by kind, as lists."""
    below = [json_module.loads(path.read_text()) for path in sorted(folder.glob("*/*.json"))]
    timed = [each for each in below if each.get("benchmark") == TIME_TO_LOSS]
    ranks = [each for each in below if any("ms_per_iteration" in row for row in each.get("rows", ()))]
    kinds = {GPU: ranks, TIME_TO_LOSS: timed}
    soaks = {path.name: load_record(path) for path in sorted(folder.glob(f"{_SOAK}*.json"))}
    return {**load_records(folder), **soaks, **{kind: found for kind, found in kinds.items() if found}}


def make_page(
    records: Mapping[str, Record], results: str, pictures: Mapping[str, str], most_rows: int = MOST_ROWS
) -> str:
    """Return the page; `results` leads from it to the records, `pictures` maps a benchmark to its picture.

    Tables have at most `most_rows` rows; 0: all.
    """
    parts = [_HEAD.format(results=results)]
    for benchmark, files in groupby(records, key=lambda name: records[name]["benchmark"]):
        section = section_of(benchmark)
        parts.append(f"## {section.title}\n")
        parts += [f"{section.text}\n"] if section.text else []
        parts += [f"![{section.title}]({pictures[benchmark]})\n"] if benchmark in pictures else []
        for number, name in enumerate(files):
            told = "" if most_rows and number >= MOST_TABLES else _table_text(records[name], most_rows)
            parts.append(told + _record_text(name, records[name], results, most_rows))
    return "\n".join(parts)


def _table_text(record: Record, most_rows: int) -> str:
    section = section_of(record["benchmark"])
    rows: Sequence[Mapping[str, Any]] = record["rows"]
    if not rows:
        return "No rows.\n\n"
    if most_rows and len(rows) > most_rows:
        return telling_table(rows, section.rivalry, section.hidden, section.shares, most_rows) + "\n"
    return markdown_table(rows, section.rivalry, section.hidden, section.shares) + "\n"


def _record_text(name: str, record: Record, results: str, most_rows: int) -> str:
    if not most_rows:
        return f"{claims_text(record)}{_provenance(name, record, results)}\n{_startup(record)}"
    return f"{claims_text(record, MOST_MISSED)}{_source(name, record, results)}"


def _source(name: str, record: Record, results: str) -> str:
    """Return the record's name and what made it, where it has a place of its own; the rest stands in the record."""
    if "/" in name:
        return f"[{name}]({results}/{name}), {record['date']}.\n"
    return f"[{name}]({results}/{name}): `{command_now(record['command'])}`, {record['date']}.\n"


def _startup(record: Record) -> str:
    """Return the table of start-up times, where a record has one."""
    if (found := record.get("startup")) is None:
        return ""
    source = f"`{found['command']}`, {found['date']}, commit {found['commit']}."
    text = (
        "Until the plan is in force: `ready` from the making of the wrapper on, profiled iterations included, `held` "
        "what of that training stood still. `cold`: nothing kept; `warm`: compiled kernels and measurements are."
    )
    return f"{text}\n\n{markdown_table(found['rows'], None)}\n{source}\n\n"


def _provenance(name: str, record: Record, results: str) -> str:
    """Return where the figures come from."""
    machine = record["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    where = (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}"
    )
    what = f"[{name}]({results}/{name}): `{command_now(record['command'])}`"
    return f"{what}, {record['date']}, commit {record['commit']}. {where}; {versions}.\n"


def command_now(command: str) -> str:
    """Return a record's command as it is written now that studies are scripts.

    >>> command_now("penstock bench gtop-k --iterations 1"), command_now("penstock bench links")
    ('python benchmarks/gtop_k.py --iterations 1', 'penstock bench links')
    """
    program, options = " ".join(command.split()[:3]), command.split()[3:]
    return " ".join([MOVED.get(program, program), *options])


def write_page(records: Mapping[str, Record], results: Path, out: Path) -> list[Path]:
    """Draw the pictures, write the page to `out`, and return the pictures' paths."""
    rows: dict[str, list[Any]] = {}
    for record in (record for name, record in records.items() if "/" not in name):
        rows.setdefault(record["benchmark"], []).extend(record["rows"])
    out.parent.mkdir(parents=True, exist_ok=True)
    pictures = draw_benchmarks(rows, out.parent / "pictures")
    links = {benchmark: f"pictures/{path.name}" for benchmark, path in pictures.items()}
    out.write_text(make_page(records, os.path.relpath(results, out.parent), links))
    back = os.path.relpath(out.parent, results)
    whole = {benchmark: f"{back}/{link}" for benchmark, link in links.items()}
    (results / WHOLE).write_text(make_page(records, ".", whole, most_rows=0))
    return list(pictures.values())


def page(
    results: Annotated[Path, typer.Option(help="where the records are")] = Path("benchmarks/results"),
    out: Annotated[Path, typer.Option(help="the page; its pictures go into a folder beside it")] = Path(
        "docs/benchmarks.md"
    ),
    json: JsonOption = False,
) -> None:
    """Write tables and pictures of all benchmark records, and update the pages that quote them."""
    records = load_records(results)
    pictures = write_page(records, results, out)
    found = quotable(results)
    if TIME_TO_LOSS in found:
        pictures.append(draw_time_to_loss(found[TIME_TO_LOSS], out.parent / "pictures"))
    updated = update_pages(pages_with_quotes(out.parent), found)
    if json:
        told = {"page": str(out), "records": list(records), "pictures": [str(path) for path in pictures]}
        print_json(told | {"updated": [str(path) for path in updated]})
    else:
        print(f"{out}: {len(records)} records, {len(pictures)} pictures; {len(updated)} pages that quote them updated")


if __name__ == "__main__":
    start(page)
