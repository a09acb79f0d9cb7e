"""Where client work is done: one engine, one file."""

from fedcore.engines.inprocess import Evaluation, InProcess, check_method

__all__ = ["Evaluation", "InProcess", "check_method"]
