"""Configurations to compare: a planner, and the routes it may use.

`hand_made` are twenty that a person would try: five ways to cut buckets (each tensor, one message, stock DDP's 25 MiB,
and 5 and 100 MiB), each with four routes for all of them.
`steps` are those of HiPress's Fig. 11: what each of its ideas adds to stock DDP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from penstock.cost.ways import Way, comparable, way_for
from penstock.network import Network
from penstock.plan import Plan
from penstock.planners import PLANNERS, Planner
from penstock.planners.rules import plan_threshold
from penstock.program.composition import LANES
from penstock.runtime.measure_network import NATIVE
from penstock.simulator.iteration import predict
from penstock.trace import Trace

_MIB = 1 << 20


def _threshold(mib: int) -> Planner:
    return Planner(f"{mib} MiB", partial(plan_threshold, next_nbytes=mib * _MIB), True, f"buckets of {mib} MiB")


CUTS = (PLANNERS["wfbp"], PLANNERS["single"], PLANNERS["threshold"], _threshold(5), _threshold(100))


@dataclass(frozen=True, slots=True)
class Configuration:
    """What to plan with."""

    name: str
    planner: Planner
    routes: tuple[str, ...]
    lanes: int = LANES  # buckets under way at a time
    bulk: bool = False  # small ones travel together, as the plan says

    def plan(self, trace: Trace, network: Network, workers: int | None = None) -> Plan:
        """Return its plan for a trace, predicted on a network."""
        ways = comparable(self.ways(network, workers))
        return predict(trace, self.planner, ways, network.workers if workers is None else workers)

    def ways(self, network: Network, workers: int | None = None) -> list[Way]:
        """Return its routes with what they cost on a network."""
        return [way_for(network, route, workers) for route in self.routes]


def hand_made(dense: str, codecs: Sequence[str]) -> list[Configuration]:
    """Return every cut with every route: dense, each codec in a ring, and the first through parameter servers."""
    routes = [dense, *(f"ring+{codec}" for codec in codecs), f"parameter_server+{codecs[0]}"]
    return [Configuration(f"{cut.name}, {route}", cut, (route,)) for cut in CUTS for route in routes]


def joint(dense: str, codecs: Sequence[str]) -> Configuration:
    """Return the choice among all of these routes at once."""
    every = [route for made in hand_made(dense, codecs) for route in made.routes]
    return Configuration("joint", PLANNERS["joint"], tuple(dict.fromkeys(every)))


def steps(strategy: str, codec: str, hosts: int) -> list[Configuration]:
    """Return the steps of Fig. 11, each with what the one before has.

    Stock: DDP's buckets by the engine's own all-reduce, which is a ring. Codec: each tensor is compressed, one after
    the other, and a rank computes nothing while it sends. Pipelining: it does, inside of a large tensor, which is cut
    into blocks, and across tensors, in lanes. Bulk: tensors in a row travel as one message where that pays. Selective:
    what is compressed, how and in how many pieces, and what travels together, are chosen at once.
    """
    packed = f"{strategy}+{codec}"
    pieces = (packed, f"{packed}/{hosts}", f"{packed}/{4 * hosts}")
    others = (f"ring+{codec}", f"parameter_server+{codec}", f"all_gather+{codec}")
    serial = f"{strategy}(serial=true)+{codec}"
    return [
        Configuration("stock", PLANNERS["threshold"], (NATIVE,)),
        Configuration("+ codec", PLANNERS["wfbp"], (serial,), lanes=1),
        Configuration("+ pipelining", PLANNERS["wfbp"], (packed,)),
        Configuration("+ bulk", PLANNERS["wfbp"], (packed,), bulk=True),
        Configuration("+ selective", PLANNERS["joint"], tuple(dict.fromkeys((NATIVE, *pieces, *others)))),
    ]
