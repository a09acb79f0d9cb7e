import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedcore.data import dirichlet
from fedcore.errors import RangeError


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    clients=st.integers(1, 30),
    alpha=st.floats(1e-9, 1e9),
    least=st.integers(0, 4),
    seed=st.integers(0, 2**32),
)
def test_every_example_is_dealt_once_and_nobody_has_too_few(labels, check, sizes, clients, alpha, least, seed):
    y = labels(sizes)
    assume(len(y) >= clients * least)
    parts, dealt = check(lambda: dirichlet(y, clients, alpha, seed=seed, least=least), y, clients)
    assert dealt.min() == 1
    assert min(len(part) for part in parts) >= least


def test_the_shares_of_a_class_have_the_dirichlet_law():
    """Share p_i ~ Beta(alpha, (N - 1) alpha): mean 1/N, variance (N - 1) / (N^2 (N alpha + 1))."""
    y = np.repeat(np.arange(400), 500)
    parts = dirichlet(y, 5, 0.4, seed=0, least=0)
    shares = np.array([np.bincount(y[part], minlength=400) / 500 for part in parts])
    assert shares.mean(axis=1) == pytest.approx([0.2] * 5, abs=0.05)
    assert shares.var(axis=1).mean() == pytest.approx(4 / (25 * 3), rel=0.1)


def test_a_large_alpha_makes_clients_alike_and_a_small_one_gives_classes_away_whole():
    y = np.repeat(np.arange(10), 100)
    alike = np.array([np.bincount(y[part], minlength=10) for part in dirichlet(y, 10, 1e6, seed=0)])
    assert np.abs(alike - 10).max() <= 1
    apart = np.array([np.bincount(y[part], minlength=10) for part in dirichlet(y, 10, 1e-6, seed=0, least=0)])
    assert (apart.max(axis=0) == 100).all()


def test_the_empty_handed_get_what_they_miss_from_the_richest():
    y = np.zeros(100, int)
    free = dirichlet(y, 4, 1e-6, seed=0, least=0)
    sizes = [len(part) for part in free]
    assert sorted(sizes) == [0, 0, 0, 100]
    kept = dirichlet(y, 4, 1e-6, seed=0, least=3)
    assert sorted(len(part) for part in kept) == [3, 3, 3, 91]
    assert len(kept[sizes.index(100)]) == 91


def test_what_the_richest_gives_is_drawn_from_all_it_has():
    y = np.repeat([0, 1], 50)
    seed = next(
        seed for seed in range(20) if {len(part) for part in dirichlet(y, 2, 1e-6, seed=seed, least=0)} == {0, 100}
    )
    given = min(dirichlet(y, 2, 1e-6, seed=seed, least=20), key=len)
    assert 5 <= np.count_nonzero(y[given]) <= 15


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dirichlet(np.zeros(5, int), 0, 1.0, seed=0), "^clients: expected an integer >= 1, got 0"),
        (lambda: dirichlet(np.zeros(5, int), 1, 0.0, seed=0), "^alpha: expected a finite number > 0, got 0.0"),
        (lambda: dirichlet(np.zeros(5, int), 1, float("nan"), seed=0), "^alpha: expected a finite number > 0, got nan"),
        (lambda: dirichlet(np.zeros(5, int), 1, float("inf"), seed=0), "^alpha: expected a finite number > 0, got inf"),
        (lambda: dirichlet(np.zeros(5, int), 1, 1.0, seed=0, least=-1), "^least: expected an integer >= 0, got -1"),
        (lambda: dirichlet(np.zeros(0, int), 1, 1.0, seed=0, least=0), "^labels: .* got none"),
        (lambda: dirichlet(np.zeros(5, int), 3, 1.0, seed=0, least=2), "^labels: expected at least 6 examples, 2 a"),
    ],
)
def test_what_is_impossible_is_refused(call, message):
    with pytest.raises(RangeError, match=message):
        call()
