"""Damaged payloads and damaged files by the million: each is taken or refused in one line, and no process dies of it.

    python benchmarks/soak/damage.py --count 1000000 --files 100000

Cases are run by worker processes under a limit of memory and of time for each; `damaged_payloads.py` and
`damaged_files.py` say what they are. A case is known by its seed and number: `--only payloads:1234` runs one alone. The
record is written every few seconds, and the campaign goes on from it where it was ended before, with the same seed.
What was found before is tried again then, and is called mended where it does not happen any more.

What counts as a finding: a process that dies, any exception but penstock's own, a message of more than one line, a
write beside the output, a damaged header that is believed, more processor time or memory than a bound.
"""

import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.bench.record import load_record, make_record, save_record
from penstock.errors import PenstockError

RECORD = Path(__file__).parents[1] / "results" / "soak-damage.json"
KINDS = ("payloads", "files")
GROWS = "memory grows"  # which no case does alone
BATCH = 2_000  # payloads between two reports of a worker; files: a tenth
MOST_SECONDS = 3.0  # of a case, of its processor's time
MOST_WAIT_SECONDS = 90.0  # of a case, by the clock: the machine may be busy
STARTING_SECONDS = 3600.0  # until the first case: kernels may have to be compiled
MOST_GROWTH = 768 << 20  # bytes of address space beyond what a worker has when it begins
MOST_KEPT = 96 << 20  # bytes that a worker may come to hold while it runs, beyond those after its first batch
SAVE_SECONDS = 10.0


@dataclass
class Progress:
    """How far one kind of cases is."""

    wanted: int
    done: int = 0
    tally: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by codec or format, damage, result
    findings: list[dict[str, Any]] = field(default_factory=list)
    mended: list[dict[str, Any]] = field(
        default_factory=list
    )  # findings of an earlier commit, and of which not any more
    skipped: list[int] = field(default_factory=list)  # cases that ended a process
    seconds: float = 0.0
    commits: list[str] = field(default_factory=list)  # of the package, at which the cases ran


def damage(
    count: Annotated[int, typer.Option(help="damaged payloads")] = 1_000_000,
    files: Annotated[int, typer.Option(help="damaged files")] = 100_000,
    seconds: Annotated[float, typer.Option(help="end after so long; the record says how far it came")] = 0.0,
    seed: Annotated[int, typer.Option(help="of all cases")] = 20,
    out: Annotated[Path, typer.Option(help="the record, from which a campaign goes on too")] = RECORD,
    only: Annotated[str, typer.Option(metavar="KIND:NUMBER", help="run one case in this process")] = "",
    fresh: Annotated[bool, typer.Option(help="forget what the record has")] = False,
) -> None:
    """Run the campaign."""
    if only:
        kind, _, number = only.partition(":")
        print(_cases(kind, seed).run(int(number)))
        return
    state = {"payloads": Progress(count), "files": Progress(files)}
    if out.exists() and not fresh:
        _go_on(state, out, seed)
    end = time.monotonic() + seconds if seconds else float("inf")
    for kind in KINDS:
        _try_again(kind, state[kind], seed)
        _campaign(kind, state[kind], seed, end, lambda: _save(state, seed, out))
    _save(state, seed, out)
    found = sum(len(each.findings) for each in state.values())
    print(f"{', '.join(f'{each.done} of {each.wanted} {kind}' for kind, each in state.items())}; {found} findings")
    if found:
        raise typer.Exit(1)


