"""Server optimisers against a float64 transcription of Reddi et al. 2021, Algorithm 2."""

import numpy as np
import pytest

from fedcore import Server, Update, optimizers
from fedcore.errors import RangeError, UnknownNameError

n, rounds = 7, 25
OPTIMIZERS = {
    "SGD": optimizers.SGD(momentum=0.7),
    "Adagrad": optimizers.Adagrad(beta1=0.3, tau=0.05),
    "Adam": optimizers.Adam(beta1=0.8, beta2=0.95, tau=0.01),
    "Yogi": optimizers.Yogi(beta1=0.8, beta2=0.95, tau=0.01),
}


def transcribed(name, options, x, deltas, eta):
    """x after steps with these pseudo-gradients Delta_t = the clients' mean of y - x."""
    m = np.zeros(n)
    v = np.zeros(n) if name == "SGD" else np.full(n, options.tau**2)
    for delta in deltas:
        if name == "SGD":
            m = options.momentum * m + delta
            x = x + eta * m
            continue
        m = options.beta1 * m + (1 - options.beta1) * delta
        if name == "Adagrad":
            v = v + delta**2
        elif name == "Adam":
            v = options.beta2 * v + (1 - options.beta2) * delta**2
        else:
            v = v - (1 - options.beta2) * delta**2 * np.sign(v - delta**2)
        x = x + eta * m / (np.sqrt(v) + options.tau)
    return x


@pytest.mark.parametrize("server_lr", [None, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_is_the_papers(name, server_lr):
    rng = np.random.default_rng(0)
    x0, lr, steps = rng.normal(size=n).astype(np.float32), 0.25, 2
    server = Server("FedAvg", x0, clients=3, lr=lr, server_lr=server_lr, optimizer=OPTIMIZERS[name])
    deltas = []
    for _ in range(rounds):
        sent = rng.normal(size=(3, n)).astype(np.float32)
        deltas.append(sent.mean(axis=0, dtype=np.float64))
        server.round([Update(i, delta=sent[i], steps=steps) for i in range(3)])
    # With a server rate v is a mean gradient, Delta / (eta K).
    unit = 1.0 if server_lr is None else 1 / (lr * steps)
    due = transcribed(name, OPTIMIZERS[name], x0.astype(np.float64), unit * np.array(deltas), server_lr or 1.0)
    np.testing.assert_allclose(server.x, due, rtol=2e-5, atol=2e-6)


def test_an_unknown_name_and_wrong_numbers_are_refused():
    with pytest.raises(UnknownNameError, match=r"optimizer: .*Adam"):
        optimizers.named("Adma")
    for wrong in (dict(beta2=1.5), dict(tau=0.0), dict(beta1=-0.1)):
        with pytest.raises(RangeError):
            optimizers.Adam(**wrong)
