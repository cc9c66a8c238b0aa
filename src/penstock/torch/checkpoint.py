"""The state of an exchange as checkpoints hold it: checked, agreed on by all ranks, dealt out to any number of them.

Values are tensors of their parameter's shape, in logical order: whatever the memory format was when they were saved,
each belongs to the same element of the parameter when they are loaded.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import FormatError, PenstockError, PlanError
from penstock.runtime.transport.c10d import C10dTransport

FORMAT = "penstock-exchange/2"
MEMORY_ORDER = "penstock-exchange/1"  # flat values in memory order, which nothing says
KINDS = ("residual", "velocity")
State = dict[str, Any]  # plain values and CPU tensors: what torch.save and torch.distributed.checkpoint take
Shapes = Mapping[str, tuple[int, ...]]  # of parameters, by name

TIMEOUT_SECONDS = 300.0  # for all ranks to load
_LOOK_SECONDS = 0.01  # between looks for the others
_TOLD = 3  # backward passes of which others are told, from the beginning and from each load on
_WHERE = "exchange state"


def state_for(states: Sequence[State], rank: int, world_size: int) -> State:
    """Return what `rank` of `world_size` starts from, given the checked states of all ranks that there were.

    With as many ranks as before, each gets its own back. Otherwise old rank r's belongs to new rank r mod world_size:
    new ranks start with nothing owed, and where ranks are gone the others owe what those did. Residuals are in the
    units of what is applied, so the sum over ranks is the same before and after, up to float32 rounding.
    """
    mine, inherited = states[rank % len(states)], states[rank::world_size]
    memories = {kind: _sum([state["memories"].get(kind, {}) for state in inherited]) for kind in KINDS}
    return {**mine, "rank": rank, "world_size": world_size, "memories": memories}


def check_states(states: Sequence[Mapping[str, Any]], shapes: Shapes) -> list[State]:
    """Return the states by rank and under the model's names; refuse what is no whole run's, or another model's.

    `shapes` are those of the parameters; none where they are not known yet. Names are taken with or without the prefix
    that torch.compile adds. What is owed to a parameter that the model does not have would never be sent.
    """
    found = [_checked(state) for state in states]
    ranks = sorted((state["rank"], state["world_size"]) for state in found)
    if ranks != [(rank, len(found)) for rank in range(len(found))] or not found:
        what = ", ".join(f"rank {rank} of {size}" for rank, size in ranks) or "none"
        raise FormatError(_WHERE, "states", what, "the state of every rank of one run, each once")
    for name in ("iterations", "scale"):
        if len(values := {state[name] for state in found}) > 1:
            raise FormatError(_WHERE, name, sorted(values), "the same on all ranks: states of one moment")
    known = {_plain(name): name for name in shapes}
    ordered = sorted(found, key=lambda state: int(state["rank"]))
    return [{**state, "memories": _of_model(state["memories"], known, shapes)} for state in ordered]


def _checked(state: Mapping[str, Any]) -> State:
    """Return a state with all its fields; refuse one that lacks any, or has another type there."""
    if not isinstance(state, Mapping):
        raise FormatError(_WHERE, "state", state, "what exchange_state_dict returned")
    found = state.get("format")
    if found == MEMORY_ORDER:
        raise FormatError(
            _WHERE, "format", found, f"{FORMAT}: the older one has values in memory order, and does not say in which; "
            "go on without it, or save it anew"
        )  # fmt: skip
    if found != FORMAT:
        raise FormatError(_WHERE, "format", found, FORMAT)
    for name, least in (("rank", 0), ("world_size", 1), ("iterations", 0)):
        if not isinstance(state.get(name), int) or state[name] < least:
            raise FormatError(_WHERE, name, state.get(name), f"a whole number >= {least}")
    scale = state.get("scale")
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise FormatError(_WHERE, "scale", scale, "a finite number > 0")
    memories = state.get("memories")
    if not isinstance(memories, Mapping) or not all(isinstance(each, Mapping) for each in memories.values()):
        raise FormatError(_WHERE, "memories", memories, "tensors by kind and name of the parameter")
    if unknown := sorted(set(memories) - set(KINDS)):
        raise FormatError(_WHERE, "memories", unknown[0], f"one of {', '.join(KINDS)}")
    return dict(state)


def _of_model(memories: Mapping[str, Mapping[str, Any]], known: Mapping[str, str], shapes: Shapes) -> State:
    """Return memories under the model's names; refuse unknown names, and values that do not fit."""
    placed: State = {kind: {} for kind in memories}
    for kind, values in memories.items():
        for name, value in values.items():
            if known and _plain(name) not in known:
                wanted = f"a parameter of the model, such as {next(iter(known.values()))!r}"
                raise FormatError(_WHERE, "memories", name, wanted)
            own = known.get(_plain(name), name)
            _check_value(f"{kind} of {name!r}", value, shapes.get(own))
            placed[kind][own] = value
    return placed