def _campaign(kind: str, progress: Progress, seed: int, end: float, save: Callable[[], None]) -> None:
    """Run the cases of one kind to their end, or as far as time goes, in one worker after another."""
    saved = time.monotonic()
    if progress.done < progress.wanted and (commit := make_record("", [])["commit"]) not in progress.commits:
        progress.commits.append(commit)
    while progress.done < progress.wanted and time.monotonic() < end:
        before = progress.done, len(progress.skipped)
        with tempfile.NamedTemporaryFile() as note, _worker(kind, progress, seed, note.name) as worker:
            for report in _reports(worker, note.name, progress):
                _take(progress, report)
                if time.monotonic() - saved > SAVE_SECONDS:
                    saved = time.monotonic()
                    save()
                    print(
                        f"{kind}: {progress.done} of {progress.wanted}, {len(progress.findings)} findings", flush=True
                    )
                if time.monotonic() > end:
                    break
        if (progress.done, len(progress.skipped)) == before and time.monotonic() < end:
            raise PenstockError(f"a worker of {kind} ended before its first case; its messages are above")


def _try_again(kind: str, progress: Progress, seed: int) -> None:
    """Run what was found before once more; what does not happen any more is mended."""
    for finding in [each for each in progress.findings if each["result"] != GROWS]:
        number = finding["number"]
        alone = Progress(number + 1, number)
        _campaign(kind, alone, seed, float("inf"), lambda: None)
        if not alone.findings:
            progress.findings.remove(finding)
            progress.mended.append(finding | {"with": alone.commits[0]})
            progress.tally[finding["of"], finding["damage"], finding["result"]] -= 1
            progress.tally.update(alone.tally)
            progress.tally = +progress.tally


@contextmanager
def _worker(kind: str, progress: Progress, seed: int, note: str) -> Iterator[subprocess.Popen[bytes]]:
    job = {"kind": kind, "seed": seed, "start": progress.done, "stop": progress.wanted, "skip": progress.skipped}
    command = [sys.executable, __file__, "--worker", json.dumps(job), note]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()


def _reports(worker: subprocess.Popen[bytes], note: str, progress: Progress) -> Iterator[dict[str, Any]]:
    """Yield what a worker reports; where it dies or hangs, the case becomes a finding and is skipped from then on."""
    assert worker.stdout is not None
    os.set_blocking(worker.stdout.fileno(), False)
    seen, since, text = -1, time.monotonic(), b""
    while True:
        ended = worker.poll() is not None
        text += worker.stdout.read() or b""
        *lines, text = text.split(b"\n")
        yield from map(json.loads, lines)
        number = _noted(note)
        if number != seen:
            seen, since = number, time.monotonic()
        if ended:
            if worker.returncode:
                _end(progress, number, _how(worker.returncode))
            return
        if time.monotonic() - since > (STARTING_SECONDS if number < 0 else MOST_WAIT_SECONDS):
            _end(progress, number, f"no end in {MOST_WAIT_SECONDS:g} s")
            return
        time.sleep(0.05)


def _end(progress: Progress, number: int, result: str) -> None:
    if number < 0 or number in progress.skipped:  # it ended before any case
        return
    progress.skipped.append(number)
    ended = {"of": "?", "damage": "?", "detail": "the process ended with this case"}
    progress.findings.append({"number": number, "result": result, **ended})
    progress.tally["?", "?", result] += 1


def _how(code: int) -> str:
    return f"crash, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _take(progress: Progress, report: dict[str, Any]) -> None:
    progress.done = report["done"]
    progress.seconds += report["seconds"]
    progress.findings += report["findings"]
    progress.tally.update({(what, hurt, result): count for what, hurt, result, count in report["tally"]})


# The record, which is what a campaign goes on from


def _save(state: dict[str, Progress], seed: int, out: Path) -> None:
    rows = [
        {"kind": kind, "of": what, "damage": hurt, "result": result, "count": count}
        for kind, progress in state.items()
        for (what, hurt, result), count in sorted(progress.tally.items())
    ]
    done = {
        kind: {
            "done": each.done,
            "wanted": each.wanted,
            "results": dict(_results(each)),
            "findings": each.findings,
            "mended": each.mended,
            "skipped": each.skipped,
            "seconds": round(each.seconds, 1),
            "commits": each.commits,
        }
        for kind, each in state.items()
    }
    bounds = {"case_cpu_seconds": MOST_SECONDS, "case_wall_seconds": MOST_WAIT_SECONDS, "growth_nbytes": MOST_GROWTH}
    record = make_record("soak-damage", rows, seed=seed, bounds=bounds, state=done)
    save_record(record | {"command": f"python benchmarks/soak/damage.py --seed {seed}"}, out)


