"""The state of an exchange as a checkpoint holds it, and how it is dealt out when the number of workers changes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import FormatError
from penstock.torch.residuals import Floats

FORMAT = "penstock-exchange/1"
State = dict[str, Any]  # plain values and CPU tensors: what torch.save and torch.distributed.checkpoint take


def state_for(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> State:
    """Return what `rank` of `world_size` starts from, given the states of all ranks that there were.

    With as many ranks as before, each gets its own back. Otherwise old rank r's belongs to new rank r mod world_size:
    new ranks start with nothing owed, and where ranks are gone the others owe what those did. Residuals are in the
    units of what is applied, so the sum over ranks is the same before and after, up to float32 rounding.
    """
    ordered = _in_order(states)
    mine = ordered[rank % len(ordered)]
    inherited = ordered[rank::world_size]
    memories = {name: _sum([state["memories"].get(name, {}) for state in inherited]) for name in mine["memories"]}
    return {**mine, "rank": rank, "world_size": world_size, "memories": memories}


def with_names(states: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[State]:
    """Return the states with a model's names, with or without the prefix that torch.compile adds; refuse other names.

    What is owed to a parameter that nobody knows would be kept for ever and never be sent.
    """
    known = {_plain(name): name for name in names}
    for state in _in_order(states):
        for name in (name for memory in state["memories"].values() for name in memory):
            if _plain(name) not in known:
                wanted = f"a parameter of the model, such as {names[0]!r}"
                raise FormatError("exchange state", "memories", name, wanted)
    return [{**state, "memories": _renamed(state["memories"], known)} for state in states]


def _renamed(memories: Mapping[str, Mapping[str, Any]], known: Mapping[str, str]) -> State:
    return {kind: {known[_plain(name)]: kept for name, kept in each.items()} for kind, each in memories.items()}


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _in_order(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the states by rank; raise unless each rank of one run is there once."""
    for state in states:
        if state.get("format") != FORMAT:
            raise FormatError("exchange state", "format", state.get("format"), FORMAT)
    found = sorted((state["rank"], state["world_size"]) for state in states)
    if found != [(rank, len(states)) for rank in range(len(states))] or not states:
        what = ", ".join(f"rank {rank} of {size}" for rank, size in found) or "none"
        raise FormatError("exchange state", "states", what, "the state of every rank of one run, each once")
    return sorted(states, key=lambda state: int(state["rank"]))


def _sum(parts: Sequence[Mapping[str, Any]]) -> dict[str, Floats]:
    total: dict[str, Floats] = {}
    for part in parts:
        for name, values in part.items():
            flat = np.asarray(values, np.float32).reshape(-1)
            total[name] = total[name] + flat if name in total else flat.copy()
    return total