def _check_value(what: str, value: Any, shape: tuple[int, ...] | None) -> None:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        found = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else value
        raise FormatError(_WHERE, what, found, "a tensor of torch.float32")
    if shape is not None and tuple(value.shape) != shape:
        raise FormatError(_WHERE, what, tuple(value.shape), f"{shape}, as the parameter is: the state of this model")
    if not torch.isfinite(value).all():
        raise FormatError(_WHERE, what, "NaN or infinity", "finite values")


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _sum(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, values in part.items():
            total[name] = total[name] + values if name in total else values.detach().clone()
    return total


def _digest(states: Sequence[State]) -> str:
    """Return what tells states apart: all fields, and a checksum of each tensor in logical order."""
    fields: list[Any] = []
    for state in states:
        fields.append([state["rank"], state["iterations"], state["scale"]])
        for kind, values in state["memories"].items():
            for name, value in sorted(values.items()):
                checksum = zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes())
                fields.append([kind, name, tuple(value.shape), checksum])
    return f"{zlib.crc32(json.dumps(fields).encode()):08x}"


class Loads:
    """The loads of one wrapper, of which its ranks tell one another through the store in which they met.

    Ranks that load something else, or nothing, part ways: so all of them must load, the same states, between the same
    two backward passes. A collective would leave the one that loads waiting for the others' timeout: through the store
    each sees that another has gone on without it, and raises.
    """

    def __init__(self, group: dist.ProcessGroup | None, token: str, by_exchange: bool = False) -> None:
        """`token` differs between wrappers; `by_exchange`: an exchange, not the wrapper, tells of backward passes."""
        self.by_exchange, self.token, self._group = by_exchange, token, group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._prefix = f"penstock/load/{token}"
        self._count = 0  # of loads
        self._passes = self._since = 0  # backward passes, and how many since the last load

    @cached_property
    def _store(self) -> Any:
        return C10dTransport(self._group).store

    def went_on(self) -> None:
        """Count a backward pass, which all ranks begin alike; raise where another rank waits for this one to load."""
        self._passes, self._since = self._passes + 1, self._since + 1
        if self._world_size > 1 and self._since <= _TOLD:
            self._store.set(self._key("passes", self._rank), str(self._passes))
            if self._store.check([first := self._key(self._count + 1, "first")]):
                raise _not_by_all(self._text(first))

    def agree(self, states: Sequence[State], complaint: PenstockError | None) -> None:
        """Raise the same on every rank unless all of them load the same states, and find nothing wrong with them."""
        if self._world_size > 1:
            self._count += 1
            held = self._told(json.dumps(["", _digest(states)] if complaint is None else [str(complaint), ""]))
            for rank, (theirs, _) in enumerate(held):
                if theirs and any(other != theirs for other, _ in held):
                    raise PlanError(f"on rank {rank}, {theirs}")
            if complaint is None and len({digest for _, digest in held}) > 1:
                sums = ", ".join(f"rank {rank} {digest}" for rank, (_, digest) in enumerate(held))
                raise PlanError(
                    f"ranks load different exchange states (checksums: {sums}); give every rank the same: those of all "
                    "ranks of one run"
                )
            self._since = 0
        if complaint is not None:
            raise complaint

    def _told(self, mine: str) -> list[tuple[str, str]]:
        """Return what each rank says; raise where one goes on without saying anything."""
        first = self._key(self._count, "first")
        self._store.compare_set(first, "", str(self._rank))
        self._store.set(self._key(self._count, self._rank), mine)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        deadline = monotonic() + TIMEOUT_SECONDS
        while not self._store.check([self._key(self._count, rank) for rank in others]):
            absent = [rank for rank in others if not self._store.check([self._key(self._count, rank)])]
            if any(self._has_gone_on(rank) for rank in absent) or monotonic() > deadline:
                raise _not_by_all(self._text(first))
            sleep(_LOOK_SECONDS)
        return [tuple(json.loads(self._text(self._key(self._count, rank)))) for rank in range(self._world_size)]

    def _has_gone_on(self, rank: int) -> bool:
        key = self._key("passes", rank)
        return self._store.check([key]) and int(self._text(key)) > self._passes

    def _key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])

    def _text(self, key: str) -> str:
        return str(self._store.get(key), "utf-8")


def _not_by_all(first: str) -> PlanError:
    return PlanError(
        f"an exchange state is loaded on rank {first}, and not on all others; call load_exchange_state_dict on every "
        "rank at the same step, each with the states of all"
    )
