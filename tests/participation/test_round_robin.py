import numpy as np
import pytest

from fedcore.participation import RoundRobin
from fedcore.participation import round_robin as module


@pytest.fixture
def periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Periods 0, 1, 2, 3 and phases 0, 0, 1, 2 instead of random ones."""

    class Fixed:
        def __init__(self, seed: int, purpose: str) -> None:
            self.answer = np.array([0, 1, 2, 3] if "periods" in purpose else [0, 0, 1, 2])

        def integers(self, *_: object) -> np.ndarray:
            return self.answer

        def normal(self, mean: float, stdev: float, count: int) -> np.ndarray:
            assert (mean, stdev, count) == (0, 3, 4)
            return np.array([-0.4, 1.6, -2.4, 7.0])

    monkeypatch.setattr(module, "generator", Fixed)


@pytest.mark.usefixtures("periods")
def test_by_hand_in_phase() -> None:
    pattern = RoundRobin(4, 3)
    assert [pattern.active(t).clients.tolist() for t in range(7)] == [
        [0, 1, 2, 3],
        [0, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 1, 2],
        [0, 1],
        [0, 1, 2, 3],
    ]


@pytest.mark.usefixtures("periods")
def test_by_hand_with_phases() -> None:
    pattern = RoundRobin(4, 3, phase="random")
    assert [pattern.active(t).clients.tolist() for t in range(4)] == [[0, 1], [0, 1, 2, 3], [0, 1], [0, 1, 2]]


def test_everyone_is_there_in_round_0_when_in_phase() -> None:
    assert len(RoundRobin(50, 20).active(0)) == 50
    assert len(RoundRobin(50, 20, phase="random").active(0)) < 50


def test_periods_are_uniform_and_the_same_for_both_phases() -> None:
    pattern = RoundRobin(6000, 3, seed=2)
    np.testing.assert_allclose(np.bincount(pattern.tau) / 6000, 0.25, atol=4.5 * np.sqrt(0.25 * 0.75 / 6000))
    np.testing.assert_array_equal(RoundRobin(6000, 3, seed=2, phase="random").tau, pattern.tau)


def test_a_client_comes_exactly_once_a_period() -> None:
    pattern = RoundRobin(40, 5, phase="random", seed=4)
    heard = np.zeros(40)
    for t in range(60):  # 60 is a multiple of 1, 2, 3, 4, 5
        heard[pattern.active(t).clients] += 1
    np.testing.assert_array_equal(heard, 60 // np.maximum(pattern.tau, 1))


@pytest.mark.usefixtures("periods")
def test_the_public_codes_periods_by_hand() -> None:
    assert RoundRobin(4, 5, periods="half-normal").tau.tolist() == [0, 2, 2, 5]


def test_the_public_codes_periods_are_short_whatever_tau_max() -> None:
    short, long = (RoundRobin(4000, tau_max, periods="half-normal", seed=3) for tau_max in (4, 50))
    np.testing.assert_array_equal(short.tau, np.minimum(long.tau, 4))
    within = [0.1324, 0.2506, 0.2124, 0.1613]  # P(round(|z|) = 0, 1, 2, 3), z of standard deviation 3
    np.testing.assert_allclose(np.bincount(long.tau)[:4] / 4000, within, atol=4.5 * np.sqrt(0.25 * 0.75 / 4000))
    assert long.tau.max() < 15
