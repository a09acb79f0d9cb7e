"""A subclass or wrapper of a strategy of fedcore does what it does with Flower's FedAvg, in Flower's own simulation."""

import csv

import numpy as np
import pytest

from tests.adapters.flower.overrides import KINDS, OURS, OVERRIDES, RECORD, outcome, simulation

pytest.importorskip("ray", reason="Flower's simulation needs Ray: pip install 'flwr[simulation]'")


@pytest.fixture(scope="module")
def simulate():
    """One simulation for all cases of a process."""
    with simulation() as ask:
        yield ask


def cases():
    """By day, each override with one strategy of a kind in turn, and all with FedAvg."""
    for place, override in enumerate(OVERRIDES):
        for strategy in OURS:
            by_day = strategy in (KINDS[0], KINDS[1 + place % (len(KINDS) - 1)])
            yield pytest.param(override, strategy, marks=[] if by_day else pytest.mark.endurance)


@pytest.mark.parametrize(("override", "strategy"), [*cases()])
def test_an_override_does_what_it_does_in_flower(simulate, override, strategy):
    theirs, ours = simulate(override, None), simulate(override, strategy)
    with RECORD.open() as file:
        [row] = [row for row in csv.DictReader(file) if row["override"] == override]
    assert outcome(theirs, ours) == row[strategy]
    if strategy == "FedAvg":
        np.testing.assert_allclose(ours["models"], theirs["models"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(ours["arrays"], theirs["arrays"], rtol=1e-6, atol=1e-6)
        assert ours["evaluate"] == pytest.approx(theirs["evaluate"])
