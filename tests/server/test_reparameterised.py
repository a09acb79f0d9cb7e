"""The form of Cheng et al.'s eq. 31-33 (g/beta, beta eta, beta gamma), against its transcription and the plain form."""

import numpy as np
import pytest

from fedcore import Server, algorithms
from tests.server.papers import Clients, N, arbitrary_course, follow, momentum, reparameterised, start_of

BETA = 0.3
FORMS = {
    "FedAvgM": (algorithms.FedAvgM, {}, False),
    "SCAFFOLDM": (algorithms.SCAFFOLDM, {}, True),
    "SCAFFOLDM, two vectors": (algorithms.SCAFFOLDM, dict(control="sent"), True),
}


def eta(t):
    return 0.2 * 0.98**t


def gamma(t):
    return 0.4 * 0.99**t


@pytest.mark.parametrize("own_gamma", [False, True], ids=["gamma = eta K", "gamma"])
@pytest.mark.parametrize("name", FORMS)
def test_the_reparameterised_form_follows_the_paper_and_the_plain_form(name, own_gamma):
    method, options, controls = FORMS[name]
    seed = int(own_gamma)
    clients, course, x0 = Clients(seed), arbitrary_course(seed), start_of(seed)
    plain, other = (
        Server(x0, method(BETA, **options), N, lr=eta, server_lr=gamma if own_gamma else None),
        Server(
            x0,
            method(BETA, reparameterised=True, **options),
            N,
            lr=lambda t: BETA * eta(t),
            server_lr=(lambda t: BETA * gamma(t)) if own_gamma else None,
        ),
    )
    arguments = clients, x0.astype(np.float64), eta, course, BETA
    rates = dict(gamma=gamma if own_gamma else None, controls=controls)
    xs = list(reparameterised(*arguments, **rates))
    gs, g_hats = [], []
    assert follow(other, clients, course, xs, after=lambda _: g_hats.append(other.v)) < 2e-6
    assert follow(plain, clients, course, xs, after=lambda _: gs.append(plain.v)) < 2e-6
    np.testing.assert_allclose(g_hats, np.array(gs) / BETA, rtol=0, atol=1e-4)
    assert np.abs(gs).max() > 0.1
    np.testing.assert_allclose(xs, list(momentum(*arguments, **rates)), rtol=0, atol=1e-12)  # the papers' two forms
