"""A round that refused everybody says so once, by the logger "fedcore", and sums the reasons up."""

import logging

import numpy as np
import pytest

from fedcore import Network, Server, Update
from fedcore.algorithms import MIFA
from fedcore.server import refusal_summary

STEPS = "steps: expected an integer in 1..1000000, got None"


def server_of(clients):
    return Server(np.zeros(2, np.float32), MIFA(wait=False), clients=clients, lr=0.1)


def warnings_of(caplog):
    return [(r.name, r.levelno, r.getMessage()) for r in caplog.records]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_round_that_heard_nobody_and_refused_somebody_warns_once(one_by_one, caplog):
    server = server_of(500)
    server.round([])
    assert not caplog.records  # nobody came: that is no fault
    updates = [Update(i, np.zeros(2, np.float32), steps=None) for i in range(500)]
    if one_by_one:
        with server.open_round() as round:
            for update in updates:
                round.add_batch([update])
    else:
        server.round(updates)
    message = f"round 1 heard nobody and refused 500: 500 x {STEPS}"
    assert warnings_of(caplog) == [("fedcore.server", logging.WARNING, message)]


def test_a_round_that_heard_somebody_does_not_warn(caplog):
    server = server_of(2)
    server.round([Update(0, np.zeros(2, np.float32), steps=None), Update(1, np.zeros(2, np.float32), steps=1)])
    with server.open_round() as round:
        round.add(0, np.zeros(2, np.float32), steps=None)
        round.abort()
    assert not caplog.records


def test_replies_that_never_became_updates_count(caplog):
    with server_of(2).open_round() as round:
        round.reject(1, "header: expected numpy's, got b'junk'")
    assert [message for _, _, message in warnings_of(caplog)] == [
        "round 0 heard nobody and refused 1: 1 x header: expected numpy's, got b'junk'"
    ]


def test_a_network_warns_as_well(caplog):
    network = Network([np.zeros(2, np.float32)] * 3, np.full((3, 3), 1 / 3), lr=0.1)
    with network.open_round() as round:
        for node in range(3):
            round.add(node, np.full(2, np.nan, np.float32), steps=1)
    [(name, _, message)] = warnings_of(caplog)
    assert name == "fedcore.network"
    assert message.startswith("round 0 heard nobody and refused 3: 3 x update: a number is NaN or infinite")


def test_a_handler_may_look_at_the_round():
    seen = []

    class Looks(logging.Handler):
        def emit(self, record):
            seen.append((round.is_open, round.report.rejected[0][0], server.round_number))
            round.abort()  # of a finished round, which waits for nobody

    server, handler, logger = server_of(1), Looks(), logging.getLogger("fedcore")
    logger.addHandler(handler)
    try:
        with server.open_round() as round:
            round.add(0, np.zeros(1, np.float32), steps=1)
    finally:
        logger.removeHandler(handler)
    assert seen == [(False, 0, 1)]


def test_reasons_that_differ_in_numbers_or_in_what_came_are_of_one_kind():
    long = "update: expected a length |x - y| of at most 10 x {}, the median of those heard (max_norm_ratio), got {}"
    rejected = [
        (0, long.format(9.9, 1e30)),
        (1, STEPS),
        (2, long.format("1.25e-05", 784)),
        (3, STEPS.replace("None", "'many'")),
        (4, STEPS),
    ]
    assert refusal_summary(rejected) == f"3 x {STEPS} (or the like); 2 x {long.format(9.9, 1e30)} (or the like)"
    assert refusal_summary([]) == ""


def test_clients_cannot_make_a_summary_long():
    rejected = [(i, f"model: unexpected {'w' * i}") for i in range(100)]
    summary = refusal_summary([(0, STEPS), (1, STEPS), *rejected])
    assert summary.startswith(f"2 x {STEPS}; 1 x model: unexpected ; ")
    assert summary.endswith("; 96 x other reasons")
