"""A `Network`: how long messages take between workers, as numbers that can be measured and written down.

The model is alpha-beta-gamma: a message of M bytes takes `alpha + beta M` seconds between two workers, and summing
M received bytes into M local ones takes `gamma M`. A whole collective of a given algorithm is then a line
`a + b M` (MG-WFBP Eq. 10), which can also be measured directly. Where compressors were measured on the same machines,
their curves are kept here too. Ranks of one machine share its cores: what was measured while all of them computed has
their waiting for one another in it, and a simulation that lets them share the cores must count that once.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.curves import CodecCurves, codec_curves_document, codec_curves_from_fields
from penstock.errors import NetworkError
from penstock.fields import Fields, read_json, write_json

FORMAT = "penstock-network/1"
_FIELDS = (
    "format", "name", "workers", "alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte",
    "all_reduce", "codecs", "source", "cores", "ranks_per_machine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds as a line in bytes: `a + b M` (MG-WFBP Eq. 10)."""

    a_seconds: float  # startup: paid once per message, however small
    b_seconds_per_byte: float
    c_seconds_per_tensor: float | None = None  # each tensor of a compressed bucket after the first; None: not measured
    least_seconds: float | None = None  # of a message of `least_nbytes`, as measured; None: not measured
    least_core_seconds: float | None = None  # what one rank's process takes of the cores for that message
    core_seconds_per_byte: float | None = None  # and for each byte of longer ones
    rounds: float | None = None  # of messages queued on a device: later ones go with the first of the next buckets

    def __post_init__(self) -> None:
        for name in _LINE:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise NetworkError(f"{name} is {value}; wanted a finite number >= 0")

    def seconds(self, nbytes: float) -> float:
        """Return the time one message of `nbytes` takes, if it holds one tensor."""
        return self.a_seconds + self.b_seconds_per_byte * nbytes

    def __add__(self, other: "LinearCost") -> "LinearCost":
        """Return the cost of doing both, one after the other."""
        return LinearCost(
            self.a_seconds + other.a_seconds,
            self.b_seconds_per_byte + other.b_seconds_per_byte,
            _sum(self.c_seconds_per_tensor, other.c_seconds_per_tensor),
        )


def least_nbytes(workers: int) -> int:
    """Return the bytes of the shortest message that is measured: each rank can have a part of its own of it."""
    return workers << 12


_MEASURED = ("c_seconds_per_tensor", "least_seconds", "least_core_seconds", "core_seconds_per_byte", "rounds")
_LINE = ("a_seconds", "b_seconds_per_byte", *_MEASURED)


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None and other is None else (one or 0.0) + (other or 0.0)


@dataclass(frozen=True, slots=True)
class Network:
    """The links between `workers` equal workers."""

    workers: int  # world size at which it was measured; `all_reduce` holds for this size only
    alpha_seconds: float  # startup of one point-to-point message
    beta_seconds_per_byte: float  # 1 / bandwidth of one NIC in one direction
    gamma_seconds_per_byte: float  # summing one received byte into a local one
    all_reduce: Mapping[str, LinearCost] = field(default_factory=dict)  # measured, by route: "ring", "ring+onebit"
    codecs: Mapping[str, CodecCurves] = field(default_factory=dict)  # measured on these workers, by codec
    name: str = "network"
    source: str = ""  # where the numbers come from, in words
    cores: int = 0  # that ranks of one machine share; 0: not known, as if each rank had enough of its own
    ranks_per_machine: int = 1  # so many ranks in a row are on one machine

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise NetworkError(f"network {self.name!r}: workers is {self.workers}; wanted >= 1")
        if self.cores < 0 or self.ranks_per_machine < 1:
            found = f"{self.cores} cores for {self.ranks_per_machine} ranks of a machine"
            raise NetworkError(f"network {self.name!r}: {found}; wanted >= 0 and >= 1")
        for name in ("alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise NetworkError(f"network {self.name!r}: {name} is {value}; wanted a finite number >= 0")

    @property
    def link(self) -> LinearCost:
        """The cost of one point-to-point message."""
        return LinearCost(self.alpha_seconds, self.beta_seconds_per_byte)

    @property
    def ranks_per_core(self) -> float:
        """How many times longer a computation takes while all ranks compute than by itself."""
        return max(1.0, self.ranks_per_machine / self.cores) if self.cores else 1.0


def load_network(path: str | os.PathLike[str]) -> Network:
    """Read a network from a `penstock-network/1` JSON file."""
    return read_json(path, FORMAT, network_from_fields)


def network_from_fields(fields: Fields) -> Network:
    """Build a network from the fields of a `penstock-network/1` document."""
    fields.reject_unknown(_FIELDS)
    lines = {}
    for name, line in fields.mapping("all_reduce", {}):
        line.reject_unknown(_LINE)
        optional = [line.optional_amount(each) for each in _MEASURED]
        lines[name] = LinearCost(line.amount("a_seconds"), line.amount("b_seconds_per_byte"), *optional)
    return Network(
        workers=fields.integer("workers", 1),
        alpha_seconds=fields.amount("alpha_seconds"),
        beta_seconds_per_byte=fields.amount("beta_seconds_per_byte"),
        gamma_seconds_per_byte=fields.amount("gamma_seconds_per_byte"),
        all_reduce=lines,
        codecs={name: codec_curves_from_fields(curves) for name, curves in fields.mapping("codecs", {})},
        name=fields.text("name", "network"),
        source=fields.text("source", ""),
        cores=fields.integer("cores", 0, 0),
        ranks_per_machine=fields.integer("ranks_per_machine", 1, 1),
    )


def network_document(network: Network) -> dict[str, Any]:
    """Return the network as a `penstock-network/1` document."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "name": network.name,
        "workers": network.workers,
        "alpha_seconds": network.alpha_seconds,
        "beta_seconds_per_byte": network.beta_seconds_per_byte,
        "gamma_seconds_per_byte": network.gamma_seconds_per_byte,
    }
    if network.cores:
        document |= {"cores": network.cores, "ranks_per_machine": network.ranks_per_machine}
    if network.all_reduce:
        document["all_reduce"] = {name: _line_document(line) for name, line in network.all_reduce.items()}
    if network.codecs:
        document["codecs"] = {name: codec_curves_document(curves) for name, curves in network.codecs.items()}
    return {**document, "source": network.source} if network.source else document


def _line_document(line: LinearCost) -> dict[str, float]:
    return {name: value for name in _LINE if (value := getattr(line, name)) is not None}


def save_network(network: Network, path: str | os.PathLike[str]) -> None:
    """Write the network to `path` as JSON."""
    write_json(path, network_document(network))
