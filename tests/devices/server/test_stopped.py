"""An abort on a device that is stopped, at whatever line, gives no place of a row back twice."""

import signal
from contextlib import suppress

import numpy as np
import pytest

from fedcore import Server, Update, algorithms
from fedcore.memory import to_host
from tests.server.stopping import Stopped, each_line

CLIENTS = ["a", "b", 7, "d"]


def a_server(device):
    server = Server(algorithms.MIFA(wait=False), np.zeros(6, np.float32), CLIENTS, lr=0.1, device=device)
    server.round([Update(client, np.full(6, i, np.float32), 1) for i, client in enumerate(CLIENTS[:3])])
    return server


def ended(server):
    """x after two rounds of all, which read each row and write it anew."""
    for number in (10, 20):
        server.round([Update(client, np.full(6, number + i, np.float32), 1) for i, client in enumerate(CLIENTS)])
    with server:
        return to_host(server.x).copy()


@pytest.mark.parametrize("outside", [False, True], ids=["a signal", "an exception from outside"])
def test_a_stop_at_any_line_of_abort(cuda_device, outside):
    def handler(number, frame):
        raise Stopped

    def stop():
        if outside:
            raise Stopped
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, handler)
    due = ended(a_server("cpu"))
    at, goes_on = 1, True
    try:
        while goes_on:
            server = a_server("cuda")
            opened = server.open_round()
            for client in CLIENTS[:2]:
                opened.add(client, np.full(6, 50, np.float32), steps=1)
            with suppress(Stopped):
                goes_on = each_line(lambda _, opened=opened: opened.abort(), server, at, stop)
            opened.abort()  # where the first had not begun
            np.testing.assert_array_equal(ended(server), due)
            at += 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert at > 20
