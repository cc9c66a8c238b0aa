"""A `RunRecord`: what one training run did, step by step, and what its iterations were made of.

`penstock train` writes one for each run (`RUN_DIR/NAME/run.json`), and `penstock report` draws from as many as it
finds. Parts that a run cannot know are None: torch's own wrapper has no plan, and a dense run has no codec.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from penstock.fields import Fields, read_json, write_json
from penstock.network import Network, network_document, network_from_fields
from penstock.plan import Plan, plan_document, plan_from_fields
from penstock.timeline import Timeline, timeline_document, timeline_from_fields
from penstock.trace import Trace, trace_document, trace_from_fields

FORMAT = "penstock-run/1"
_LONGEST_NAME = 200  # bytes of a folder's: file systems take 255
FILE_NAME = "run.json"
_FIELDS = (
    "format", "name", "task", "metric_name", "workers", "engine", "device", "where", "codec", "planner", "strategy",
    "machine", "versions", "steps", "evaluations", "iteration_seconds", "compute_seconds", "hidden_seconds",
    "exposed_seconds", "samples_per_second", "bytes_per_iteration", "dense_bytes_per_iteration", "plan", "trace",
    "network", "codec_cost", "routes_used", "timeline",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration as it was reported."""

    step: int  # counted from 1
    seconds: float  # since training began, evaluations and checkpoints excluded
    loss: float | None  # None where it was not a finite number


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out metric after some step."""

    step: int
    seconds: float  # since training began, evaluations and checkpoints excluded
    metric: float | None  # None where it was not a finite number


@dataclass(frozen=True, slots=True)
class CodecLine:
    """Seconds for a number of bytes: `startup_seconds + seconds_per_byte nbytes`."""

    startup_seconds: float
    seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What the run's codec costs, as it was measured."""

    ratio: float  # compressed bytes / dense bytes
    encode: CodecLine  # of the dense bytes
    decode: CodecLine  # of the compressed bytes


