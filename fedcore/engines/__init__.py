"""Where client work is done: one engine, one file."""

from fedcore.engines.inprocess import Evaluation, InProcess

__all__ = ["Evaluation", "InProcess"]
