"""The server, its rounds, and what goes in and comes out."""

from fedcore.server.broadcast import Broadcast
from fedcore.server.edge import Edge
from fedcore.server.partial import Partial
from fedcore.server.report import RoundReport, refusal_summary
from fedcore.server.round import Round
from fedcore.server.server import Server
from fedcore.server.update import Update

__all__ = ["Broadcast", "Edge", "Partial", "Round", "RoundReport", "Server", "Update", "refusal_summary"]
