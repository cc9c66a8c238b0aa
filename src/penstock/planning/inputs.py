"""Checks options, models and plans: that all ranks have the same, and that a user's plan, trace and network fit.

Ranks with different options wait for one another for ever, or train different models without an error. So every option
that changes what is sent is compared before anything is sent, and a difference is raised on all ranks.

A plan of another model would be followed in part: buckets that the model cannot fill are never made, and their tensors
travel by other routes. So a plan's names, bytes, workers, strategies and codecs are compared with the model, and an
error on one rank is raised on all of them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from uuid import uuid4

import penstock
from penstock.codecs.registry import SPARSE_CODECS, is_low_rank, make_codec
from penstock.codecs.spec import parse_spec
from penstock.errors import CodecError, PenstockError, PlanError
from penstock.exchange.compression import ANY, SPARSE_STRATEGIES, Scheme, check_known, texts_of
from penstock.network import Network
from penstock.plan import Plan, Route
from penstock.planning.agree import Ranks
from penstock.planning.planning import check_strategy
from penstock.trace import Trace

_WHAT = "comparing what ranks are given"
_MODEL, _TOKEN = "the model (fingerprint)", "a name for this call"  # what is not compared as options are


def compare_models(options: Mapping[str, str], tensors: Sequence[str], ranks: Ranks) -> str:
    """Raise the same error on every rank unless all have the same options and models of the same parameters.

    Every rank must call this. `options` are what changes what is sent, as text; `tensors` has a line for each
    parameter. Returns a name for this call that all ranks share and no other call has.
    """
    mine = {**options, "penstock": penstock.__version__, _MODEL: _digest(tensors), _TOKEN: uuid4().hex}
    held = ranks.gather(mine, _WHAT)
    differs = difference([{name: each[name] for name in each if name not in (_MODEL, _TOKEN)} for each in held])
    if differs:
        raise PlanError(f"{differs}; give all ranks the same")
    if len({each[_MODEL] for each in held}) > 1:
        models: list[list[str]] = ranks.gather(list(tensors), _WHAT)
        raise PlanError(f"{_model_difference(models)}; give all ranks the same model")
    return str(held[0][_TOKEN])


def _model_difference(models: Sequence[Sequence[str]]) -> str:
    for number, lines in enumerate(zip_longest(*models, fillvalue="none")):
        for rank, line in enumerate(lines):
            if line != lines[0]:
                return f"parameter {number} is {lines[0]} on rank 0 and {line} on rank {rank}"
    raise AssertionError("fingerprints differ, and the models do not")


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PlanningInputs:
    """The plan, trace and network that a user passed in; None: to be made or measured."""

    plan: Plan | None
    trace: Trace | None
    network: Network | None

    def agree(self, gradients: Mapping[str, int], may_lack: bool, compression: Scheme, ranks: Ranks) -> None:
        """Raise on every rank unless all ranks passed in the same, and it fits the model and the ranks.

        `gradients` are the bytes of each parameter's; with `may_lack` some of them may have no place.
        """
        complaint = self._complaint(gradients, may_lack, compression, ranks.world_size)
        codecs = (
            {bucket.codec for bucket in self.plan.buckets if bucket.codec} if self.plan and not complaint else set()
        )
        mine = complaint, self._kinds, texts_of(sorted(codecs))
        held: list[tuple[str, str, Mapping[str, str]]] = ranks.gather(mine, _WHAT)
        for rank, (complaint, _, _) in enumerate(held):
            if complaint:
                is_alike = all(other == complaint for other, _, _ in held)
                raise PlanError(complaint if is_alike else f"on rank {rank}, {complaint}")
        if len({each for _, each, _ in held}) > 1:
            kinds = ", ".join(f"rank {rank} {each}" for rank, (_, each, _) in enumerate(held))
            raise PlanError(f"ranks are given different things ({kinds}); give all ranks the same")
        if differs := difference([texts for _, _, texts in held]):
            raise PlanError(f"{differs}; give all ranks the same")

    @property
    def _kinds(self) -> str:
        """What was passed in, in words; where ranks differ, some would wait in a collective that others never call."""
        kinds = [f"plan {self.plan.hash}"] if self.plan else []
        kinds += ["a trace"] if self.trace else []
        kinds += ["a network"] if self.network else []
        return " and ".join(kinds) or "nothing"

    def _complaint(self, gradients: Mapping[str, int], may_lack: bool, compression: Scheme, workers: int) -> str:
        try:
            if self.plan is not None:
                check_plan(self.plan, gradients, may_lack, workers)
                check_codecs(self.plan, compression)
            if self.trace is not None:
                check_trace(self.trace, gradients, may_lack)
            if self.network is not None and self.network.workers != workers:
                raise PlanError(
                    f"network {self.network.name!r} has {self.network.workers} workers and this group {workers}; "
                    "measure it with as many, or leave network out"
                )
        except PenstockError as error:
            return str(error)
        return ""


def difference(held: Sequence[Mapping[str, str]]) -> str:
    """Say how the first option that differs between ranks does; empty where none does.

    >>> difference([{"codec": "'onebit'"}, {"codec": "None"}])
    "codec is 'onebit' on rank 0 and None on rank 1"
    """
    for name, mine in held[0].items():
        for rank, options in enumerate(held):
            if (theirs := options.get(name, "not given")) != mine:
                return f"{name} is {mine} on rank 0 and {theirs} on rank {rank}"
    return ""


def check_plan(plan: Plan, gradients: Mapping[str, int], may_lack: bool, workers: int) -> None:
    """Refuse a plan of another model or for another number of workers, and routes that nothing can take."""
    if plan.workers != workers:
        raise PlanError(f"the plan is for {plan.workers} workers and this group has {workers}; plan anew for as many")
    _check_names("the plan", [name for bucket in plan.buckets for name in bucket.tensors], gradients, may_lack)
    for index, bucket in enumerate(plan.buckets):
        if bucket.nbytes != (wanted := sum(gradients[name] for name in bucket.tensors)):
            raise PlanError(
                f"bucket {index} of the plan has {bucket.nbytes} bytes, and its tensors' gradients {wanted}; plan anew"
            )
        check_route(bucket.route)


def check_trace(trace: Trace, gradients: Mapping[str, int], may_lack: bool) -> None:
    """Refuse the trace of another model."""
    _check_names("the trace", [tensor.name for tensor in trace.tensors], gradients, may_lack)
    for tensor, nbytes in zip(trace.tensors, trace.nbytes, strict=True):
        if nbytes != (wanted := gradients[tensor.name]):
            raise PlanError(f"{tensor.name!r} has {nbytes} bytes in the trace and {wanted} in the model; profile anew")


def check_route(route: Route) -> None:
    """Refuse an unknown strategy or codec, and a pair of them that does not go together."""
    check_strategy(route.strategy)
    if route.codec is None:
        return Scheme().check_strategy(route.strategy)
    check_known(route.codec)
    make_codec(route.codec)
    if is_low_rank(route.codec) and route.partitions > 1:
        raise CodecError(f"route {route}: factors of whole matrices are sent; wanted no number of pieces")
    is_sparse = parse_spec(route.codec)[0] in SPARSE_CODECS
    return Scheme(route.codec, SPARSE_STRATEGIES if is_sparse else ANY).check_strategy(route.strategy)


def check_codecs(plan: Plan, compression: Scheme) -> None:
    """Refuse what the plan does not do: buckets travel by its codecs, and may be parts of the model."""
    if (count := len(plan.merged.buckets)) > 1:
        compression.refuse_parts(f"beside a plan of {count} buckets")
    held = list(dict.fromkeys(bucket.codec for bucket in plan.buckets if bucket.codec))
    asked = compression.codec
    if asked is not None and parse_spec(asked)[0] not in {parse_spec(codec)[0] for codec in held}:
        found = f"compresses by {', '.join(held)}" if held else "compresses nothing"
        raise PlanError(f"codec {asked!r} beside a plan that {found}; leave codec out, or plan with it")


def _check_names(what: str, names: list[str], gradients: Mapping[str, int], may_lack: bool) -> None:
    trained = f"the model trains {next(iter(gradients))!r} and {len(gradients) - 1} more"
    for name in names:
        if name not in gradients:
            raise PlanError(f"{what} holds {name!r}, and {trained}; wanted one of this model")
    if not may_lack and (missing := [name for name in gradients if name not in names]):
        raise PlanError(f"{what} lacks {missing[0]!r}, which the model trains; wanted one of this model")
