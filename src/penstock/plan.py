"""A `Plan`: which gradients travel together, in which order, and by which way.

Buckets stand in the order in which they are sent, which is the order in which their gradients become ready. A plan
names tensors, so it can be checked against a trace or a model; its hash covers only what ranks must agree on.

Buckets are what a planner cut. A *bulk* is a run of them, by one route, that travels as one message, with the readiness
of its last bucket. `messages` are what is sent: bulks, and buckets that are in none.

    buckets   a  b  c  d  e      bulks (3, 1, 1)      messages   a b c | d | e
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from penstock.errors import PlanError
from penstock.fields import Fields, read_json, write_json
from penstock.timeline import Timeline, timeline_document, timeline_from_fields
from penstock.trace import TIMES, Trace

FORMAT = "penstock-plan/1"
_FIELDS = (
    "format", "model", "workers", "planner", "overlap", "times", "iteration_seconds", "non_overlapped_seconds",
    "buckets", "bulks", "timeline", "hash",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Route:
    """How a bucket travels, in words: the collective, the codec or none, and the partitions.

    Its text is what command lines and measured lines use: `ring`, `ring+onebit`, `ring+terngrad(bitwidth=2)/4`. The
    strategy may have options of its own: `hierarchical(ranks_per_node=4)+onebit`.
    """

    strategy: str
    codec: str | None = None  # None: sent as it is
    partitions: int = 1  # pieces that each tensor is cut into before it is compressed; 1: as the strategy cuts it

    @property
    def options(self) -> dict[str, Any]:
        """The strategy's options that it stands for."""
        return {"partitions": self.partitions} if self.partitions > 1 else {}

    def __str__(self) -> str:
        codec = f"+{self.codec}" if self.codec else ""
        return f"{self.strategy}{codec}" + (f"/{self.partitions}" if self.partitions > 1 else "")


