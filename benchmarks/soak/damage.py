"""Damaged payloads and damaged files by the million: each is taken or refused in one line, and no process dies of it.

    python benchmarks/soak/damage.py --count 1000000 --files 120000

Cases are run by worker processes under a limit of memory and of time for each; `damaged_payloads.py` and
`damaged_files.py` say what they are. A case is known by its seed and number: `--only payloads:1234` runs one alone. The
record is written every few seconds, and the campaign goes on from it where it was ended before, with the same seed.
What was found before is tried again then, and is called mended where it does not happen any more. Formats that are new
since are run apart: `--format NAME` numbers cases of its own, and its part of the record has a commit of its own.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from campaign import RESULTS, Campaign

from penstock.bench.record import make_record
from penstock.errors import PenstockError

NAME = "soak-damage"
KINDS = ("payloads", "files")
KEYS = ("kind", "of")  # of counts: of: codec or format
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
    """How far one kind of cases is, and where they are counted."""

    kind: str
    wanted: int
    found: Campaign = field(default_factory=lambda: Campaign(NAME, KEYS))
    done: int = 0
    skipped: list[int] = field(default_factory=list)  # cases that ended a process
    seconds: float = 0.0
    formats: tuple[str, ...] = ()  # of files: these and no others; all, where there are none

    @property
    def findings(self) -> list[dict[str, Any]]:
        """What was found of this kind."""
        return [each for each in self.found.findings if self._has(each)]

    def _has(self, finding: dict[str, Any]) -> bool:
        return finding["kind"] == self.kind and tuple(finding.get("formats", ())) == self.formats

    def add_finding(self, number: int, result: str, of: str, damage: str, detail: str) -> None:
        """Keep a case that did not end well."""
        said = {"of": of, "damage": damage, "detail": detail}
        apart = {"formats": list(self.formats)} if self.formats else {}
        self.found.findings.append({"kind": self.kind, "number": number, "result": result, **said, **apart})


def damage(
    count: Annotated[int, typer.Option(help="damaged payloads")] = 1_000_000,
    files: Annotated[int, typer.Option(help="damaged files")] = 120_000,
    seconds: Annotated[float, typer.Option(help="end after so long; the record says how far it came")] = 0.0,
    seed: Annotated[int, typer.Option(help="of all cases")] = 20,
    out: Annotated[Path, typer.Option(help="the record, from which a campaign goes on too")] = RESULTS / f"{NAME}.json",
    formats: Annotated[list[str] | None, typer.Option("--format", help="files of this one only; repeatable")] = None,
    only: Annotated[str, typer.Option(metavar="KIND:NUMBER", help="run one case in this process")] = "",
    fresh: Annotated[bool, typer.Option(help="forget what the record has")] = False,
) -> None:
    """Run the campaign."""
    if only:
        kind, _, number = only.partition(":")
        print(_cases(kind, seed, tuple(formats or ())).run(int(number)))
        return
    if fresh:
        out.unlink(missing_ok=True)
    found = Campaign(NAME, KEYS, out)
    if found.notes and (found.notes["benchmark"], found.notes["seed"]) != (NAME, seed):
        raise PenstockError(f"{out} is of another campaign; name another file, or say --fresh")
    if formats:
        state = [_part(tuple(formats), files, found)]
    else:
        state = [_progress(kind, wanted, found) for kind, wanted in zip(KINDS, (count, files), strict=True)]
    end = time.monotonic() + seconds if seconds else float("inf")
    for each in state:
        _try_again(each, seed)
        _campaign(each, seed, end, lambda: _save(found, state, seed))
    _save(found, state, seed)
    done = ", ".join(f"{each.done} of {each.wanted} {each.kind}" for each in state)
    print(f"{done}; {len(found.findings)} findings")
    if found.findings:
        raise typer.Exit(1)


def _progress(kind: str, wanted: int, found: Campaign) -> Progress:
    """Return how far the record is with one kind of cases."""
    kept = found.notes.get("state", {}).get(kind, {})
    return Progress(kind, wanted, found, **{name: kept[name] for name in _KEPT if kept})


def _part(formats: tuple[str, ...], wanted: int, found: Campaign) -> Progress:
    """Return how far the record is with the part of some formats alone."""
    kept = found.notes.get("apart", {})
    if kept and tuple(kept["formats"]) != formats:
        raise PenstockError(f"--format: found {formats}; the record has a part of {kept['formats']}: wanted these")
    return Progress("files", wanted, found, **{name: kept[name] for name in _KEPT if kept}, formats=formats)


_KEPT = ("done", "skipped", "seconds")


def _save(found: Campaign, state: Sequence[Progress], seed: int) -> None:
    if state[0].formats:
        _save_part(found, state[0])
        return
    bounds = {"case_cpu_seconds": MOST_SECONDS, "case_wall_seconds": MOST_WAIT_SECONDS, "growth_nbytes": MOST_GROWTH}
    done = {
        each.kind: {
            "done": each.done,
            "wanted": each.wanted,
            "results": dict(found.totals(each.kind)),
            "skipped": each.skipped,
            "seconds": round(each.seconds, 1),
        }
        for each in state
    }
    found.save(
        seed=seed, bounds=bounds, state=done, **{"apart": found.notes["apart"]} if "apart" in found.notes else {}
    )


def _save_part(found: Campaign, part: Progress) -> None:
    """Write the record of before with rows of the part; what else it says stays of the run that it was."""
    own = make_record(NAME, [])
    said = {"formats": list(part.formats), **{name: getattr(part, name) for name in (*_KEPT, "wanted")}}
    found.keep(apart={**said, **{name: own[name] for name in ("command", "commit", "date", "versions")}})


def _campaign(progress: Progress, seed: int, end: float, save: Callable[[], None]) -> None:
    """Run the cases of one kind to their end, or as far as time goes, in one worker after another."""
    saved, kind = time.monotonic(), progress.kind
    while progress.done < progress.wanted and time.monotonic() < end:
        before = progress.done, len(progress.skipped)
        with tempfile.NamedTemporaryFile() as note, _worker(progress, seed, note.name) as worker:
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


def _try_again(progress: Progress, seed: int) -> None:
    """Run what was found before once more; what does not happen any more is an earlier finding."""
    for finding in [each for each in progress.findings if each["result"] != GROWS]:
        number = finding["number"]
        alone = Progress(progress.kind, number + 1, done=number, formats=progress.formats)
        _campaign(alone, seed, float("inf"), lambda: None)
        if not alone.findings:
            progress.found.put_aside(finding)
            progress.found.count((progress.kind, finding["of"]), {finding["result"]: 1}, -1)
            ((key, _),) = alone.found.cases.items()
            progress.found.count(key, alone.found.totals())


@contextmanager
def _worker(progress: Progress, seed: int, note: str) -> Iterator[subprocess.Popen[bytes]]:
    which = {"kind": progress.kind, "seed": seed, "skip": progress.skipped, "formats": progress.formats}
    job = which | {"start": progress.done, "stop": progress.wanted}
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
    progress.add_finding(number, result, "?", "?", "the process ended with this case")
    progress.found.count((progress.kind, "?"), {result: 1})


def _how(code: int) -> str:
    return f"crash, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _take(progress: Progress, report: dict[str, Any]) -> None:
    progress.done = report["done"]
    progress.seconds += report["seconds"]
    for finding in report["findings"]:
        progress.add_finding(**finding)
    for what, result, count in report["tally"]:
        progress.found.count((progress.kind, what), {result: count}, count)


# In a worker


def _cases(kind: str, seed: int, formats: tuple[str, ...] = ()) -> Any:
    if kind == "payloads":
        from damaged_payloads import PayloadCases

        return PayloadCases(seed)
    from damaged_files import FileCases

    return FileCases(seed, formats)


def _work() -> None:
    """Run cases, and report the number of each result now and then; note the number of a case before it begins."""
    job = json.loads(sys.argv[2])
    with open(sys.argv[3], "r+b") as note:
        note.write(struct.pack("<q", -1))
        note.flush()
        noted = mmap.mmap(note.fileno(), 8)
    warnings.simplefilter("ignore")
    cases, skip = _cases(job["kind"], job["seed"], tuple(job["formats"])), set(job["skip"])
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
    tally: Counter[tuple[str, str]] = Counter()  # by codec or format, and result
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
        tally[outcome.what, result] += 1
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
        sys.stdout.flush()
        os._exit(0)  # torch's own shutdown may wait: a process group was made
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from study import start

    start(damage)


if __name__ == "__main__":
    main()
