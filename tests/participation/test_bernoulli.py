import numpy as np
import pytest

from fedcore.errors import RangeError
from fedcore.experiment import load_preset
from fedcore.participation import Bernoulli


def test_the_ends_of_the_range() -> None:
    assert Bernoulli(5, 0).active(1).clients.tolist() == []
    assert Bernoulli(5, 1).active(1).clients.tolist() == [0, 1, 2, 3, 4]
    assert Bernoulli(5, [0, 1, 0, 1, 1]).active(1).clients.tolist() == [1, 3, 4]


def test_clients_are_active_with_p_and_independently() -> None:
    clients, rounds, p = 6, 4000, 0.3
    pattern = Bernoulli(clients, p, seed=11)
    mask = np.zeros((rounds, clients))
    for t in range(rounds):
        mask[t, pattern.active(t).clients] = 1
    spread = np.sqrt(p * (1 - p) / rounds)
    np.testing.assert_allclose(mask.mean(0), p, atol=4.5 * spread)
    correlation = np.corrcoef(mask.T) - np.eye(clients)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(rounds)
    after = [np.corrcoef(mask[:-1, i], mask[1:, i])[0, 1] for i in range(clients)]
    assert np.abs(after).max() < 4.5 / np.sqrt(rounds)


def test_each_client_has_its_own_p() -> None:
    p, rounds = np.array([0.1, 0.5, 0.9, 0.0, 1.0]), 4000
    pattern = Bernoulli(5, p.tolist(), seed=2)
    heard = np.bincount(np.concatenate([pattern.active(t).clients for t in range(rounds)]), minlength=5) / rounds
    assert (np.abs(heard - p) <= 4.5 * np.sqrt(p * (1 - p) / rounds)).all()


def test_one_p_for_all_is_that_p_for_each() -> None:
    one, each = Bernoulli(40, 0.3, seed=6), Bernoulli(40, [0.3] * 40, seed=6)
    for t in range(20):
        np.testing.assert_array_equal(one.active(t).clients, each.active(t).clients)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_the_public_codes_five_levels(p: float) -> None:
    """p + (i mod 5) (1 - p) / 4; the last level is exactly 1."""
    pattern = Bernoulli(12, p, levels=5)
    due = [p + (i % 5) * (1 - p) / 4 for i in range(12)]
    np.testing.assert_allclose(pattern.p, due, rtol=1e-15)
    assert pattern.p[4] == pattern.p[9] == 1
    assert all({4, 9} <= set(pattern.active(t).clients.tolist()) for t in range(50))


def test_two_levels_are_the_chance_and_one() -> None:
    np.testing.assert_array_equal(Bernoulli(4, 0.25, levels=2).p, [0.25, 1, 0.25, 1])


def test_chances_may_change_with_the_round() -> None:
    """p_i^t, for all or for each, from the rounds of a table on; and the same draws as without one."""
    rounds, each = 3000, [0.9, 0.1, 0.5, 1.0]
    pattern = Bernoulli(4, {"0": 0.2, 3000: each}, seed=3)
    for began, p in ((0, np.full(4, 0.2)), (3000, np.array(each))):
        heard = np.concatenate([pattern.active(t).clients for t in range(began, began + rounds)])
        mean = np.bincount(heard, minlength=4) / rounds
        assert (np.abs(mean - p) <= 4.5 * np.sqrt(p * (1 - p) / rounds)).all()
    alone = Bernoulli(4, each, seed=3)
    assert all((pattern.active(t).clients == alone.active(t).clients).all() for t in range(3000, 3020))
    assert "3000" in repr(pattern)


@pytest.mark.parametrize("p", [{}, {1: 0.5}, {0: 0.5, "0": 0.5}, {0: 0.5, -1: 0.5}, {0: 0.5, "x": 0.1}, {0: 1.5}])
def test_chances_that_say_too_little_are_refused(p: object) -> None:
    with pytest.raises(RangeError, match="p"):
        Bernoulli(4, p)


def test_a_table_may_hold_them() -> None:
    changed = ["participation.p={0 = 0.2, 50 = 0.4}", "partition.clients=30"]
    assert load_preset("mimic/figure7", changed).participation.options["p"] == {"0": 0.2, "50": 0.4}
