"""Plan a 512-GPU job on a laptop: no GPU, no network, no torch.

Which of two clusters suits ResNet-50 better, and how should its gradients be merged there?
"""

from penstock.cost.clusters import CLUSTERS
from penstock.cost.ways import way_for
from penstock.planners import PLANNERS
from penstock.simulator.iteration import predict
from penstock.traces import load_shipped

trace = load_shipped("resnet50")
print(f"{trace.label}: {1e3 * trace.compute_seconds:.1f} ms of computation per iteration")

for name in ("mg-wfbp-v100-10gbe", "mg-wfbp-v100-56gbib"):
    ways = [way_for(CLUSTERS[name], strategy, workers=512) for strategy in ("ring", "halving_doubling")]
    for planner in ("threshold", "exact"):
        plan = predict(trace, PLANNERS[planner], ways, workers=512)
        sent = ", ".join(f"{bucket.nbytes / 2**20:.1f} MiB by {bucket.strategy}" for bucket in plan.buckets)
        print(f"{name}, {planner}: {1e3 * plan.iteration_seconds:.1f} ms; sends {sent}")
