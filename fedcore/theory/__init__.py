"""Bounds of the papers' theorems, as functions of their constants."""

from fedcore.theory import departure, local_sgd, momentum

__all__ = ["departure", "local_sgd", "momentum"]
