"""Networked local SGD: each node trains a model and mixes it with its neighbours' models, without a server."""

from fedcore.sim.network.network import Network, NetworkReport, NetworkRound

__all__ = ["Network", "NetworkReport", "NetworkRound"]
