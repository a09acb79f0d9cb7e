import pytest

from fedcore.data import load, natural
from fedcore.errors import RangeError


def test_it_is_what_the_data_set_says():
    dataset = load("synthetic-iid", clients=3, seed=0, largest=60)
    assert all(part is due for part, due in zip(natural(dataset, 3), dataset.parts, strict=True))


def test_another_number_of_clients_is_refused():
    with pytest.raises(RangeError, match="clients: expected the 3 of 'synthetic-iid', got 4"):
        natural(load("synthetic-iid", clients=3, seed=0), 4)


def test_a_data_set_that_says_nothing_is_refused():
    with pytest.raises(
        RangeError, match="partition: expected a data set with a client for each example, got 'digits' without"
    ):
        natural(load("digits"), 3)
