"""What an exchange remembers of torch's parameters, saved with checkpoints and loaded by all ranks together."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import PenstockError, PlanError
from penstock.exchange.compression import Scheme
from penstock.exchange.parameter_state import Memory, Scaler
from penstock.exchange.residuals import Layout
from penstock.exchange.state import State, checksum
from penstock.runtime.transport.c10d import C10dTransport
from penstock.runtime.transport.meeting import MARGIN_SECONDS, within
from penstock.torch.arrays import TORCH, layout_of
from penstock.torch.collective_errors import together
from penstock.torch.engines import message_seconds

_LOOK_SECONDS = 0.01  # between looks for the others
_TOLD = 3  # backward passes of which others are told, from the beginning and from each load on


class TorchMemory(Memory):
    """The memory of an exchange whose gradients are torch tensors, and how parameters lay when buckets were made."""

    def __init__(
        self, compression: Scheme | None = None, on_nonfinite: str = "raise", scaler: Scaler | None = None
    ) -> None:
        super().__init__(compression, on_nonfinite, scaler, TORCH)
        self._parameters: dict[str, tuple[torch.Tensor, tuple[int, ...], Layout]] = {}  # by name, with their strides

    def know_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take note that buckets are made of these parameters, as they lie in memory now; what is owed follows."""
        found = {name: (each, each.stride(), layout_of(each)) for name, each in parameters.items()}
        self.know({name: layout for name, (_, _, layout) in found.items()})
        self._parameters |= found

    def check_parameters(self) -> None:
        """Refuse parameters that lie in memory otherwise than when buckets were made: torch may or may not follow."""
        for name, (parameter, before, layout) in self._parameters.items():
            if parameter.stride() != before and layout_of(parameter) != layout:
                raise PlanError(
                    f"parameter {name!r} has strides {parameter.stride()}, and had {before} when it was "
                    "wrapped; change the memory format of a model before it is wrapped, or wrap it anew and load its "
                    "exchange state"
                )

    def change_group(self, group: dist.ProcessGroup) -> None:
        """Go on with other ranks: it is they who load a state together."""
        if isinstance(self.loads, Loads):
            self.loads = Loads(group, self.loads.token, self.loads.by_exchange)


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

    @property
    def _seconds(self) -> float:
        """How long the store may take to answer, and other ranks to load."""
        group = self._group or dist.group.WORLD
        assert group is not None
        return message_seconds(group)

    def went_on(self) -> None:
        """Count a backward pass, which all ranks begin alike; raise where another rank waits for this one to load."""
        self._passes, self._since = self._passes + 1, self._since + 1
        if self._world_size > 1 and self._since <= _TOLD:
            with together("telling of a backward pass", self._group):
                first = within(self._seconds, self._tell_of_pass)
            if first is not None:
                raise _not_by_all(first)

    def _tell_of_pass(self) -> str | None:
        """Say how many backward passes have begun; return which rank waits for all others to load, if one does."""
        self._store.set(self._key("passes", self._rank), str(self._passes))
        first = self._key(self._count + 1, "first")
        return self._text(first) if self._store.check([first]) else None

    def agree(self, states: Sequence[State], complaint: PenstockError | None) -> None:
        """Raise the same on every rank unless all of them load the same states, and find nothing wrong with them."""
        if self._world_size > 1:
            self._count += 1
            mine = json.dumps(["", checksum(states)] if complaint is None else [str(complaint), ""])
            with together("loading an exchange state", self._group):
                held = within(self._seconds + MARGIN_SECONDS, partial(self._told, mine))
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
        deadline = monotonic() + self._seconds
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
