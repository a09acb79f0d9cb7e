"""Draws of clients; ``fedcore.sampling.reference`` defines each of them in Python and NumPy.

Every draw is a pure function of its arguments and (seed, round, purpose). Two functions never share random numbers,
even under one purpose. The draws are the same on every platform, ISA level and thread count: random numbers are made
by integer arithmetic (Threefry4x64-20), weights are added and compared by basic IEEE operations, and no logarithm or
exponential is taken.
"""

from fedcore.native import add_twins
from fedcore.sampling import reference
from fedcore.sampling.uniform import bernoulli, permutation, without_replacement
from fedcore.sampling.weighted import weighted_without_replacement, with_replacement

add_twins(reference)

__all__ = [
    "bernoulli",
    "permutation",
    "reference",
    "weighted_without_replacement",
    "with_replacement",
    "without_replacement",
]