def parse_route(text: str) -> Route:
    """Return the route that `text` says.

    >>> parse_route("ring+terngrad(bitwidth=2)/4")
    Route(strategy='ring', codec='terngrad(bitwidth=2)', partitions=4)
    """
    match = re.fullmatch(r"\s*([^+/\s()]+(?:\([^()]*\))?)(?:\+(.+?))?(?:/([1-9][0-9]{0,8}))?\s*", text)
    if not match:
        raise PlanError(f"route {text!r}; wanted STRATEGY, STRATEGY+CODEC or STRATEGY+CODEC/PARTITIONS: ring+onebit/4")
    return Route(match[1].replace("-", "_"), match[2], int(match[3] or 1))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent as one message, alone or in a bulk with other buckets."""

    tensors: tuple[str, ...]  # in the order their gradients become ready
    nbytes: int  # dense gradient bytes, before any codec
    strategy: str  # the collective that carries it
    codec: str | None = None  # None: sent as it is
    partitions: int = 1  # pieces that each tensor is cut into before it is compressed; 1: as the strategy cuts it

    @property
    def route(self) -> Route:
        """How it travels."""
        return Route(self.strategy, self.codec, self.partitions)

    @property
    def name(self) -> str:
        """A short name for pictures: the first and the last tensor."""
        first, last = self.tensors[0], self.tensors[-1]
        return first if first == last else f"{first} .. {last}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The buckets of one iteration and what they are predicted to cost."""

    model: str
    workers: int
    planner: str
    buckets: tuple[Bucket, ...]
    overlap: bool = True  # False: sending begins only after the whole backward pass (naive S-SGD)
    times: str = "measured"  # "estimated" where the trace's times are
    iteration_seconds: float = 0.0  # predicted
    non_overlapped_seconds: float = 0.0  # predicted communication that no computation hides
    timeline: Timeline = field(default_factory=lambda: Timeline(()))  # as predicted; may be empty
    bulks: tuple[int, ...] = ()  # how many buckets in a row travel as one message, in order; empty: each by itself

    def __post_init__(self) -> None:
        holder: dict[str, int] = {}
        for index, bucket in enumerate(self.buckets):
            if not bucket.tensors:
                raise PlanError(f"bucket {index} is empty; a bucket holds at least one tensor")
            for name in bucket.tensors:
                if name in holder:
                    both = f"buckets {holder[name]} and {index}" if holder[name] != index else f"bucket {index} twice"
                    raise PlanError(f"tensor {name!r} is in {both}; a plan holds each tensor once")
                holder[name] = index
        self._check_bulks()

    def _check_bulks(self) -> None:
        if self.bulks and (min(self.bulks) < 1 or sum(self.bulks) != len(self.buckets)):
            raise PlanError(
                f"bulks {list(self.bulks)} of {len(self.buckets)} buckets; wanted numbers that add up to it"
            )
        for start, stop in pairwise(accumulate(self.bulks, initial=0)):
            if len(found := dict.fromkeys(str(bucket.route) for bucket in self.buckets[start:stop])) > 1:
                raise PlanError(
                    f"buckets {start} to {stop - 1} are a bulk and travel by {' and '.join(found)}; wanted one route"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients, as they are."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def merged(self) -> "Plan":
        """The same with each bulk as one bucket: for adaptors that can let its gradients lie side by side."""
        if not self.bulks:
            return self
        runs = (self.buckets[start:stop] for start, stop in pairwise(accumulate(self.bulks, initial=0)))
        buckets = (
            replace(
                run[0],
                tensors=tuple(name for bucket in run for name in bucket.tensors),
                nbytes=sum(bucket.nbytes for bucket in run),
            )
            for run in runs
        )
        return replace(self, buckets=tuple(buckets), bulks=())

    @property
    def messages(self) -> tuple[Bucket, ...]:
        """What is sent, in order: each bulk as one bucket."""
        return self.merged.buckets

    @property
    def hash(self) -> str:
        """A digest of what all ranks must agree on: buckets, their ways, bulks, and when sending starts."""
        agreed: list[Any] = [self.overlap, [_bucket_document(bucket) for bucket in self.buckets]]
        agreed += [self.bulks] if self.bulks else []
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]

    def check_against(self, trace: Trace) -> None:
        """Raise `PlanError` unless the plan holds every tensor of `trace`, in the trace's order, with its bytes."""
        planned = [name for bucket in self.buckets for name in bucket.tensors]
        known = {tensor.name: nbytes for tensor, nbytes in zip(trace.tensors, trace.nbytes, strict=True)}
        for name in planned:
            if name not in known:
                raise PlanError(f"plan holds tensor {name!r}, which trace {trace.model!r} does not have; plan anew")
        if missing := set(known) - set(planned):
            raise PlanError(f"plan lacks tensor {sorted(missing)[0]!r} of trace {trace.model!r}; plan anew")
        if planned != list(known):
            at = next(i for i, (a, b) in enumerate(zip(planned, known, strict=True)) if a != b)
            raise PlanError(
                f"plan sends {planned[at]!r} where trace {trace.model!r} has {list(known)[at]!r} ready; plan anew"
            )
        for index, bucket in enumerate(self.buckets):
            if bucket.nbytes != (wanted := sum(known[name] for name in bucket.tensors)):
                raise PlanError(f"bucket {index} says {bucket.nbytes} bytes; its tensors have {wanted}; plan anew")


def cut_into_buckets(trace: Trace, ends: Sequence[int], routes: Sequence[Route]) -> tuple[Bucket, ...]:
    """Cut the trace after the tensors with indices `ends` (the last one included), a route for each piece.

    >>> cut_into_buckets(trace_of_four, [0, 3], [Route("ring")] * 2)  # tensor 0 alone, then 1, 2 and 3
    """
    starts = [0, *(end + 1 for end in ends[:-1])]
    sizes = trace.nbytes
    return tuple(
        Bucket(
            tuple(tensor.name for tensor in trace.tensors[start : end + 1]),
            sum(sizes[start : end + 1]),
            route.strategy,
            route.codec,
            route.partitions,
        )
        for start, end, route in zip(starts, ends, routes, strict=True)
    )


