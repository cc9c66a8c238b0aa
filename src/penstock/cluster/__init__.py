"""A cluster on one machine: hosts that are network namespaces, links that are token buckets."""

from penstock.cluster.emulate import EmulatedCluster, emulated_cluster

__all__ = ["EmulatedCluster", "emulated_cluster"]
