"""Timelines as text, one above the other on one axis: what `explain(picture=True)` shows in any terminal."""

from collections.abc import Iterator, Mapping

from penstock.timeline import Span, Timeline

COLUMNS = 72


def text_picture(timelines: Mapping[str, Timeline], columns: int = COLUMNS) -> list[str]:
    """Return a line per lane; spans in turn are `#` and `=`, so that neighbours can be told apart.

    >>> spans = Span("f", "compute", 0.0, 0.5), Span("b", "compute", 0.5, 1.0), Span("a", "network", 0.75, 1.5)
    >>> print("\\n".join(text_picture({"predicted": Timeline(spans)}, 12)))
    predicted compute |####====    | 1000 ms
    predicted network |      ######| 1500 ms
    """
    whole = max((timeline.iteration_seconds for timeline in timelines.values()), default=0.0)
    rows = [
        (f"{name} {lane}", timeline.lane(lane))
        for name, timeline in timelines.items()
        for lane in dict.fromkeys(span.lane for span in timeline.spans)
    ]
    width = max((len(label) for label, _ in rows), default=0)
    return [f"{label:<{width}} |{_bar(spans, whole, columns)}| {_end(spans)}" for label, spans in rows]


def _bar(spans: tuple[Span, ...], whole: float, columns: int) -> str:
    cells = [" "] * columns
    for mark, first, last in _cells(spans, whole, columns):
        cells[first:last] = mark * (last - first)
    return "".join(cells)


def _cells(spans: tuple[Span, ...], whole: float, columns: int) -> Iterator[tuple[str, int, int]]:
    scale = columns / whole if whole else 0.0
    for index, span in enumerate(spans):
        first = min(int(span.start_seconds * scale), columns - 1)
        yield "#="[index % 2], first, max(first + 1, min(round(span.end_seconds * scale), columns))


def _end(spans: tuple[Span, ...]) -> str:
    return f"{1e3 * max((span.end_seconds for span in spans), default=0.0):.4g} ms"
