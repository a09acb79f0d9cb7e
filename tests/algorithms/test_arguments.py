"""Errors name a method's invalid argument and the rule."""

import numpy as np
import pytest

from fedcore.algorithms import MimiC, named
from fedcore.algorithms.averaging import FlexibleFedAvg
from fedcore.algorithms.memory import FedStale
from fedcore.errors import FedcoreError

BAD = [
    ("FedACG", "beta", -1.0),
    ("FedACG", "lam", 1.0),
    ("FedAU", "cutoff", 0),
    ("FedAWE", "eta", 0.0),
    ("FedAvg", "weights", "odd"),
    ("FedAvgM", "beta", 0.0),
    ("FedAvgM", "placement", "moon"),
    ("FedAvgMVR", "beta", 2.0),
    ("FedDyn", "alpha", -1.0),
    ("FedExP", "epsilon", 0.0),
    ("FedNova", "momentum", 1.0),
    ("FedProx", "mu", -1.0),
    ("FedStale", "beta", 1.5),
    ("FedStale", "chances", 0.0),
    ("FedStale", "chances", (0.5, 1.5)),
    ("FlexibleFedAvg", "scheme", "D"),
    ("FlexibleFedAvg", "reboot", "slow"),
    ("FlexibleFedAvg", "local_steps", 0),
    ("MBSTORM", "steps", 0),
    ("MimiC", "units", "metres"),
    ("MimiC", "placement", "moon"),
    ("QFedAvg", "q", -1.0),
    ("SCAFFOLD", "control", "lost"),
    ("SCAFFOLD", "placement", "moon"),
    ("SCAFFOLDM", "beta", 0.0),
    ("SCAFFOLDMVR", "beta", 2.0),
]


@pytest.mark.parametrize(("method", "option", "value"), BAD)
def test_the_argument_is_named(method, option, value):
    with pytest.raises(FedcoreError, match=rf"^{option}\b"):
        named(method, **{option: value})


def test_chances_of_each_client_are_numbers():
    for kind in (list, np.array):
        assert FedStale(chances=kind([1, 0.5])) == FedStale(chances=(1.0, 0.5))


def test_the_option_that_averages_models():
    assert MimiC().averaging_option == 'units="update"'
    assert FlexibleFedAvg().weighs_claims is False
