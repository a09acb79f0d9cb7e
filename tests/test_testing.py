"""``fedcore.testing`` lets every method of fedcore pass, and those of others, and finds what breaks a promise."""

from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest

from fedcore.algorithms import Algorithm, FedAvg, Linear, Step, Terms
from fedcore.errors import AlgorithmError
from fedcore.testing import check_algorithm
from tests.algorithms import outsiders
from tests.outsiders.house.mine.methods import FedACG
from tests.server.rounds import METHODS, made


@pytest.mark.parametrize("method", METHODS)
def test_fedcores_own_algorithms_keep_the_promises(method):
    check_algorithm(made(method).algorithm)


@pytest.mark.parametrize("method", [*outsiders.METHODS.values(), FedACG], ids=lambda method: method.__name__)
def test_so_do_those_of_others(method):
    check_algorithm(method())


class Counting(Algorithm):
    """Its steps get shorter with every call."""

    calls = count(1)

    def step(self, cohort):
        return Step(v=Linear(A=1 / (next(self.calls) * cohort.S)))


class ByFold(FedAvg):
    """Its weights are shares of whatever is folded at once."""

    def weigh(self, claims):
        return claims.examples / claims.examples.sum()


class Wrong(outsiders.WeighedMIFA):
    """Its T is weighed, and so no sum of rows."""

    total_sums_rows = True


class Lengthy(Algorithm):
    """Says that h is what its sum is made of, which is a half of it."""

    row = Terms(h=1)
    adds = Terms(row=1, r=-1)
    keeps_total = True

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.S), T=Linear(T=0.5, A=1))

    total_sums_rows = True


@dataclass(frozen=True)
class Deaf(FedAvg):
    """Cannot be pickled, since it holds a function of its own."""

    scale: object = lambda claims: claims.counts


class Loose(FedAvg):
    """Its step is none."""

    def step(self, cohort):
        return None


class Vain(FedAvg):
    """Takes any reply for one of a hundred examples."""

    def weigh(self, claims):
        return claims.examples * np.random.default_rng().uniform(1, 2, len(claims.examples))


@pytest.mark.parametrize(
    ("algorithm", "promise"),
    [
        (Counting(), "same replies"),
        (Vain(), "same replies"),
        (ByFold(), "one by one"),
        (Wrong(), r"\bT\b.*rows"),
        (Lengthy(), r"\bT\b.*rows"),
        (Deaf(), "pickled"),
        (Loose(), "Step"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_broken_promise_is_found(algorithm, promise):
    with pytest.raises(AlgorithmError, match=promise):
        check_algorithm(algorithm)
