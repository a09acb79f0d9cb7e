import numpy as np

from fedcore.participation import Bernoulli


def test_the_ends_of_the_range() -> None:
    assert Bernoulli(5, 0).active(1).tolist() == []
    assert Bernoulli(5, 1).active(1).tolist() == [0, 1, 2, 3, 4]


def test_clients_are_active_with_p_and_independently() -> None:
    clients, rounds, p = 6, 4000, 0.3
    pattern = Bernoulli(clients, p, seed=11)
    mask = np.zeros((rounds, clients))
    for t in range(rounds):
        mask[t, pattern.active(t)] = 1
    spread = np.sqrt(p * (1 - p) / rounds)
    np.testing.assert_allclose(mask.mean(0), p, atol=4.5 * spread)
    correlation = np.corrcoef(mask.T) - np.eye(clients)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(rounds)
    after = [np.corrcoef(mask[:-1, i], mask[1:, i])[0, 1] for i in range(clients)]
    assert np.abs(after).max() < 4.5 / np.sqrt(rounds)
