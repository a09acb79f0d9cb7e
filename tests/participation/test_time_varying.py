import numpy as np
import pytest

from fedcore.participation import TimeVarying


@pytest.mark.parametrize(("clients", "share", "k"), [(30, 0.1, 3), (30, 0.5, 15), (5, 0.01, 1), (7, 1, 7)])
def test_the_number_of_active_clients(clients: int, share: float, k: int) -> None:
    pattern = TimeVarying(clients, share)
    assert {len(pattern.active(t)) for t in range(20)} == {k}


def test_the_weights_are_drawn_anew_each_round() -> None:
    pattern, rounds = TimeVarying(5, 0.2, seed=1), 4000
    heard = np.bincount([int(pattern.active(t)[0]) for t in range(rounds)], minlength=5)
    np.testing.assert_allclose(heard / rounds, 0.2, atol=4.5 * np.sqrt(0.2 * 0.8 / rounds))
