"""``fedcore.testing`` accepts every correct method, and finds methods that break a rule."""

from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest

from fedcore.algorithms import Algorithm, FedAvg, Linear, Step, Terms
from fedcore.algorithms.optimizers import SGD, Adagrad, Adam, Nesterov, Yogi
from fedcore.errors import AlgorithmError
from fedcore.testing import check_algorithm, check_optimizer
from tests.algorithms import outsiders
from tests.outsiders.house.mine.methods import Accelerated
from tests.server.rounds import METHODS, made


@pytest.mark.parametrize(
    "method",
    [*METHODS, *outsiders.METHODS.values(), Accelerated],
    ids=lambda method: getattr(method, "__name__", method),
)
def test_correct_algorithms_pass(method):
    check_algorithm(made(method).algorithm if isinstance(method, str) else method())


@pytest.mark.parametrize("other", [FedAvg, "FedAvg", None])
def test_other_objects_are_no_algorithms(other):
    with pytest.raises(AlgorithmError, match=r"^algorithm="):
        check_algorithm(other)


class Counting(Algorithm):
    """Its steps get shorter with every call."""

    calls = count(1)

    def step(self, cohort):
        return Step(v=Linear(A=1 / (next(self.calls) * cohort.S)))


class ByFold(FedAvg):
    """Its weights depend on the updates that are folded in one pass."""

    def weigh(self, claims):
        return claims.examples / claims.examples.sum()


class Weighted(outsiders.WeighedMIFA):
    """Its T is a weighted sum of rows."""

    total_sums_rows = True


class Halving(Algorithm):
    """Its T loses half of the earlier rows."""

    row = Terms(h=1)
    adds = Terms(row=1, r=-1)
    keeps_total = True

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.S), T=Linear(T=0.5, A=1))

    total_sums_rows = True


@dataclass(frozen=True)
class Unpicklable(FedAvg):
    """Cannot be pickled, since it has a lambda."""

    scale: object = lambda claims: claims.counts


class Stepless(FedAvg):
    """Its step returns nothing."""

    def step(self, cohort):
        return None


class Restless(FedAvg):
    """It steps in every round, and divides by the weights of those that have updates."""

    steps_without_clients = True

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.W if cohort.S else 0))


class Random(FedAvg):
    """Its weights are random."""

    def weigh(self, claims):
        return claims.examples * np.random.default_rng().uniform(1, 2, len(claims.examples))


@pytest.mark.parametrize(
    ("algorithm", "rule"),
    [
        (Counting(), "same updates"),
        (Random(), "same updates"),
        (ByFold(), "one by one"),
        (Weighted(), r"\bT\b.*rows"),
        (Halving(), r"\bT\b.*rows"),
        (Unpicklable(), "pickled"),
        (Stepless(), "Step"),
        (Restless(), "ZeroDivisionError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_broken_rule_is_found(algorithm, rule):
    with pytest.raises(AlgorithmError, match=rule):
        check_algorithm(algorithm)


class Forgetful(SGD):
    """It does not write its moment."""

    def turn(self, v, moments, x, *, gamma, moments_out, x_out):
        x_out[:] = x - np.float32(gamma) * v


class Remembering(SGD):
    """Its steps depend on the number of calls."""

    calls = count(1)

    def turn(self, v, moments, x, *, gamma, moments_out, x_out):
        super().turn(v, moments, x, gamma=gamma / next(self.calls), moments_out=moments_out, x_out=x_out)


class Scaled(SGD):
    """It divides by the norm of the whole, and says that it works by element."""

    def turn(self, v, moments, x, *, gamma, moments_out, x_out):
        unit = v / np.float32(np.linalg.norm(v) + 1)
        super().turn(unit, moments, x, gamma=gamma, moments_out=moments_out, x_out=x_out)


class Overwriting(SGD):
    """It changes its input."""

    def turn(self, v, moments, x, *, gamma, moments_out, x_out):
        v *= 2


@pytest.mark.parametrize("optimizer", [SGD(), Nesterov(), Adagrad(), Adam(corrected_from=1), Yogi()])
def test_correct_optimizers_pass(optimizer):
    check_optimizer(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        (SGD, "optimizer="),
        (Forgetful(), "written"),
        (Remembering(), "same bits"),
        (Scaled(), "parts"),
        (Overwriting(), "read-only"),
    ],
)
def test_a_broken_rule_of_an_optimizer_is_found(optimizer, rule):
    with pytest.raises(AlgorithmError, match=rule):
        check_optimizer(optimizer)
