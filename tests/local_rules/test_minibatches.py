from itertools import chain, product
from typing import Any

import numpy as np
import pytest

from fedcore.errors import RangeError
from fedcore.local_rules import minibatches


def taken(examples: int = 10, batch: int = 4, **options: Any) -> list[list[int]]:
    options = {"seed": 0, "round": 0, "client": 0} | options
    return [indices.tolist() for indices in minibatches(examples, batch, **options)]


def test_each_epoch_is_a_new_permutation_with_its_short_batch() -> None:
    batches = taken(epochs=3)
    assert [len(indices) for indices in batches] == [4, 4, 2] * 3
    orders = [list(chain(*batches[start : start + 3])) for start in (0, 3, 6)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_steps_run_over_as_many_epochs_as_they_need() -> None:
    longer = taken(epochs=3)
    for steps in range(1, 10):
        assert taken(steps=steps) == longer[:steps]


def test_a_batch_larger_than_the_client() -> None:
    assert [len(indices) for indices in taken(3, 100, steps=2)] == [3, 3]


def test_seed_round_and_client_each_give_their_own() -> None:
    streams = [taken(50, 50, epochs=1, seed=s, round=r, client=c)[0] for s, r, c in product(range(3), repeat=3)]
    assert len({tuple(order) for order in streams}) == 27


def test_independent_of_what_was_drawn_before() -> None:
    due = taken(epochs=2, round=4, client=7)
    first = minibatches(10, 4, epochs=2, seed=0, round=4, client=7)
    second = minibatches(10, 4, epochs=2, seed=0, round=4, client=8)
    interleaved = [a.tolist() for a, _ in zip(first, second, strict=True)]
    assert interleaved == due


def test_dtype() -> None:
    assert next(minibatches(3, 2, steps=1, seed=0, round=0, client=0)).dtype == np.int64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "^epochs, steps: expected exactly one of them, got None and None"),
        ({"epochs": 1, "steps": 1}, "^epochs, steps: expected exactly one of them, got 1 and 1"),
        ({"epochs": 0}, "^epochs: expected an integer >= 1, got 0"),
        ({"steps": 0}, "^steps: expected an integer >= 1, got 0"),
        ({"steps": 1, "examples": 0}, "^examples: expected an integer >= 1, got 0"),
        ({"steps": 1, "batch": 0}, "^batch: expected an integer >= 1, got 0"),
    ],
)
def test_wrong_numbers_are_refused_at_the_call(options: dict[str, int], message: str) -> None:
    with pytest.raises(RangeError, match=message):
        minibatches(**({"examples": 3, "batch": 2, "seed": 0, "round": 0, "client": 0} | options))
