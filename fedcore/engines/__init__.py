"""Engines, which do the clients' work: one engine, one file or folder, each an ``Engine``."""

from fedcore.engines.engine import Engine, Evaluation, check_method
from fedcore.engines.inprocess import InProcess
from fedcore.engines.keeping import KeepingClients
from fedcore.engines.ray.engine import Ray
from fedcore.engines.recovering import RecoveringClients

__all__ = ["Engine", "Evaluation", "InProcess", "KeepingClients", "Ray", "RecoveringClients", "check_method"]
