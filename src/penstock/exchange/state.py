"""The state of an exchange as checkpoints hold it: checked, agreed on by all ranks, dealt out to any number of them.

Values have their parameter's shape and are in logical order: whatever the memory format was when they were saved, each
belongs to the same element of the parameter when they are loaded. They are of the framework's kind (`Arrays.saved`).
"""

import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import FormatError
from penstock.exchange.arrays import Arrays, Floats
from penstock.exchange.factors import could_be_of

FORMAT = "penstock-exchange/2"
MEMORY_ORDER = "penstock-exchange/1"  # flat values in memory order, which nothing says
OWED = ("residual", "velocity")  # each rank's own
FACTOR = "factor"  # of a low-rank exchange, the same on all ranks; in logical order as `factors.py` says
KINDS = (*OWED, FACTOR)
State = dict[str, Any]  # plain values and arrays; with torch, CPU tensors: what torch.save takes
Shapes = Mapping[str, tuple[int, ...]]  # of parameters, by name
_WHERE = "exchange state"
_LARGEST = 2**63 - 1  # of what is counted


def state_for(states: Sequence[State], rank: int, world_size: int) -> State:
    """Return what `rank` of `world_size` starts from, given the checked states of all ranks that there were.

    With as many ranks as before, each gets its own back. Otherwise old rank r's belongs to new rank r mod world_size:
    new ranks start with nothing owed, and where ranks are gone the others owe what those did. Residuals are in the
    units of what is applied, so the sum over ranks is the same before and after, up to float32 rounding. Factors are
    the same on all ranks, and stay so.
    """
    mine, inherited = states[rank % len(states)], states[rank::world_size]
    memories = {kind: _sum([state["memories"].get(kind, {}) for state in inherited]) for kind in OWED}
    memories[FACTOR] = mine["memories"].get(FACTOR, {})
    return {**mine, "rank": rank, "world_size": world_size, "memories": memories}


def check_states(states: Sequence[Mapping[str, Any]], shapes: Shapes, arrays: Arrays) -> list[State]:
    """Return the states by rank, under the model's names and as numpy arrays.

    Refuse what is no whole run's, or another model's.

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
    return [{**state, "memories": _of_model(state["memories"], known, shapes, arrays)} for state in ordered]


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
        if not isinstance(state.get(name), int) or not least <= state[name] <= _LARGEST:
            raise FormatError(_WHERE, name, state.get(name), f"a whole number >= {least}, of 64 bits")
    scale = state.get("scale")
    if not isinstance(scale, int | float) or not 0 < scale <= sys.float_info.max:  # a whole number may be larger
        raise FormatError(_WHERE, "scale", scale, "a finite number > 0")
    memories = state.get("memories")
    if not isinstance(memories, Mapping) or not all(map(_has_names, memories.values())):
        raise FormatError(_WHERE, "memories", memories, "tensors by kind and name of the parameter")
    if unknown := sorted(map(str, set(memories) - set(KINDS))):
        raise FormatError(_WHERE, "memories", unknown[0], f"one of {', '.join(KINDS)}")
    return dict(state)


def _has_names(values: Any) -> bool:
    return isinstance(values, Mapping) and all(isinstance(name, str) for name in values)


def _of_model(
    memories: Mapping[str, Mapping[str, Any]], known: Mapping[str, str], shapes: Shapes, arrays: Arrays
) -> State:
    """Return memories under the model's names; refuse unknown names, and values that do not fit."""
    placed: State = {kind: {} for kind in memories}
    for kind, values in memories.items():
        for name, value in values.items():
            if known and _plain(name) not in known:
                wanted = f"a parameter of the model, such as {next(iter(known.values()))!r}"
                raise FormatError(_WHERE, "memories", name, wanted)
            own = known.get(_plain(name), name)
            placed[kind][own] = _checked_value(kind, name, value, shapes.get(own), arrays)
    return placed


def _checked_value(kind: str, name: str, value: Any, shape: tuple[int, ...] | None, arrays: Arrays) -> Floats:
    """Return a value as a numpy array; refuse another kind or shape, and what is not finite."""
    what = f"{kind} of {name!r}"
    if (found := arrays.loaded(value)) is None:
        described = f"{tuple(value.shape)} of {value.dtype}" if hasattr(value, "dtype") else value
        raise FormatError(_WHERE, what, described, arrays.saved_kind)
    if kind == FACTOR and shape is not None and not could_be_of(found, shape):
        raise FormatError(_WHERE, what, found.shape, f"{shape}, 1 for some of these, and the rank: of this model")
    if kind != FACTOR and shape is not None and found.shape != shape:
        raise FormatError(_WHERE, what, found.shape, f"{shape}, as the parameter is: the state of this model")
    if not np.isfinite(found).all():
        raise FormatError(_WHERE, what, "NaN or infinity", "finite values")
    return found


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _sum(parts: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    total: dict[str, Floats] = {}
    for part in parts:
        for name, values in part.items():
            total[name] = total[name] + values if name in total else values.copy()
    return total


def checksum(states: Sequence[State]) -> str:
    """Return what tells checked states apart: all fields, and a checksum of each array in logical order."""
    fields: list[Any] = []
    for state in states:
        fields.append([state["rank"], state["iterations"], state["scale"]])
        for kind, values in state["memories"].items():
            for name, value in sorted(values.items()):
                fields.append([kind, name, value.shape, zlib.crc32(value.tobytes())])
    return f"{zlib.crc32(json.dumps(fields).encode()):08x}"
