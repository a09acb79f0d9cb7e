"""Accounting: the epsilon of dp_accounting, its inverse, and the ledger."""

import pytest

from fedcore.errors import RangeError
from fedcore.rules.private import Ledger, epsilon_of, noise_for

dp_accounting = pytest.importorskip("dp_accounting")

SETTINGS = [(100, 0.1, 1.5, 1e-5), (10, 1.0, 4.0, 1e-6), (1000, 0.01, 0.8, 1e-6)]


@pytest.mark.parametrize(("rounds", "rate", "noise", "delta"), SETTINGS)
def test_epsilon_is_that_of_dp_accounting(rounds, rate, noise, delta):
    from dp_accounting import pld, rdp

    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), rounds
    )
    due = pld.PLDAccountant().compose(event).get_epsilon(delta)
    found = epsilon_of([(rounds, rate, noise)], delta)
    assert found == pytest.approx(due, rel=1e-6)
    assert 0.5 * due < found < rdp.RdpAccountant().compose(event).get_epsilon(delta)  # a second, looser accountant


def test_the_noise_of_a_budget():
    noise = noise_for(2.0, 1e-5, rounds=3)
    assert epsilon_of([(3, 1.0, noise)], 1e-5) <= 2.0 < epsilon_of([(3, 1.0, noise * 0.998)], 1e-5)
    # For one round without sampling, z is that of the analytic Gaussian mechanism (Balle and Wang 2018).
    assert noise_for(1.0, 1e-5, rounds=1) == pytest.approx(3.730632, rel=2e-3)


def test_what_the_accountant_cannot_compute_is_named():
    for call in (lambda: epsilon_of([(10, 1.0, 2.0)], 1e-16), lambda: noise_for(0.05, 1e-16, rounds=1)):
        with pytest.raises(RangeError, match=r"^delta=1e-16: .*; use (1e-15|9e-16) or more"):
            call()
    with pytest.raises(RangeError, match="needs a noise above 1000"):
        noise_for(0.001, 1e-5, rounds=1)


def test_a_ledger_joins_equal_rounds():
    ledger = Ledger()
    for rate, noise in [(0.1, 1.0), (0.1, 1.0), (0.1, 2.0), (0.1, 1.0)]:
        ledger = ledger.after(rate, noise, 0.5)
    assert ledger.entries == ((2, 0.1, 1.0), (1, 0.1, 2.0), (1, 0.1, 1.0))
    assert ledger.rounds == 4
    assert Ledger.from_state(ledger.to_state()) == ledger
    assert ledger.epsilon(1e-5) == pytest.approx(epsilon_of([(3, 0.1, 1.0), (1, 0.1, 2.0)], 1e-5), rel=1e-3)
    assert Ledger().epsilon(1e-5) == 0


@pytest.mark.parametrize(
    ("epsilon", "delta", "rounds", "rate"), [(0, 0.1, 1, 1), (1, 1, 1, 1), (1, 0.1, 0, 1), (1, 0.1, 1, 0)]
)
def test_wrong_numbers(epsilon, delta, rounds, rate):
    with pytest.raises(RangeError):
        noise_for(epsilon, delta, rounds=rounds, rate=rate)
