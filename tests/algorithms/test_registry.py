"""Tests of every method in the registry."""

from inspect import signature

import numpy as np
import pytest

import fedcore
from fedcore import algorithms
from fedcore.algorithms import REGISTRY, Algorithm, check_step, named
from tests.algorithms.test_by_hand import COHORT


@pytest.mark.parametrize("name", REGISTRY)
def test_a_method_is_a_documented_table(name):
    algorithm = named(name)
    assert isinstance(algorithm, Algorithm)
    assert type(algorithm).__name__ == name
    assert algorithm.__doc__
    assert REGISTRY[name].__module__.startswith("fedcore.algorithms.")
    check_step(algorithm, algorithm.step(COHORT))
    assert algorithm == named(name) == eval(repr(algorithm), dict(vars(algorithms)))
    assert algorithm.total_sums_rows == (algorithm.keeps_rows and algorithm.keeps_total)


# FedDyn's model is not the clients' mean except at its fixed point; FedExP and FedACG step further than that mean,
# FedAsync less.
@pytest.mark.parametrize("name", sorted(REGISTRY.keys() - {"FedACG", "FedAsync", "FedDyn", "FedExP"}))
def test_full_participation_with_one_gradient_is_gradient_descent(name):
    """With K = 1 and all clients, every method is x - eta * mean of the gradients."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=6)
    algorithm = named(name, **{"beta": 1.0} if "beta" in signature(REGISTRY[name]).parameters else {})
    server = fedcore.Server(x.astype(np.float32), algorithm, clients=dict.fromkeys(range(4), 1), lr=0.25)
    for _ in range(5):
        gradients = rng.normal(size=(4, 6)).astype(np.float32)
        broadcast = server.broadcast(range(4))
        updates = []
        for i, gradient in enumerate(gradients):
            offset = broadcast.offset(i)
            y = server.x - np.float32(0.25) * (gradient if offset is None else gradient + offset)
            updates.append(fedcore.Update(i, y, steps=1, control=gradient))
        server.round(updates)
        x = x - 0.25 * gradients.mean(axis=0)
    np.testing.assert_allclose(server.x, x, rtol=1e-5, atol=1e-6)


def test_unknown_names():
    with pytest.raises(fedcore.errors.UnknownNameError, match=r"^algorithm\b.*'FedAvg'"):
        named("FedAvgg")
    with pytest.raises(fedcore.errors.UnknownNameError, match=r"^weights\b.*'examples'"):
        named("FedAvg", weights="example")
    with pytest.raises(fedcore.errors.UnknownNameError, match=r"^option of MIFA\b.*'wait'"):
        named("MIFA", wiat=True)
    for name, due in {
        "fedbuff": "RoundPolicy",
        "CA2FL": "FedVARP",
        "DiLoCo": "Nesterov",
        "FedBuf": "'FedBuff'",
    }.items():
        with pytest.raises(fedcore.errors.UnknownNameError, match=due):
            fedcore.Server(np.zeros(3, np.float32), name, clients=3, lr=0.1)
    with pytest.raises(fedcore.errors.UnknownNameError, match=r"^((?!did you mean).)*$"):
        named("FedMIM")  # a method that is not here is no misspelt other one
