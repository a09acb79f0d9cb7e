"""Methods, directions, steps, claims and cohorts are immutable values."""

from dataclasses import FrozenInstanceError, fields

import pytest

from fedcore.algorithms import REGISTRY, Claims, Cohort, named
from fedcore.algorithms.base import Direction, Linear, Step

COHORT = dict(S=1, weighed=1, N=2, devices=2, W=1.0, rows=0)
VALUES = [Direction, lambda: Step(v=Linear()), Claims, lambda: Cohort(**COHORT)]
METHODS = {name: lambda name=name: named(name) for name in sorted(REGISTRY.own)}


@pytest.mark.parametrize("make", [*VALUES, *METHODS.values()], ids=[*"dsac", *METHODS])
def test_values_are_immutable(make):
    value = make()
    for name in [field.name for field in fields(value)] or ["more"]:
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, 0)


def test_a_cohort_takes_keywords_only():
    assert repr(Cohort(**COHORT)).startswith("Cohort(S=1, weighed=1, N=2, devices=2, W=1.0, rows=0, claims=Claims(")
    with pytest.raises(TypeError):
        Cohort(*COHORT.values())
