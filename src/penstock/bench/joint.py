"""Is `joint` at least as fast as the best of twenty hand-made configurations? Simulated, on published clusters.

Codec curves are measured on this machine first and kept in the record; the traces' computation is an H200's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.bench.configurations import hand_made, joint
from penstock.cost.clusters import CLUSTERS
from penstock.curves import CodecCurves
from penstock.traces import find_trace

NETWORKS = ("gtop-k-1gbe", "mg-wfbp-v100-10gbe", "hipress-100gbps")
DENSE = "ring"


def joint_rows(
    traces: Sequence[str], curves: Mapping[str, CodecCurves], networks: Sequence[str] = NETWORKS
) -> Iterator[dict[str, Any]]:
    """Yield a row for every network and trace: the best hand-made configuration, and `joint`."""
    codecs = list(curves)
    for name in networks:
        network = replace(CLUSTERS[name], codecs=curves)
        for model in traces:
            trace = find_trace(model)
            made = {each.name: each.plan(trace, network).iteration_seconds for each in hand_made(DENSE, codecs)}
            ours = joint(DENSE, codecs).plan(trace, network)
            best = min(made, key=lambda each: made[each])
            dense = min(seconds for each, seconds in made.items() if each.endswith(f", {DENSE}"))
            routes = dict.fromkeys(str(bucket.route) for bucket in ours.buckets)
            yield {
                "network": name,
                "workers": network.workers,
                "trace": model,
                "compute_seconds": trace.compute_seconds,
                "best_dense_seconds": dense,
                "best_hand_made": best,
                "best_hand_made_seconds": made[best],
                "joint_seconds": ours.iteration_seconds,
                "joint_messages": len(ours.buckets),
                "joint_routes": ", ".join(routes),
                "joint_over_best": ours.iteration_seconds / made[best],
            }
