"""Engines, which do the clients' work: one engine, one file, each an ``Engine``."""

from fedcore.engines.engine import Engine, Evaluation, check_method
from fedcore.engines.inprocess import InProcess

__all__ = ["Engine", "Evaluation", "InProcess", "check_method"]
