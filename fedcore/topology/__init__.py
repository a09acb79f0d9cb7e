"""Topologies: who mixes with whom in a network without a server, and by which weights."""

from fedcore.topology.topology import NAMES, Topology

__all__ = ["NAMES", "Topology"]
