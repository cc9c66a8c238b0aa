"""FSDP2 whose replicas are averaged by our programs: sharded inside hosts, compressed between them.

`sharding.py` is what a training script sees. `replicas.py` takes gradients from torch and gives averages back, through
`groups.py`, which knows how torch lays them out; `replica_planning.py` decides how they travel, `sharded_state.py` puts
what is owed into checkpoints.
"""

from penstock.torch.fsdp.sharding import ShardedModule, fully_shard_with

__all__ = ["ShardedModule", "fully_shard_with"]
