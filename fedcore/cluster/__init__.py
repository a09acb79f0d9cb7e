"""Servers in shards, larger than the memory or disk of one machine: ``Compute(shards=..., executor=...)``."""

from fedcore.cluster.manifest import Range
from fedcore.cluster.on_ray import OnRay
from fedcore.cluster.placement import LocalThreads, Placement
from fedcore.cluster.resharding import reshard
from fedcore.server.update import Slices, digest_of

__all__ = ["LocalThreads", "OnRay", "Placement", "Range", "Slices", "digest_of", "reshard"]
