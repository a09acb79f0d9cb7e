"""The server, its rounds, updates, broadcasts and reports."""

from fedcore.server.broadcast import Broadcast
from fedcore.server.compatibility import require_compatible
from fedcore.server.partial import PartialSum
from fedcore.server.report import Report, rejection_summary
from fedcore.server.round import OpenRound, Round, RoundLock, one_call
from fedcore.server.server import EdgeAggregator, Server
from fedcore.server.update import Reply, SentSlices, Update
from fedcore.server.validation import ModelReader, OwnModel

__all__ = ["Broadcast", "EdgeAggregator", "ModelReader", "OpenRound", "OwnModel", "PartialSum", "Reply", "Report"]
__all__ += ["Round", "RoundLock", "SentSlices", "Server", "Update", "one_call", "rejection_summary"]
__all__ += ["require_compatible"]
