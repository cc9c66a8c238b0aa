"""One rank of `penstock bench casync`: the network with all routes that are used, then replayed configurations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.bench.configurations import Configuration, hand_made, joint, steps
from penstock.bench.serve import serve
from penstock.cluster.replay_study import replay_plans
from penstock.cost.ways import comparable
from penstock.plan import parse_route
from penstock.runtime.communicator import Communicator
from penstock.runtime.measure_network import NATIVE, measure_network
from penstock.runtime.transport import Transport
from penstock.simulator.robust import predict_robust
from penstock.traces import find_trace

WAIT_SECONDS = 120.0
_SECONDS_PER_ROUTE = 3.0  # of measuring; more hosts on the same cores take longer


@dataclass(frozen=True, slots=True)
class CasyncJob:
    """What the ranks are asked to replay."""

    trace: str
    strategy: str  # of compressed buckets, in the steps
    codecs: tuple[str, ...]  # the first one in the steps
    iterations: int  # of each configuration, after one to warm up
    study: str = "steps"  # or "joint": beside the hand-made configurations whose names are in `only`
    only: int = 4  # how many of the best-predicted hand-made configurations are replayed too

    def configurations(self, hosts: int) -> list[Configuration]:
        """Return all that may be replayed."""
        if self.study == "steps":
            return steps(self.strategy, self.codecs[0], hosts)
        return [*hand_made(NATIVE, self.codecs), joint(NATIVE, self.codecs)]


def measure_job(transport: Transport, job: CasyncJob, done: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield a row for every replayed configuration; every rank must call this with the same job."""
    hosts, trace = transport.world_size, find_trace(job.trace)
    found = job.configurations(hosts)
    routes = list(dict.fromkeys(route for each in found for route in each.routes))
    codecs = list(dict.fromkeys(codec for route in routes if (codec := parse_route(route).codec)))
    seconds = _SECONDS_PER_ROUTE * len(routes) * max(1.0, hosts / 4)
    network = measure_network(
        transport, seconds=seconds, strategies=routes, codecs=codecs, whole_nbytes=sum(trace.nbytes)
    ).network
    plans = {each.name: each.plan(trace, network) for each in found}
    if job.study == "joint":
        chosen = found[-1]
        plans["joint"] = predict_robust(trace, chosen.planner, comparable(chosen.ways(network)), hosts)
        quickest = sorted(plans, key=lambda name: plans[name].iteration_seconds)
        kept = {"joint", *[name for name in quickest if name != "joint"][: job.only]}
        plans = {name: plan for name, plan in plans.items() if name in kept}
    communicator = Communicator(transport, timeout_seconds=WAIT_SECONDS)
    rows, _ = replay_plans(trace, plans, network, communicator, job.iterations, lambda: done(job.trace))
    for name, row in zip(plans, rows, strict=True):
        packed = sum(bucket.nbytes for bucket in plans[name].buckets if bucket.codec is not None)
        document = row.document()
        document.pop("planner")
        share = packed / max(1, sum(trace.nbytes))
        used = ", ".join(dict.fromkeys(str(bucket.route) for bucket in plans[name].buckets))
        yield {"what": job.trace, "how": name, "routes": used, "compressed_share": share, **document}


if __name__ == "__main__":
    serve(lambda document: CasyncJob(**document | {"codecs": tuple(document["codecs"])}), measure_job)
