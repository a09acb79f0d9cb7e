"""Every method of the registry, and every field of what it orders its clients to do: none may be lost on a wire."""

import numpy as np

from fedcore.algorithms import (
    MBSTORM,
    REGISTRY,
    SCAFFOLD,
    SCAFFOLDM,
    SCAFFOLDMVR,
    FedProx,
    FlexibleFedAvg,
    LocalDescent,
    MimiC,
    named,
)
from fedcore.algorithms.rates import InverseStep

ORDERS = {
    **{name: named(name) for name in REGISTRY},
    "FlexibleFedAvg": FlexibleFedAvg(local_steps=5),
    "FedProx, mu 0": FedProx(mu=0.0),
    "MBSTORM, beta 1": MBSTORM(beta=1.0),
    "LocalDescent, full gradient": LocalDescent(full_gradient=True),
    "MimiC, units update": MimiC(units="update"),
    "MimiC, rows on clients": MimiC(placement="client"),
    "SCAFFOLD, control sent": SCAFFOLD(control="sent"),
    "SCAFFOLD, rows on clients": SCAFFOLD(placement="client"),
    "SCAFFOLDM, rows on clients": SCAFFOLDM(placement="client"),
    "SCAFFOLDMVR, rows on clients": SCAFFOLDMVR(placement="client"),
}
PLAIN = ["FedAvg", "MIFA", "MimiC", "FlexibleFedAvg", "LocalDescent", "FedProx, mu 0", "MimiC, units update"]
"""Those whose clients do nothing but steps along their gradients, so that a wire may carry the model alone."""
OF_STEPS = InverseStep(mu=1.0, alpha=3.0, E=4)

CROSS = {"round", "lr", "a", "b", "mu", "second_vector", "local_rule", "placement", "plain"}
VECTORS = {"x", "x_prev", "_offset"}
ELSEWHERE = {
    "ids": "the address",
    "bytes": "the server's own",
    "direction": "a, b, mu and the offset",
    "has_offset": "its presence",
}
REFUSED = {"lr_of_step"}


def assert_crossed(sent, client, got):
    """``got``: what the client found, by the names of a Broadcast, with its vectors "offset" and "x_prev"."""
    assert {name: got[name] for name in CROSS} == {name: getattr(sent, name) for name in CROSS}
    for name, due in (("offset", sent.offset(client) if sent.has_offset else None), ("x_prev", sent.x_prev)):
        assert (got[name] is None) == (due is None), name
        if due is not None:
            np.testing.assert_array_equal(got[name], due, err_msg=name)