def _results(progress: Progress) -> Counter[str]:
    found: Counter[str] = Counter()
    for (_, _, result), count in progress.tally.items():
        found[result] += count
    return found


def _go_on(state: dict[str, Progress], out: Path, seed: int) -> None:
    record = load_record(out)
    if record["benchmark"] != "soak-damage" or record["seed"] != seed:
        raise PenstockError(f"{out} is of another campaign; name another file, or say --fresh")
    for kind, progress in state.items():
        kept = record["state"][kind]
        progress.done, progress.findings, progress.skipped = kept["done"], kept["findings"], kept["skipped"]
        progress.seconds, progress.commits, progress.mended = kept["seconds"], kept["commits"], kept["mended"]
        progress.tally.update(
            {(row["of"], row["damage"], row["result"]): row["count"] for row in record["rows"] if row["kind"] == kind}
        )


# In a worker


def _cases(kind: str, seed: int) -> Any:
    if kind == "payloads":
        from damaged_payloads import PayloadCases

        return PayloadCases(seed)
    from damaged_files import FileCases

    return FileCases(seed)


def _work() -> None:
    """Run cases, and report the number of each result now and then; note the number of a case before it begins."""
    job = json.loads(sys.argv[2])
    with open(sys.argv[3], "r+b") as note:
        note.write(struct.pack("<q", -1))
        note.flush()
        noted = mmap.mmap(note.fileno(), 8)
    warnings.simplefilter("ignore")
    cases, skip = _cases(job["kind"], job["seed"]), set(job["skip"])
    _limit_memory()
    batch = BATCH if job["kind"] == "payloads" else BATCH // 10
    kept = 0
    for start in range(job["start"], job["stop"], batch):
        stop = min(start + batch, job["stop"])
        report = _batch(cases, [number for number in range(start, stop) if number not in skip], noted)
        held = _held()
        kept = kept or held
        if held - kept > MOST_KEPT:
            grown = {"result": GROWS, "of": "?", "damage": "?", "detail": f"{(held - kept) >> 20} MiB by here"}
            report["findings"].append({"number": start, **grown})
            kept = held
        print(json.dumps(report | {"done": stop}), flush=True)


def _batch(cases: Any, numbers: list[int], noted: mmap.mmap) -> dict[str, Any]:
    tally: Counter[tuple[str, str, str]] = Counter()
    findings, began = [], time.monotonic()
    for number in numbers:
        noted[:] = struct.pack("<q", number)
        before = time.process_time()
        outcome = cases.run(number)
        took = time.process_time() - before
        result, detail = outcome.result, outcome.detail
        if took > MOST_SECONDS and not outcome.is_finding:
            result, detail = "slow", f"{took:.1f} s"
        if result not in ("loaded", "refused"):
            of = {"of": outcome.what, "damage": outcome.damage}
            findings.append({"number": number, "result": result, **of, "detail": detail})
        tally[outcome.what, outcome.damage, result] += 1
    return {
        "tally": [[*key, count] for key, count in tally.items()],
        "findings": findings,
        "seconds": time.monotonic() - began,
    }


def _noted(note: str) -> int:
    data = Path(note).read_bytes()
    return int(struct.unpack("<q", data)[0]) if len(data) == 8 else -1


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * mmap.PAGESIZE + MOST_GROWTH
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _held() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def main() -> None:
    """Run the script."""
    if sys.argv[1:2] == ["--worker"]:
        _work()
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from study import start

    start(damage)


if __name__ == "__main__":
    main()
