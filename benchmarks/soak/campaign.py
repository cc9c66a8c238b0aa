"""What campaigns share: how many cases ended how, in a record that a second run goes on from."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.bench.record import load_record, make_record, save_record

RESULTS = Path(__file__).parents[1] / "results"
Key = tuple[str, ...]
Finding = dict[str, Any]  # a case that did not end well: which it is, and how it ended


class Campaign:
    """Counts outcomes of cases by a few keys, and keeps what did not end well.

    A row of the record has the keys, how many cases, and how many outcomes of each kind; a case may have several, one
    for each rank.
    """

    def __init__(self, name: str, keys: Sequence[str], path: Path | None = None) -> None:
        self._name, self._keys, self._path = name, tuple(keys), path
        self.cases: Counter[Key] = Counter()
        self.outcomes: Counter[Key] = Counter()  # by the keys and the outcome
        self.findings: list[Finding] = []
        self.earlier: list[Finding] = []  # findings whose cases have been run again since, with the commit they are of
        self.commits: list[str] = []  # of earlier runs, in order
        self.notes: dict[str, Any] = {}  # what else the record had, where there was one
        if path is not None and path.exists():
            self._load(load_record(path))

    def _load(self, record: Mapping[str, Any]) -> None:
        for row in record["rows"]:
            self.count(tuple(row[key] for key in self._keys), row["outcomes"], row["cases"])
        self.findings, self.earlier = list(record["findings"]), list(record["earlier"])
        self.commits = [*record["commits"], record["commit"]]
        self.notes = dict(record)

    def count(self, key: Key, outcomes: Mapping[str, int], cases: int = 1) -> None:
        """Add cases with their outcomes; with a negative number, take them back."""
        sign = 1 if cases > 0 else -1
        self.cases[key] += cases
        for outcome, number in outcomes.items():
            self.outcomes[*key, outcome] += sign * number

    def put_aside(self, finding: Finding) -> None:
        """Keep a finding as an earlier one: its case is run again."""
        self.findings.remove(finding)
        self.earlier.append(finding | {"commit": self.commits[-1] if self.commits else ""})

    def totals(self, of: str = "") -> Counter[str]:
        """Return how many outcomes of each kind there are in all, or of what the first key says."""
        found: Counter[str] = Counter()
        for key, number in self.outcomes.items():
            if number and (not of or key[0] == of):
                found[key[-1]] += number
        return found

    def save(self, **notes: Any) -> None:
        """Write the record."""
        if self._path is None:
            return
        record = make_record(self._name, self._rows(), **notes, findings=self.findings, earlier=self.earlier)
        before = [each for each in dict.fromkeys(self.commits) if each != record["commit"]]
        save_record({**record, "commits": before}, self._path)

    def keep(self, **notes: Any) -> None:
        """Write the record as it was, with the rows and findings that there are now and `notes`."""
        assert self._path is not None
        assert self.notes, "a part is run into the record of a whole"
        found = {"rows": self._rows(), "findings": self.findings, "earlier": self.earlier}
        save_record({**self.notes, **found, **notes}, self._path)

    def _rows(self) -> list[dict[str, Any]]:
        return [self._row(key) for key in sorted(self.cases) if self.cases[key]]

    def _row(self, key: Key) -> dict[str, Any]:
        found = sorted((each[-1], number) for each, number in self.outcomes.items() if each[:-1] == key and number)
        return dict(zip(self._keys, key, strict=True)) | {"cases": self.cases[key], "outcomes": dict(found)}
