"""Incomplete work under Ruan et al.'s three schemes: rate eta_0 / t, client i does s_i of E steps."""

import numpy as np
import pytest

from fedcore import algorithms
from tests.theory.quadratics import Clients, distance, run, server_of

N, n, E = 6, 12, 4


@pytest.mark.parametrize("scheme", ["A", "B", "C"])
def test_scheme_c_converges_and_a_and_b_stall(scheme):
    clients = Clients(N, n, seed=1)
    sizes = [1, 2, 3, 4, 5, 6]
    server = server_of(
        algorithms.FlexibleFedAvg(scheme, E), clients, lr=lambda t: 0.5 / (t + 1), client_sizes=sizes, max_steps=E
    )

    def steps(t, i):
        """Half of the devices complete their work two rounds in three, the others one in three."""
        rng = np.random.default_rng([t, i])
        return E if rng.random() < (2 / 3 if i < N / 2 else 1 / 3) else int(rng.integers(1, E))

    run(server, clients, 1000, cohort=lambda t: range(N), steps=steps)
    far = distance(server.x, clients.optimum(np.array(sizes) / sum(sizes)))
    assert far < 0.01 if scheme == "C" else far > 0.03
