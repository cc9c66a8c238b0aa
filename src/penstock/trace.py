"""A `Trace`: what one training step of a model computes, tensor by tensor, and for how long.

Tensors stand in the order in which their gradients become ready in the backward pass (the output layer first),
because that is the order in which they can be sent. Sizes are element counts; bytes follow from `dtype`.
"""

import csv
import math
import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from penstock.errors import FormatError, TraceError
from penstock.fields import Fields, read_json, with_an_end, write_json

FORMAT = "penstock-trace/1"
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes per gradient element
TIMES = ("measured", "estimated")
_FIELDS = ("format", "model", "device", "batch", "dtype", "forward_seconds", "tensors", "times", "source")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "seconds": 1.0}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter tensor as the backward pass sees it."""

    name: str
    numel: int  # elements of the gradient
    backward_seconds: float  # from the previous gradient being ready to this one


@dataclass(frozen=True, slots=True)
class Trace:
    """The computation of one training iteration on one worker."""

    model: str
    device: str  # what ran it, as a person would name it
    batch: int  # samples per worker and iteration
    dtype: str  # of the gradients; a key of ITEMSIZE
    forward_seconds: float
    tensors: tuple[Tensor, ...]  # in the order their gradients become ready
    times: str = "measured"  # or "estimated": shown wherever numbers from this trace are printed
    source: str = ""  # where the times come from, in words

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise TraceError(f"trace {self.model!r}: dtype {self.dtype!r}; wanted one of {', '.join(ITEMSIZE)}")
        if not self.tensors:
            raise TraceError(f"trace {self.model!r} has no tensors; wanted at least one")
        _check_amount(self.model, "forward_seconds", self.forward_seconds)
        seen: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise TraceError(f"trace {self.model!r}: tensor {tensor.name!r} appears twice; each name stands once")
            if tensor.numel < 0:
                raise TraceError(f"trace {self.model!r}: {tensor.name!r}: numel is {tensor.numel}; wanted >= 0")
            _check_amount(self.model, f"{tensor.name!r}: backward_seconds", tensor.backward_seconds)
            seen.add(tensor.name)

    @property
    def itemsize(self) -> int:
        """Bytes per gradient element."""
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Gradient bytes of each tensor."""
        return tuple(tensor.numel * self.itemsize for tensor in self.tensors)

    @property
    def ready_seconds(self) -> tuple[float, ...]:
        """When each gradient is ready, counted from the start of the forward pass (MG-WFBP Eq. 6)."""
        steps = (tensor.backward_seconds for tensor in self.tensors)
        return tuple(accumulate(steps, initial=self.forward_seconds))[1:]

    @property
    def backward_seconds(self) -> float:
        """The whole backward pass."""
        return math.fsum(tensor.backward_seconds for tensor in self.tensors)

    @property
    def compute_seconds(self) -> float:
        """Forward and backward pass without any communication."""
        return self.ready_seconds[-1]

    @property
    def label(self) -> str:
        """The model's name, with a mark where its times are not measured."""
        return self.model if self.times == "measured" else f"{self.model} ({self.times} times)"

    def computing(self, seconds: float) -> "Trace":
        """Return the trace with all times in proportion, so that an iteration computes for `seconds`."""
        factor = seconds / self.compute_seconds
        tensors = tuple(replace(each, backward_seconds=factor * each.backward_seconds) for each in self.tensors)
        return replace(self, forward_seconds=factor * self.forward_seconds, tensors=tensors)

    def with_dtype(self, dtype: str) -> "Trace":
        """Return the same trace with gradients of another type: half the bytes for 16-bit training."""
        return replace(self, dtype=dtype)


