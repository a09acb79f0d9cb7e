"""Assignments as the tests of local work have them."""

from fedcore.algorithms import MEAN_GRADIENT
from fedcore.server.instructions import Instructions


def asked(lr=0.1, *, second=False, **fields):
    """An assignment of a round 0; ``lr`` may be the rate of each step."""
    rates = {"lr": lr(0), "lr_of_step": lr} if callable(lr) else {"lr": lr}
    return Instructions(round=0, second_vector=MEAN_GRADIENT if second else None, **rates, **fields)
