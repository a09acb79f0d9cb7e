"""Nodes that connect and never answer: they are not registered, no round waits for them, and the log names them."""

import time

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedcore import RoundPolicy
from fedcore.adapters.flower import StreamingGrid
from tests.adapters.flower.federation import NODES, make_grid, run
from tests.adapters.flower.local_grid import LocalGrid

PHANTOMS = [7 * 2**32 + i for i in range(90)]


def grid_of(phantoms):
    """Five nodes that answer, and the phantoms, which only report their sizes."""
    grid = make_grid()
    grid.nodes |= dict.fromkeys(phantoms, grid.nodes[NODES[0]])
    real = grid._reply

    def reply(message, node):
        return None if node in phantoms and message.metadata.message_type == "train" else real(message, node)

    grid._reply = reply
    pull = grid.pull_messages
    grid.pull_messages = lambda numbers: [message for message in pull(numbers) if message is not None]
    return grid


@pytest.mark.parametrize(
    ("method", "how"),
    [("SCAFFOLD", {}), ("MimiC", {}), ("MIFA", {"wait": True}), *[("FlexibleFedAvg", {"scheme": s}) for s in "ABC"]],
)
def test_phantoms_change_nothing(method, how):
    """Not even if they report their sizes."""
    xs = []
    for phantoms in ([], PHANTOMS):
        strategy, _ = run(method, grid_of(phantoms), 3, timeout=0.2, **how)
        assert set(strategy.server.clients) == set(NODES)
        assert [len(report.accepted) for report in strategy.reports] == [5, 5, 5]
        xs.append(strategy.server.x)
    tolerance = 1e-5 if "scheme" in how else 0  # of its shares
    np.testing.assert_allclose(*xs, rtol=tolerance, atol=tolerance / 10)
    assert strategy.reports[-1].gamma > 0


def test_the_log_names_silent_nodes(caplog):
    caplog.set_level("INFO")
    strategy, _ = run("MIFA", grid_of(PHANTOMS[:2]), 2, timeout=0.3, wait=True)
    lines = [record.message for record in caplog.records if "did not reply" in record.message]
    assert len(lines) == 2
    assert f"2 clients did not reply ({PHANTOMS[0]}, {PHANTOMS[1]})" in lines[0]
    assert strategy.server.x.any()


def test_a_silent_node_is_registered_with_its_first_answer():
    grid = grid_of([])
    grid.slow = {NODES[2]}

    def before_round(t):
        if t == 1:
            grid.go(NODES[2])

    strategy, _ = run("MIFA", grid, 2, before_round=before_round, timeout=0.3, wait=True)
    assert [NODES[2] in report.accepted for report in strategy.reports] == [False, True]
    assert set(strategy.server.clients) == set(NODES)


def test_a_policy_closes_rounds_before_the_timeout():
    """Two of five nodes are silent; three are 60 %."""
    grid = grid_of([])
    grid.slow = set(NODES[:2])
    strategy, _ = run("MimiC", grid, 2, timeout=600, policy=RoundPolicy(min_clients=3, min_share=0.6))
    assert [(set(report.missing), report.closed) for report in strategy.reports] == [(grid.slow, "min_share")] * 2


def test_over_selection_asks_more_nodes_and_drops_the_last_ones():
    policy = RoundPolicy(min_share=0.5, over_selection=2)
    (report,) = run("FedAvg", grid_of([]), 1, fraction_train=0.4, policy=policy)[0].reports  # 4 of 5 nodes are asked
    assert (len(report.accepted), len(report.missing)) == (2, 2)


def test_a_round_with_too_few_replies_for_its_policy_is_repeated():
    grid, how = grid_of([]), {"policy": RoundPolicy(min_clients=4)}
    grid.dead = set(NODES[:3])
    strategy, _ = run("FedAvg", grid, 3, before_round=lambda t: grid.dead.clear() if t else None, **how)
    assert [(report.round, len(report.accepted)) for report in strategy.reports] == [(0, 5), (1, 5)]
    assert strategy.server.round_number == 2


def echoing():
    """Five nodes that answer with nothing."""
    return LocalGrid({node: (lambda message, context: Message(RecordDict(), reply_to=message), {}) for node in NODES})


def test_a_call_without_messages_waits_for_the_late_replies():
    grid = echoing()
    numbers = grid.push_messages([Message(RecordDict(), node, "train") for node in NODES])
    streaming, start = StreamingGrid(grid), time.monotonic()
    streaming.await_also(numbers)
    replies = list(streaming.send_and_receive([], timeout=20))
    assert [reply.metadata.reply_to_message_id for reply in replies] == numbers
    assert time.monotonic() - start < 10