def _check_amount(model: str, what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise TraceError(f"trace {model!r}: {what} is {value}; wanted a finite number >= 0")


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace from a `penstock-trace/1` JSON file, or from CSV where the name ends in `.csv`."""
    if str(path).endswith(".csv"):
        return trace_from_csv(path)
    return read_json(path, FORMAT, trace_from_fields)


def trace_from_fields(fields: Fields) -> Trace:
    """Build a trace from the fields of a `penstock-trace/1` document."""
    fields.reject_unknown(_FIELDS)
    tensors: dict[str, Tensor] = {}
    for item in fields.objects("tensors"):
        item.reject_unknown(("name", "numel", "backward_seconds"))
        tensor = Tensor(item.text("name"), item.integer("numel", 0), item.amount("backward_seconds"))
        if tensor.name in tensors:
            raise item.error("name", "a name that no earlier tensor has")
        tensors[tensor.name] = tensor
    if not tensors:
        raise fields.error("tensors", "at least one tensor")
    return Trace(
        model=fields.text("model"),
        device=fields.text("device"),
        batch=fields.integer("batch", 1),
        dtype=fields.choice("dtype", tuple(ITEMSIZE)),
        forward_seconds=fields.amount("forward_seconds"),
        tensors=tuple(tensors.values()),
        times=fields.choice("times", TIMES, "measured"),
        source=fields.text("source", ""),
    )


def trace_document(trace: Trace) -> dict[str, Any]:
    """Return the trace as a `penstock-trace/1` document."""
    document = {
        "format": FORMAT,
        "model": trace.model,
        "device": trace.device,
        "batch": trace.batch,
        "dtype": trace.dtype,
        "forward_seconds": trace.forward_seconds,
        "times": trace.times,
        "tensors": [{"name": t.name, "numel": t.numel, "backward_seconds": t.backward_seconds} for t in trace.tensors],
    }
    return {**document, "source": trace.source} if trace.source else document


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace to `path` as JSON."""
    write_json(path, trace_document(trace))


def trace_from_csv(
    path: str | os.PathLike[str],
    *,
    time_column: str | None = None,
    forward_seconds: float | None = None,
    batch: int = 1,
    dtype: str = "float32",
) -> Trace:
    """Read a trace from CSV with a header.

    Columns: a size (`numel`, or any name that begins so), a backward time whose name begins with `backward_` and
    carries its unit (`backward_seconds`, `backward_ms`, `backward_us_run1`), and optionally `name`. Rows stand in
    the order gradients become ready, unless a column `layer_forward_index` says that they stand in forward order.
    Of several time columns, `time_column` names one by any part of its name; otherwise the first is read.
    CSV has no place for the forward time: where none is given it is half the backward time (erratum 3 of MG-WFBP).
    """
    where = str(path)
    header, rows = _read_rows(where)
    size = _column(where, header, "numel", None)
    time = _column(where, header, "backward_", time_column)
    unit = _UNITS.get(time.split("_")[1])
    if unit is None:
        raise FormatError(where, time, time, "a unit after backward_: " + ", ".join(_UNITS))
    tensors = [
        Tensor(
            row.get("name") or f"tensor{row.get('layer_forward_index') or index}",
            _whole_number(where, index, size, row[size]),
            _number(where, index, time, row[time]) * unit,
        )
        for index, row in enumerate(rows, start=2)
    ]
    if "layer_forward_index" in header:
        tensors.reverse()
    if forward_seconds is None:
        forward_seconds = 0.5 * math.fsum(tensor.backward_seconds for tensor in tensors)
    try:
        return Trace(
            Path(path).stem,
            "see source",
            batch,
            dtype,
            forward_seconds,
            tuple(tensors),
            source=f"{where}, column {time}",
        )
    except TraceError as error:
        raise FormatError(where, "rows", str(error), "rows that make a trace") from error


def _read_rows(where: str) -> tuple[list[str], list[dict[str, str]]]:
    try:
        with open(with_an_end(where), newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            header, rows = list(reader.fieldnames or ()), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FormatError(where, "file", str(error), "a readable CSV file with a header") from error
    for index, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise FormatError(where, f"row {index}", list(row.values()), f"{len(header)} columns")
    return header, rows


def _column(where: str, header: Iterable[str], prefix: str, part: str | None) -> str:
    columns = [name for name in header if name.startswith(prefix) and (part is None or part in name)]
    exact = [name for name in columns if part is not None and name.endswith(f"_{part}")]
    if not columns:
        wanted = f"a column whose name begins with {prefix!r}" + (f" and contains {part!r}" if part else "")
        raise FormatError(where, "header", ", ".join(header), wanted)
    return (exact or columns)[0]


def _number(where: str, index: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise FormatError(where, f"row {index}, {column}", text, "a finite number >= 0")
    return value


def _whole_number(where: str, index: int, column: str, text: str) -> int:
    value = _number(where, index, column, text)
    if value != int(value):
        raise FormatError(where, f"row {index}, {column}", text, "a whole number >= 0")
    return int(value)


def only(trace: Trace, names: Container[str]) -> Trace:
    """Return the trace of these tensors alone; the next one is computed in the time of those before it that go.

    Gradients that torch sends by itself, sparse ones or those that it is told to ignore, are in no bucket.
    """
    if all(tensor.name in names for tensor in trace.tensors):
        return trace
    tensors, passed = [], 0.0
    for tensor in trace.tensors:
        passed += tensor.backward_seconds
        if tensor.name in names:
            tensors.append(replace(tensor, backward_seconds=passed))
            passed = 0.0
    return replace(trace, tensors=tuple(tensors))


def in_order(trace: Trace, parameters: Mapping[str, int]) -> Trace:
    """Return the trace with its tensors in another order: that of `parameters`, names and sizes.

    A tensor counts as ready when all before it are: torch sends buckets in order. Those without a gradient in the trace
    are ready from the start.
    """
    ready_at = dict(zip((tensor.name for tensor in trace.tensors), trace.ready_seconds, strict=True))
    tensors, now = [], trace.forward_seconds
    for name, numel in parameters.items():
        ready = max(now, ready_at.get(name, now))
        tensors.append(Tensor(name, numel, ready - now))
        now = ready
    return Trace(
        trace.model, trace.device, trace.batch, trace.dtype, trace.forward_seconds, tuple(tensors), source=trace.source
    )
