"""Exact laws of draws from few clients, by enumeration, and a test of counts against a law."""

from itertools import permutations

import numpy as np


def successive(weights, k):
    """The probability of every sequence of k successive draws, without those of zero weight."""
    law = {}
    for order in permutations(np.flatnonzero(weights).tolist(), k):
        probability, left = 1.0, list(np.flatnonzero(weights))
        for i in order:
            probability *= weights[i] / sum(weights[j] for j in left)
            left.remove(i)
        law[order] = probability
    return law


def assert_law(draws, law):
    """Assert that draws have a law: no other outcomes, and chi-square within 4.5 deviations of its mean.

    Outcomes are expected at least five times each, so that chi-square is near normal in their number.
    """
    assert abs(sum(law.values()) - 1) < 1e-12
    counts = dict.fromkeys(law, 0)
    for draw in draws:
        counts[tuple(draw)] += 1  # a KeyError is an outcome that cannot come
    due = np.array([law[outcome] * len(draws) for outcome in law])
    assert due.min() >= 5, f"too few draws: {due.min()} expected"
    square = (((np.array(list(counts.values())) - due) ** 2) / due).sum()
    freedom = len(law) - 1
    # Wilson and Hilferty: the cube root of chi-square over its freedom is nearly normal.
    z = ((square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom)) if freedom else 0
    assert abs(z) < 4.5, f"chi-square {square:.1f} at {freedom} degrees of freedom"
