"""Local aggregation end to end, on emulated hosts with two ranks each: nobody says who shares a host."""

import json
import sys
import textwrap

import pytest

from penstock.cluster import emulated_cluster
from penstock.cluster.processes import Collected

pytestmark = [pytest.mark.root, pytest.mark.slow]
TRAIN = textwrap.dedent(
    """
    import json
    import torch
    import torch.distributed as dist
    from penstock.plan import Bucket, Plan
    from penstock.torch import DistributedDataParallel as DDP
    from penstock.planning.agree import nodes_of
    from penstock.torch.collective_errors import GroupRanks

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 200)
    buckets = (Bucket(("bias", "weight"), 4 * (300 * 200 + 200), "hierarchical", "onebit"),)
    wrapper = DDP(model, codec="onebit", plan=Plan("linear", 4, "hand", buckets))
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(20):
        loss = wrapper(torch.randn(16, 300, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    weights = model.weight.detach().clone()
    dist.broadcast(weights, 0)
    owed = wrapper.exchange_state_dict()["memories"]["residual"]
    print(json.dumps({
        "nodes": nodes_of(GroupRanks(dist.group.WORLD)),
        "alike": torch.equal(weights, model.weight.detach()),
        "owes": any(bool(each.any()) for each in owed.values()),
        "losses": [losses[0], losses[-1]],
    }))
    dist.destroy_process_group()
    """
)


def test_two_ranks_on_each_of_two_hosts_sum_inside_and_compress_between():
    seen = Collected()
    with emulated_cluster(hosts=2, rate="1gbit") as cluster:
        assert cluster.run([sys.executable, "-c", TRAIN], per_host=2, sink=seen).exit_code == 0
    ranks = [json.loads(seen.text(rank).strip().splitlines()[-1]) for rank in range(4)]
    assert all(rank["nodes"] == [[0, 1], [2, 3]] and rank["alike"] for rank in ranks)
    assert [rank["owes"] for rank in ranks] == [True, False, True, False]
    assert all(rank["losses"][1] < rank["losses"][0] for rank in ranks)
