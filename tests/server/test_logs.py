"""Log lines of rounds: rejections only, and the clients that a method waits for."""

import logging

import numpy as np
import pytest

from fedcore import Model, Network, Server, Update, algorithms
from fedcore.algorithms import MIFA
from fedcore.server import rejection_summary
from tests import kit

STEPS = "steps=None: must be an integer in 1..1000000"


def server_of(clients):
    return Server(np.zeros(2, np.float32), MIFA(wait=False), clients=clients, lr=0.1)


def warnings_of(caplog):
    return [(r.name, r.levelno, r.getMessage()) for r in caplog.records]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_round_with_rejections_only_warns_once(one_by_one, caplog):
    server = server_of(500)
    server.round([])
    assert not caplog.records  # a round without updates is no error
    updates = [Update(i, np.zeros(2, np.float32), steps=None) for i in range(500)]
    kit.one_by_one(server, updates) if one_by_one else server.round(updates)
    message = f"round 1 accepted no update and rejected 500: 500 x {STEPS}"
    assert warnings_of(caplog) == [("fedcore.server", logging.WARNING, message)]


def test_a_round_with_an_accepted_update_does_not_warn(caplog):
    server = server_of(2)
    server.round([Update(0, np.zeros(2, np.float32), steps=None), Update(1, np.zeros(2, np.float32), steps=1)])
    with server.open_round() as round:
        round.add(0, np.zeros(2, np.float32), steps=None)
        round.abort()
    assert not caplog.records


def test_rejections_of_the_caller_count(caplog):
    with server_of(2).open_round() as round:
        round.reject(1, "header: expected numpy's, got b'junk'")
    assert [message for _, _, message in warnings_of(caplog)] == [
        "round 0 accepted no update and rejected 1: 1 x header: expected numpy's, got b'junk'"
    ]


def test_a_network_warns_too(caplog):
    network = Network([np.zeros(2, np.float32)] * 3, np.full((3, 3), 1 / 3), lr=0.1)
    with network.open_round() as round:
        for node in range(3):
            round.add(node, np.full(2, np.nan, np.float32), steps=1)
    [(name, _, message)] = warnings_of(caplog)
    assert name == "fedcore.sim.network"
    assert message.startswith("round 0 accepted no update and rejected 3: 3 x update: a number is NaN or infinite")


def test_a_log_handler_may_read_the_round():
    seen = []

    class Looks(logging.Handler):
        def emit(self, record):
            seen.append((round.is_open, round.report.rejected[0][0], server.round_number))
            round.abort()  # of a finished round: no effect

    server, handler, logger = server_of(1), Looks(), logging.getLogger("fedcore")
    logger.addHandler(handler)
    try:
        with server.open_round() as round:
            round.add(0, np.zeros(1, np.float32), steps=1)
    finally:
        logger.removeHandler(handler)
    assert seen == [(False, 0, 1)]


def test_reasons_that_differ_in_numbers_are_summarised_together():
    long = "update: expected a length |x - y| of at most 10 x {}, the median of those heard (max_norm_ratio), got {}"
    rejected = [
        (0, long.format(9.9, 1e30)),
        (1, STEPS),
        (2, long.format("1.25e-05", 784)),
        (3, STEPS.replace("None", "'many'")),
        (4, STEPS),
    ]
    assert rejection_summary(rejected) == f"3 x {STEPS} (or the like); 2 x {long.format(9.9, 1e30)} (or the like)"
    assert rejection_summary([]) == ""


def test_a_summary_stays_short():
    rejected = [(i, f"model: unexpected {'w' * i}") for i in range(100)]
    summary = rejection_summary([(0, STEPS), (1, STEPS), *rejected])
    assert summary.startswith(f"2 x {STEPS}; 1 x model: unexpected ; ")
    assert summary.endswith("; 96 x other reasons")


IDS = [f"a{i}" for i in range(11)]


def rounds(server, cohorts):
    return [server.round([Update(c, server.x + 1, 1) for c in cohort]).waiting_for for cohort in cohorts]


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "fedcore.server")
    return lambda: [(record.levelname, record.message) for record in caplog.records]


def test_mifa_logs_the_clients_it_waits_for(told):
    server = Server(np.zeros(2, np.float32), "MIFA", IDS, lr=0.1)
    everybody_else = [c for c in IDS if c != "a7"]
    assert rounds(server, [IDS[:4], everybody_else, everybody_else, everybody_else, everybody_else]) == [7, 1, 1, 1, 1]
    waits = "x is unchanged: waiting for 1 of 11 clients: 'a7'"
    assert told() == [
        ("INFO", "x is unchanged: waiting for 7 of 11 clients: 'a4', 'a5', 'a6', 'a7', 'a8', and 2 more"),
        ("INFO", waits),
        ("WARNING", f"{waits}; use MIFA(wait=False) to start without them, or remove_client() to remove one"),
    ]
    assert not server.x.any()
    server.remove_client("a7")
    assert rounds(server, [everybody_else]) == [0]
    assert server.x.any()
    assert len(told()) == 3
    server.add_clients("b")
    assert rounds(server, [IDS[:2]]) == [1]
    assert told()[3] == ("INFO", "x is unchanged: waiting for 1 of 11 clients: 'b'")
    server = Server(Model(dict.fromkeys("xy", np.zeros(2)), {"x": "x"}), "MIFA", 3, lr=0.1)
    for client, sent in enumerate(("xy", "xy", "x")):  # the last client leaves the group y with its first update
        server.round([Update(client, dict.fromkeys(sent, np.ones(2)), 1)])
    assert [line[28:] for _, line in told()[4:]] == ["2 of 3 clients: 1, 2", "1 of 3 clients: 2"]


@pytest.mark.parametrize("method", [algorithms.MIFA(wait=False), "FedAvg", "MimiC", "SCAFFOLD"])
def test_methods_that_wait_for_no_client_log_nothing(method, told):
    assert rounds(Server(np.zeros(2, np.float32), method, IDS, lr=0.1), [IDS[:3], [], IDS[:3]]) == [0, 0, 0]
    assert told() == []
