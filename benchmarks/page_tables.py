"""Turns the rows of a benchmark record into a Markdown table; rows in which a peer is faster than we are say so."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Choice = Callable[[str], bool]  # of names
NOTE = "note"


@dataclass(frozen=True, slots=True)
class Rivalry:
    """Which rows of a benchmark compete with which."""

    group: tuple[str, ...]  # rows that agree in these fields compete
    name: str  # the field that says how a rival is called
    ours: Choice
    peer: Choice
    seconds: str = "seconds"  # the field in which less is better

    def note(self, row: Row, rows: Sequence[Row]) -> str:
        """Say by whom a row of ours is beaten, and by how much; nothing where it is not."""
        if not self.ours(self._name(row)) or not isinstance(row.get(self.seconds), float):
            return ""
        best = min(self._rivals(row, rows), key=lambda each: each[self.seconds], default=None)
        if best is None or best[self.seconds] >= row[self.seconds]:
            return ""
        return f"**slower than {self._name(best)}: {row[self.seconds] / best[self.seconds]:.3f}x**"

    def ratio(self, row: Row, rows: Sequence[Row]) -> float | None:
        """Return a row of ours over its fastest rival, in time; None where it has none."""
        if not self.ours(self._name(row)) or not isinstance(row.get(self.seconds), float):
            return None
        return max((float(row[self.seconds] / each[self.seconds]) for each in self._rivals(row, rows)), default=None)

    def _rivals(self, row: Row, rows: Sequence[Row]) -> list[Row]:
        rivals = [each for each in rows if self.peer(self._name(each)) and isinstance(each.get(self.seconds), float)]
        return [each for each in rivals if all(each.get(name) == row.get(name) for name in self.group)]

    def _name(self, row: Row) -> str:
        return str(row.get(self.name, ""))


def telling_table(
    rows: Sequence[Row],
    rivalry: Rivalry | None,
    hidden: Sequence[str],
    shares: Sequence[str],
    most_rows: int,
) -> str:
    """Return the rows of a long table that say the most, and how many are left out.

    With rivals: rows of ours, those that lose the most first, then those that win the most. Otherwise the first ones.
    """
    if rivalry is None:
        kept, told = list(rows[:most_rows]), f"The first {most_rows} of {len(rows)} rows."
    else:
        ratios = [(ratio, row) for row in rows if (ratio := rivalry.ratio(row, rows)) is not None]
        ordered = sorted(ratios, key=lambda pair: -pair[0])
        half = most_rows // 2
        chosen = ordered[:half] + ordered[max(half, len(ordered) - half) :]
        kept = [{**row, "time over the best rival's": f"{ratio:.2f}x"} for ratio, row in chosen]
        lost = sum(ratio > 1 for ratio, _ in ratios)
        told = f"Of {len(rows)} rows, ours that lose and win the most; a rival is faster in {lost} of {len(ratios)}."
    if not kept:
        kept, told = list(rows[:most_rows]), f"The first {most_rows} of {len(rows)} rows."
    return f"{told}\n\n{markdown_table(kept, None, hidden, shares)}"


def markdown_table(
    rows: Sequence[Row], rivalry: Rivalry | None, hidden: Sequence[str] = (), shares: Sequence[str] = ()
) -> str:
    """Return a table of all rows; fields that are the same in all of them stand in a line before it.

    `hidden` fields are left out; `shares` are shown in percent, whatever their name says.
    """

    def show(name: str, row: Row) -> str:
        return cell("deviation" if name in shares else name, row.get(name))

    notes = [_note(row, rows, rivalry) for row in rows]
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if name not in hidden]
    names = [name for name in names if name != "error" or any(isinstance(row.get(name), float) for row in rows)]
    same = [name for name in names if len(rows) > 1 and len({repr(row.get(name)) for row in rows}) == 1]
    names = [name for name in names if name not in same]
    lines = [_line([_heading(name) for name in names] + [NOTE] * any(notes))]
    lines.append(_line([_rule(name, rows) for name in names] + ["---"] * any(notes)))
    lines += [
        _line([show(name, row) for name in names] + [note] * any(notes)) for row, note in zip(rows, notes, strict=True)
    ]
    shared = ", ".join(f"{_heading(name)} {show(name, rows[0])}" for name in same if show(name, rows[0]))
    return (f"In every row: {shared}.\n\n" if shared else "") + "\n".join(lines) + "\n"


def markdown_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text and whose others are numbers."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join(_line(cells) for cells in (columns, rule, *rows))


def _note(row: Row, rows: Sequence[Row], rivalry: Rivalry | None) -> str:
    error = row.get("error")
    if isinstance(error, str):
        return f"failed: {_escape(error)}"
    notes = [rivalry.note(row, rows)] if rivalry else []
    if isinstance(error, float) and abs(error) > 0.1:
        notes.append("**simulation off by more than 10%**")
    return "; ".join(note for note in notes if note)


def cell(name: str, value: object) -> str:
    """Return a value as a person reads it; the name of its field tells the unit.

    >>> cell("exposed_seconds", 0.0123), cell("error", -0.031), cell("nbytes", 16_000_000)
    ('12.3 ms', '-3.1%', '16 MB')
    """
    if value is None:
        return ""
    if isinstance(value, list):
        return _escape(", ".join(map(str, value)))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _escape(str(value))
    for ending, form in _FORMS:
        if name.endswith(ending):
            return form(value)
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-6:.3g} us" if value else "0"


def _bytes(value: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.0f} B"


def _percent(value: float) -> str:
    return f"{100 * value:+.1f}%"


def _rate(value: float) -> str:
    return f"{value / 1e6:.1f} Mb/s"


def _per_second(value: float) -> str:
    return f"{_bytes(value)}/s"


_FORMS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("seconds_per_byte", lambda value: f"{value * 1e9:.4g} ns/B"),
    ("bytes_per_second", _per_second),
    ("bits_per_second", _rate),
    ("seconds", _seconds),
    ("overhead_spread", _percent),
    ("spread", _seconds),
    ("nbytes", _bytes),
    ("bytes_sent", _bytes),
    ("error", _percent),
    ("deviation", _percent),
    ("overhead", _percent),
    ("lateness", _percent),
)


def _heading(name: str) -> str:
    return name.removesuffix("_seconds").removesuffix("_bits_per_second").replace("_", " ")


def _rule(name: str, rows: Sequence[Row]) -> str:
    return "---:" if any(isinstance(row.get(name), int | float) for row in rows) else "---"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
