"""Interrupts at any line of a server on a device never give one slot to two rows."""

import numpy as np
import pytest

from fedcore import Compute, Server, Update, algorithms
from fedcore.arrays import to_host
from tests.server.stopping import by_a_signal, from_outside, line_by_line, raising_handlers

CLIENTS = ["a", "b", 7, "d"]


def a_round(server, value=50, clients=CLIENTS):
    server.round([Update(client, np.full(6, value + i, np.float32), 1) for i, client in enumerate(clients)])


def a_server(device):
    server = Server(
        np.zeros(6, np.float32), algorithms.MIFA(wait=False), CLIENTS, lr=0.1, compute=Compute(device=device)
    )
    a_round(server, 0, CLIENTS[:3])
    return server


def ended(server):
    """x after two rounds of all, which read each row and replace it."""
    for value in (10, 20):
        a_round(server, value)
    with server:
        return to_host(server.x).copy()


@pytest.mark.parametrize("stop", [by_a_signal, from_outside], ids=lambda f: f.__name__)
def test_a_stop_at_any_line_of_abort(cuda_device, stop):
    due = ended(a_server("cpu"))
    for run in line_by_line(stop, least=20):
        server = a_server("cuda")
        opened = server.open_round()
        for client in CLIENTS[:2]:
            opened.add(client, np.full(6, 50, np.float32), steps=1)
        with raising_handlers():
            run(opened.abort)
        opened.abort()  # where the first had not begun
        np.testing.assert_array_equal(ended(server), due)


def test_an_exception_from_outside_at_any_line_of_the_rows_in_a_round(cuda_device):
    accepted = a_server("cpu")
    a_round(accepted)
    due = {1: ended(a_server("cpu")), 2: ended(accepted)}
    ends = set()
    # A stride of 3 comes to each line of a loop over the clients, at one of them.
    for run in line_by_line(from_outside, room="fedcore/store/device_", stride=3):
        server = a_server("cuda")
        run(a_round, server)
        ends.add(end := server.round_number)
        np.testing.assert_array_equal(ended(server), due[end])
    assert ends == {1, 2}