def bucket_runs(plan: Plan) -> list[str]:
    """Return what is sent in short: of each run of messages by one route, the route and how many tensors each has.

    A plan of three messages, of 2, 1 and 4 tensors: ["native: 2", "ring+onebit/4: 1 4"].
    """
    runs = groupby(plan.messages, key=lambda bucket: str(bucket.route))
    return [f"{route}: {' '.join(str(len(bucket.tensors)) for bucket in run)}" for route, run in runs]


def buckets_from_runs(trace: Trace, runs: Sequence[str]) -> tuple[Bucket, ...]:
    """Return the buckets of a trace that `bucket_runs` wrote."""
    pairs = [(parse_route(route), int(count)) for route, counts in map(_route_and_counts, runs) for count in counts]
    ends = [end - 1 for end in accumulate(count for _, count in pairs)]
    if not ends or ends[-1] != len(trace.tensors) - 1:
        raise PlanError(
            f"buckets {list(runs)} hold {sum(c for _, c in pairs)} tensors; {trace.model} has {len(trace.tensors)}"
        )
    return cut_into_buckets(trace, ends, [route for route, _ in pairs])


def _route_and_counts(run: str) -> tuple[str, list[str]]:
    route, _, counts = run.rpartition(": ")
    return route, counts.split()


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a `penstock-plan/1` JSON file."""
    return read_json(path, FORMAT, plan_from_fields)


def plan_from_fields(fields: Fields) -> Plan:
    """Build a plan from the fields of a `penstock-plan/1` document."""
    fields.reject_unknown(_FIELDS)
    buckets = []
    seen: set[str] = set()
    for item in fields.objects("buckets"):
        buckets.append(_bucket(item, seen))
    bulks = fields.integer_list("bulks", 1, ())
    if bulks and sum(bulks) != len(buckets):
        raise fields.error("bulks", f"whole numbers that add up to {len(buckets)}, the number of buckets")
    plan = Plan(
        model=fields.text("model", "model"),
        workers=fields.integer("workers", 1, 1),
        planner=fields.text("planner"),
        buckets=tuple(buckets),
        overlap=fields.flag("overlap", True),
        times=fields.choice("times", TIMES, "measured"),
        iteration_seconds=fields.amount("iteration_seconds", 0.0),
        non_overlapped_seconds=fields.amount("non_overlapped_seconds", 0.0),
        timeline=timeline_from_fields(list(fields.objects("timeline", []))),
        bulks=bulks,
    )
    if fields.text("hash", plan.hash) != plan.hash:
        raise fields.error(
            "hash", f"{plan.hash}, the hash of these buckets; the file was edited by hand: drop the field"
        )
    return plan


def _bucket(fields: Fields, seen: set[str]) -> Bucket:
    fields.reject_unknown(("tensors", "nbytes", "strategy", "codec", "partitions"))
    tensors = fields.text_list("tensors")
    if not tensors:
        raise fields.error("tensors", "at least one tensor")
    for name in tensors:
        if name in seen:
            raise fields.error("tensors", f"each tensor once in a plan ({name!r} stands twice)")
        seen.add(name)
    codec = fields.optional_text("codec")
    return Bucket(
        tensors, fields.integer("nbytes", 0), fields.text("strategy"), codec, fields.integer("partitions", 1, 1)
    )


def _bucket_document(bucket: Bucket) -> dict[str, Any]:
    return {
        "tensors": list(bucket.tensors),
        "nbytes": bucket.nbytes,
        "strategy": bucket.strategy,
        "codec": bucket.codec,
        "partitions": bucket.partitions,
    }


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the plan as a `penstock-plan/1` document."""
    return {
        "format": FORMAT,
        "model": plan.model,
        "workers": plan.workers,
        "planner": plan.planner,
        "overlap": plan.overlap,
        "times": plan.times,
        "iteration_seconds": plan.iteration_seconds,
        "non_overlapped_seconds": plan.non_overlapped_seconds,
        "hash": plan.hash,
        "buckets": [_bucket_document(bucket) for bucket in plan.buckets],
        **({"bulks": list(plan.bulks)} if plan.bulks else {}),
        "timeline": timeline_document(plan.timeline),
    }


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan to `path` as JSON."""
    write_json(path, plan_document(plan))
