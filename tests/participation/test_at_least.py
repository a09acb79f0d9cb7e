from itertools import combinations

import pytest

from fedcore.participation import AtLeast, Bernoulli, RoundRobin, Trace
from tests.sampling.laws import assert_law


def test_enough_clients_are_left_as_they_are():
    inner = Trace(9, first=5, among=Bernoulli(9, 0.4))
    pattern, replaced = AtLeast(9, 3, among=inner), 0
    for t in range(40):
        given, active = inner.active(t), pattern.active(t)
        assert len(active) >= 3
        if len(given) >= 3:
            assert active.clients.tolist() == given.clients.tolist()
            assert active.shares.tolist() == given.shares.tolist()
        else:
            assert len(active) == 3
            assert active.shares is None
            replaced += 1
    assert 0 < replaced < 40


def test_too_few_are_replaced_by_a_uniform_draw():
    pattern = AtLeast(4, 2, among=Bernoulli(4, 0.0))
    drawn = [pattern.active(t).clients.tolist() for t in range(4000)]
    assert_law(drawn, dict.fromkeys(combinations(range(4), 2), 1 / 6))


@pytest.mark.parametrize("tau_max", [20, 50, 100])
def test_the_public_codes_bounded_pattern(tau_max):
    """In phase, short periods, never fewer than two clients."""
    pattern = AtLeast(30, 2, among=RoundRobin(30, tau_max, periods="half-normal"))
    sizes = [len(pattern.active(t)) for t in range(300)]
    assert sizes[0] == 30
    assert min(sizes) >= 2
