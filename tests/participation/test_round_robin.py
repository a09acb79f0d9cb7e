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

    monkeypatch.setattr(module, "generator", Fixed)


@pytest.mark.usefixtures("periods")
def test_by_hand_in_phase() -> None:
    pattern = RoundRobin(4, 3)
    assert [pattern.active(t).tolist() for t in range(7)] == [
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
    assert [pattern.active(t).tolist() for t in range(4)] == [[0, 1], [0, 1, 2, 3], [0, 1], [0, 1, 2]]


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
        heard[pattern.active(t)] += 1
    np.testing.assert_array_equal(heard, 60 // np.maximum(pattern.tau, 1))
