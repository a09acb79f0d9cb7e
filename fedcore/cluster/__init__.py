"""The server in shards, past one machine's memory and disks."""

from fedcore.cluster.placement import Here, Placement
from fedcore.cluster.ranges import Range
from fedcore.cluster.resharding import reshard
from fedcore.cluster.round import Round
from fedcore.cluster.server import Server
from fedcore.server.slices import Slices, digest_of

__all__ = ["Here", "Placement", "Range", "Round", "Server", "Slices", "digest_of", "reshard"]
