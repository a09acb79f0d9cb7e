import numpy as np
import pytest

from fedcore.participation import TimeVarying
from fedcore.participation import time_varying as module
from tests.sampling.laws import assert_law, successive


@pytest.mark.parametrize(("clients", "share", "k"), [(30, 0.1, 3), (30, 0.5, 15), (5, 0.01, 1), (7, 1, 7)])
def test_the_number_of_active_clients(clients: int, share: float, k: int) -> None:
    pattern = TimeVarying(clients, share)
    assert {len(pattern.active(t)) for t in range(20)} == {k}


def test_the_weights_are_drawn_anew_each_round() -> None:
    pattern, rounds = TimeVarying(5, 0.2, seed=1), 4000
    heard = np.bincount([int(pattern.active(t).clients[0]) for t in range(rounds)], minlength=5)
    np.testing.assert_allclose(heard / rounds, 0.2, atol=4.5 * np.sqrt(0.2 * 0.8 / rounds))


def test_inclusion_within_a_round_follows_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights that are given instead of drawn, the sets are those of successive draws."""

    class Given:
        def uniform(self, least: float, most: float, _: int) -> np.ndarray:
            assert (least, most) == (1, 10)  # which the sets themselves cannot show
            return np.array([1.0, 2.0, 5.0, 10.0])

    monkeypatch.setattr(module, "generator", lambda *_, **__: Given())
    pattern = TimeVarying(4, 0.5, seed=7)
    law: dict[tuple[int, ...], float] = {}
    for order, probability in successive(np.array([1.0, 2.0, 5.0, 10.0]), 2).items():
        law[tuple(sorted(order))] = law.get(tuple(sorted(order)), 0) + probability
    assert_law([pattern.active(t).clients.tolist() for t in range(6000)], law)
