"""Who is waited for is told once every change, and as a warning if a round that heard others left it so."""

import logging

import numpy as np
import pytest

from fedcore import Server, Update, algorithms

IDS = [f"a{i}" for i in range(11)]


def rounds(server, cohorts):
    return [server.round([Update(c, server.x + 1, 1) for c in cohort]).waiting_for for cohort in cohorts]


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "fedcore.server")
    return lambda: [(record.levelname, record.message) for record in caplog.records]


def test_mifa_says_whom_it_waits_for(told):
    server = Server(np.zeros(2, np.float32), "MIFA", IDS, lr=0.1)
    everybody_else = [c for c in IDS if c != "a7"]
    assert rounds(server, [IDS[:4], everybody_else, everybody_else, everybody_else, everybody_else]) == [7, 1, 1, 1, 1]
    assert told() == [
        ("INFO", "x stays, waiting for 7 of 11 clients: 'a4', 'a5', 'a6', 'a7', 'a8', and 2 others"),
        ("INFO", "x stays, waiting for 1 of 11 clients: 'a7'"),
        (
            "WARNING",
            "x stays, waiting for 1 of 11 clients: 'a7': wait=False starts without them, remove_client() removes one",
        ),
    ]
    assert not server.x.any()
    server.remove_client("a7")
    assert rounds(server, [everybody_else]) == [0]
    assert server.x.any()
    assert len(told()) == 3
    server.add_clients("b")
    assert rounds(server, [IDS[:2]]) == [1]
    assert told()[3] == ("INFO", "x stays, waiting for 1 of 11 clients: 'b'")


@pytest.mark.parametrize("method", [algorithms.MIFA(wait=False), "FedAvg", "MimiC", "SCAFFOLD"])
def test_who_waits_for_nobody_says_nothing(method, told):
    assert rounds(Server(np.zeros(2, np.float32), method, IDS, lr=0.1), [IDS[:3], [], IDS[:3]]) == [0, 0, 0]
    assert told() == []
