"""The page of benchmarks, made from the JSON records alone: nothing on it is typed by hand.

`python benchmarks/page.py` writes docs/benchmarks.md with its pictures, a few rows and columns of each study, and
benchmarks/results/README.md, where every row, record, target and note stands. It puts figures of the records into pages
written by hand, so that they cannot be out of date. Such a page holds the place open with `<!-- quote NAME -->` and
`<!-- end -->`, with an empty line inside each; what stands between them is made by `QUOTES[NAME]`.
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
JUDGED_ANEW = ("casync", "joint_replayed")
BELOW = ("cpu",)  # folders of records that stand on the page too
_SOAK = "soak-"  # begins the names of records that docs/soak.md quotes
_PLACE = re.compile(r"<!-- quote (\S+) -->\n.*?<!-- end -->", flags=re.DOTALL)  # it may be empty
Record = Mapping[str, Any]
MOST_ROWS = 6  # of a table on the page; of a longer one the rows in which we lose or win the most
WHOLE = "README.md"  # beside the records: every row of every table
_MADE = "Made by `python benchmarks/page.py` from the records in [benchmarks/results]({results})."
_TIMES = (
    "Times are medians. Rows in which a peer is faster than we are say so, in bold; of long tables, those stand first."
)
_SHORT_HEAD = f"""# Benchmarks

{_MADE} This page has a few rows of each study; [all rows, records, targets and notes]({{results}}/README.md) are beside
the records, with machine, versions and commit. `make bench` measures again what needs no GPU and fits into half an
hour. {_TIMES} Hosts are emulated on one machine unless a section says otherwise: their links are real, their processors
are shared.

## GPU ranks

Four emulated hosts that share one H200, NCCL between them, links shaped to the rate. Milliseconds per iteration, in
brackets how many times as fast as stock DDP; medians over rounds in which all methods took turns.

<!-- quote gpu -->



<!-- end -->

The same of one worker, which compresses nothing. Rounds of ResNet-50 differ by up to 1.6 times there:
its column shows no gain.

<!-- quote one-worker -->



<!-- end -->

What codecs cost on one GPU when a single worker still compressed stands [below](#compression-on-a-gpu).

## Time to loss

Real training against the clock: seconds count from the start of the job, loading, compiling, measuring and planning
included.

<!-- quote time-to-loss -->



<!-- end -->

Short runs of small byte-level models with AdamW. At 10 Gb/s a step of `auto` took 23 ms, of torch's fp16 hook 35 and of
stock 56; but this was the first job on its machine, and starting took `auto` 13 s, so it passes the fp16 hook after
some 1,400 steps, which were not run. A second job on the same machine planned in 1.4 s (read off a log, without a
record). After 1,000 steps 4 bits are 0.7% behind stock. At 1 Gb/s, methods not shown did not fit into the time on the
GPU. The table of 500 steps is of an earlier build.
"""
_WHOLE_HEAD = f"""# Benchmarks, whole

{_MADE} {_TIMES} `spread` is maximum - minimum. A record's targets were set before it was measured; those that it misses
are listed, with what is missing.
"""


def claims_text(record: Mapping[str, Any]) -> str:
    """Return how many of a record's targets are met, each that is not with what it lacks, and the record's note."""
    claims = _claims(record)
    missed = [claim for claim in claims if not claim["holds"]]
    lines = []
    if claims:
        lines += [f"Targets met: {len(claims) - len(missed)} of {len(claims)}" + (". Missed:\n" if missed else ".\n")]
        lines += [_line(claim) for claim in missed]
        lines += [""] if missed else []
    lines += [f"{record['note']}\n"] if record.get("note") else []
    return "".join(f"{line}\n" for line in lines)


def _claims(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return a record's targets; those of users' verbs, and of studies before they had claims, are ours.

    So are those of studies whose rules are stricter than when their records were made.
    """
    benchmark = record.get("benchmark", "")
    kept = () if benchmark in JUDGED_ANEW else record.get("claims")
    found = CLAIMS.get(benchmark)
    return kept or (() if found is None else claim_documents(found(record["rows"])))


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
        if (name := place[1]) not in QUOTES:
            raise PenstockError(f"{where}: quote {name!r}; wanted one of {', '.join(QUOTES)}")
        quote = QUOTES[name]
        if not all(file in records for file in quote.files):
            return place[0]
        files = (*quote.files, *(file for file in quote.further if file in records))
        try:
            return f"<!-- quote {name} -->\n\n{quote.write(*(records[file] for file in files))}\n\n<!-- end -->"
        except KeyError as error:
            raise PenstockError(
                f"{where}: quote {name!r}: nothing about {error} in {', '.join(files)}; measure it too"
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
    below = [{"file": path.name, **json_module.loads(path.read_text())} for path in sorted(folder.glob("*/*.json"))]
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
    parts = [(_SHORT_HEAD if most_rows else _WHOLE_HEAD).format(results=results)]
    for benchmark, files in groupby(records, key=lambda name: records[name]["benchmark"]):
        section, names = section_of(benchmark), list(files)
        text = section.brief or section.text if most_rows else section.text
        parts.append(f"## {section.title}\n")
        parts += [f"{text}\n"] if text else []
        parts += [f"![{section.title}]({pictures[benchmark]})\n"] if benchmark in pictures else []
        if most_rows:
            parts.append(
                _table_text(records[names[0]], most_rows) + _summary([records[name] for name in names], results)
            )
            continue
        for name in names:
            told = f"{claims_text(records[name])}{_provenance(name, records[name], results)}"
            parts.append(f"{_table_text(records[name], 0)}{told}\n{_startup(records[name])}")
    return "\n".join(parts)


def _table_text(record: Record, most_rows: int) -> str:
    section = section_of(record["benchmark"])
    rows: Sequence[Mapping[str, Any]] = record["rows"]
    if not rows:
        return "No rows.\n\n"
    fields = {field for row in rows for field in row}
    hidden = section.hidden if not most_rows else (*section.hidden, *(fields - set(section.columns or fields)))
    if most_rows and len(rows) > most_rows:
        return telling_table(rows, section.rivalry, hidden, section.shares, most_rows) + "\n"
    return markdown_table(rows, section.rivalry, hidden, section.shares) + "\n"


def _summary(records: Sequence[Record], results: str) -> str:
    """Return how many targets the records of a section meet, and where all of it stands."""
    claims = [claim for record in records for claim in _claims(record)]
    met = f"Targets met: {sum(claim['holds'] for claim in claims)} of {len(claims)}. " if claims else ""
    title = section_of(records[0]["benchmark"]).title
    anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
    count = f"{len(records)} records" if len(records) > 1 else "1 record"
    return f"{met}[{count}, all rows]({results}/{WHOLE}#{anchor}).\n"


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
    page = make_page(records, os.path.relpath(results, out.parent), links)
    out.write_text(quoted(page, quotable(results), str(out)))
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