@dataclass(frozen=True, slots=True)
class RouteUse:
    """What one route really carried in an iteration, on one worker."""

    route: str  # as plans write it: "ring+onebit"
    messages: int  # buckets, or stretches of one
    nbytes: int  # of gradients
    sent_nbytes: int  # put on the wire

    def __str__(self) -> str:
        return f"{self.sent_nbytes} bytes for {self.nbytes} of gradients by {self.route}, in {self.messages} messages"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One training run."""

    name: str  # of the method: "stock DDP", "exact plan", "onebit"
    task: str
    metric_name: str  # "held-out bits per character"
    workers: int
    engine: str  # gloo or mpi
    device: str  # what computed, as a person would name it
    where: str  # "loopback", or "emulated hosts, 1gbit"
    codec: str | None = None
    planner: str | None = None  # None: torch's own buckets
    strategy: str | None = None
    machine: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    iteration_seconds: float | None = None  # median
    compute_seconds: float | None = None  # of one iteration without communication
    hidden_seconds: float | None = None  # communication of one iteration that computation hides
    exposed_seconds: float | None = None  # communication that it does not
    samples_per_second: float | None = None  # of all workers together
    bytes_per_iteration: float | None = None  # that one worker puts on the wire
    dense_bytes_per_iteration: float | None = None  # that it would put there without a codec
    plan: Plan | None = None
    trace: Trace | None = None
    network: Network | None = None
    codec_cost: CodecCost | None = None
    routes_used: tuple[RouteUse, ...] = ()  # in the last iteration, on rank 0; none where that is not known
    predicted: Timeline | None = None  # of one iteration
    measured: Timeline | None = None


def load_run(path: str | os.PathLike[str]) -> RunRecord:
    """Read a run from a `penstock-run/1` JSON file."""
    return read_json(path, FORMAT, run_from_fields)


def run_from_fields(fields: Fields) -> RunRecord:
    """Build a run from the fields of a `penstock-run/1` document."""
    fields.reject_unknown(_FIELDS)
    plan, trace, network = (fields.optional_member(name) for name in ("plan", "trace", "network"))
    codec_cost, timeline = fields.optional_member("codec_cost"), fields.optional_member("timeline")
    return RunRecord(
        name=fields.text("name"),
        task=fields.text("task"),
        metric_name=fields.text("metric_name"),
        workers=fields.integer("workers", 1),
        engine=fields.text("engine"),
        device=fields.text("device"),
        where=fields.text("where"),
        codec=fields.optional_text("codec"),
        planner=fields.optional_text("planner"),
        strategy=fields.optional_text("strategy"),
        machine=fields.scalars("machine"),
        versions={name: str(version) for name, version in fields.scalars("versions").items()},
        steps=tuple(Step(*_moment(item), item.optional_number("loss")) for item in fields.objects("steps", [])),
        evaluations=tuple(
            Evaluation(*_moment(item), item.optional_number("metric")) for item in fields.objects("evaluations", [])
        ),
        **{name: fields.optional_amount(name) for name in _AMOUNTS},
        plan=None if plan is None else plan_from_fields(plan),
        trace=None if trace is None else trace_from_fields(trace),
        network=None if network is None else network_from_fields(network),
        codec_cost=None if codec_cost is None else _codec_cost(codec_cost),
        routes_used=tuple(_route_use(item) for item in fields.objects("routes_used", [])),
        predicted=None if timeline is None else _timeline(timeline, "predicted"),
        measured=None if timeline is None else _timeline(timeline, "measured"),
    )


_AMOUNTS = (
    "iteration_seconds", "compute_seconds", "hidden_seconds", "exposed_seconds", "samples_per_second",
    "bytes_per_iteration", "dense_bytes_per_iteration",
)  # fmt: skip


def _moment(fields: Fields) -> tuple[int, float]:
    return fields.integer("step", 0), fields.amount("seconds")


def _route_use(fields: Fields) -> RouteUse:
    fields.reject_unknown(("route", "messages", "nbytes", "sent_nbytes"))
    counts = (fields.integer(name, 0) for name in ("messages", "nbytes", "sent_nbytes"))
    return RouteUse(fields.text("route"), *counts)


def _codec_cost(fields: Fields) -> CodecCost:
    fields.reject_unknown(("ratio", "encode", "decode"))
    return CodecCost(fields.amount("ratio"), _line(fields, "encode"), _line(fields, "decode"))


def _line(fields: Fields, name: str) -> CodecLine:
    line = fields.optional_member(name)
    if line is None:
        raise fields.error(name, "an object with startup_seconds and seconds_per_byte")
    return CodecLine(line.amount("startup_seconds"), line.amount("seconds_per_byte"))


def _timeline(fields: Fields, name: str) -> Timeline | None:
    fields.reject_unknown(("predicted", "measured"))
    if not fields.present(name):
        return None
    return timeline_from_fields(list(fields.objects(name)))


def run_document(run: RunRecord) -> dict[str, Any]:
    """Return the run as a `penstock-run/1` document."""
    plain = {name: getattr(run, name) for name in _FIELDS if name in _PLAIN}
    return {
        "format": FORMAT,
        **plain,
        "machine": dict(run.machine),
        "versions": dict(run.versions),
        "steps": [{"step": s.step, "seconds": s.seconds, "loss": s.loss} for s in run.steps],
        "evaluations": [{"step": e.step, "seconds": e.seconds, "metric": e.metric} for e in run.evaluations],
        "plan": None if run.plan is None else plan_document(run.plan),
        "trace": None if run.trace is None else trace_document(run.trace),
        "network": None if run.network is None else network_document(run.network),
        "codec_cost": None if run.codec_cost is None else _codec_cost_document(run.codec_cost),
        "routes_used": [asdict(each) for each in run.routes_used],
        "timeline": {
            "predicted": None if run.predicted is None else timeline_document(run.predicted),
            "measured": None if run.measured is None else timeline_document(run.measured),
        },
    }


_PLAIN = {
    "name", "task", "metric_name", "workers", "engine", "device", "where", "codec", "planner", "strategy", *_AMOUNTS,
}  # fmt: skip


def _codec_cost_document(cost: CodecCost) -> dict[str, Any]:
    def line(one: CodecLine) -> dict[str, float]:
        return {"startup_seconds": one.startup_seconds, "seconds_per_byte": one.seconds_per_byte}

    return {"ratio": cost.ratio, "encode": line(cost.encode), "decode": line(cost.decode)}


def save_run(run: RunRecord, path: str | os.PathLike[str]) -> None:
    """Write the run to `path` as JSON."""
    write_json(path, run_document(run))


def folder_name(name: str) -> str:
    """Return a run's name as a folder's, which is inside the folder it is made in; "" where nothing is left of it.

    >>> folder_name("onebit, exact plan")
    'onebit-exact-plan'
    """
    words = "".join(letter if letter.isalnum() or letter in ".=" else " " for letter in name).split()
    made = "-".join(words).lstrip(".")
    if len(made.encode()) <= _LONGEST_NAME:
        return made
    digest = sha256(made.encode()).hexdigest()[:8]  # of all of it: two names that begin alike stay two
    return made.encode()[: _LONGEST_NAME - 9].decode(errors="ignore") + f"-{digest}"


def run_file(out: str, name: str) -> Path:
    """Return where a run's record belongs."""
    return Path(out) / (folder_name(name) or "run") / FILE_NAME
