"""Wrong replies are rejected by node, and the round continues; late replies count within max_staleness."""

import time

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord

from fedcore import RoundPolicy, Update
from fedcore.algorithms import SCAFFOLD
from tests.adapters.drivers import MODEL, Raw
from tests.adapters.drivers.flower import Flower, array
from tests.adapters.flower.federation import METHODS, NODES, make_data, make_engine, make_grid, run, simulate

ORDER = sorted(range(5), key=lambda i: NODES[i])


def items(form, name):
    return form[name]["items"]


WRONG = {
    "another shape in the fields": lambda form: items(form, "arrays")["b"].update(shape=(1, 4)),
    "another serialisation": lambda form: items(form, "arrays")["b"].update(stype="pickle"),
    "a name too many": lambda form: items(form, "arrays").update(more=array(np.zeros(1, np.float32))),
    "a name too few": lambda form: items(form, "arrays").pop("w"),
    "a NaN in a buffer": lambda form: items(form, "arrays").update(running_var=array(np.float32([np.nan, 1]))),
    "no examples": lambda form: items(form, "metrics").pop("num-examples"),
    "examples in a list": lambda form: items(form, "metrics").update({"num-examples": [3]}),
    "steps as text": lambda form: items(form, "fedcore").update(steps="4" * 10**6),
    "two models": lambda form: form.update(again={"kind": "arrays", "items": {}}),
    "no model": lambda form: form.pop("arrays"),
    "two records of metrics": lambda form: form.update(again={"kind": "metrics", "items": {}}),
    "metrics in place of the method's record": lambda form: form.update(fedcore={"kind": "metrics", "items": {}}),
    "no second vector": lambda form: form.pop("fedcore.control"),
    "a short second vector": lambda form: items(form, "fedcore.control").update({"0": array(np.zeros(3, np.float32))}),
    "a NaN in the second vector": lambda form: items(form, "fedcore.control").update(
        {"0": array(np.full(10, np.nan, np.float32))}
    ),
    "two second vectors": lambda form: items(form, "fedcore.control").update({"1": array(np.zeros(10, np.float32))}),
}
"""Changes of an honest reply's form."""


def test_a_wrong_reply_is_rejected_by_its_node_and_the_round_continues():
    flower, x0 = Flower(), MODEL | {"running_var": np.ones(2, np.float32)}

    def work(t, i, sent, task):
        y = {name: x + np.float32(1 + i) for name, x in sent.items()}
        form = flower.form(Update(i, y, steps=4, examples=1, control=np.ones(10, np.float32)), sent)
        if i < len(WRONG):
            [*WRONG.values()][i](form)
        return Raw(form)

    n = len(WRONG) + 2
    server, reports, _ = flower.run(SCAFFOLD(control="sent"), work, n=n, rounds=2, x0=x0)
    ids = flower.ids(n)
    for report in reports:
        assert report.accepted == tuple(ids[-2:])
        assert {node for node, _ in report.rejected} == set(ids[:-2])
        assert all(len(reason) < 500 for _, reason in report.rejected)
    assert np.isfinite(server.x).all()


def test_float64_and_fortran_order_count():
    def spoil(node, reply):
        arrays = reply.content["arrays"]
        arrays["0.weight"] = Array(np.asfortranarray(arrays["0.weight"].numpy()).astype(np.float64))

    strategy, _ = run("MimiC", make_grid(spoil), 2)
    np.testing.assert_array_equal(strategy.server.x, simulate("MimiC", {}, 2 * [ORDER]).x)


def test_nodes_report_their_examples_to_a_query_also_in_a_later_round():
    grid = make_grid()
    grid.dead = {NODES[1]}

    def before_round(t):
        grid.dead = {NODES[1]} if t < 2 else set()

    strategy, _ = run("FlexibleFedAvg", grid, 4, before_round=before_round)
    assert [len(report.accepted) for report in strategy.reports] == [4, 4, 5, 5]
    assert strategy.server.clients.number(NODES[1]) == 4  # it came last
    assert set(strategy.server.clients) == set(NODES)
    assert [kind for kind, node, _ in grid.sent if node == NODES[1]] == ["query", "query", "query", "train", "train"]


def test_replies_after_the_deadline_count_later_against_the_x_that_they_started_from():
    slow = NODES[3]
    grid = make_grid()

    def before_round(t):
        grid.slow = {slow} if t == 1 else set()
        if t == 3:
            grid.go(slow)

    strategy, _ = run("MIFA", grid, 5, before_round=before_round, timeout=0.05, policy=RoundPolicy(max_staleness=3))
    rest = [i for i in ORDER if i != 3]
    assert [sorted(map(NODES.index, report.accepted)) for report in strategy.reports] == [
        [0, 1, 2, 3, 4], [0, 1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4],
    ]  # fmt: skip
    assert [t for t, (kind, node, _) in enumerate(grid.sent) if node == slow] == [2, 7, 20]  # not asked while at work
    server = simulate("MIFA", METHODS["MIFA"], [ORDER], policy=RoundPolicy(max_staleness=3))
    engine = make_engine()
    [late] = [update._replace(value=update.value.copy(), round=1) for update in engine.updates(server.broadcast([3]))]
    server.round(engine.updates(server.broadcast(rest)))
    server.round(engine.updates(server.broadcast(rest)))
    with server.open_round() as opened:
        for update in engine.updates(server.broadcast(rest)):
            opened.add_batch([update])
        opened.add_batch([late])
    server.round(engine.updates(server.broadcast(ORDER)))
    np.testing.assert_array_equal(strategy.server.x, server.x)


def test_a_buffer_closes_at_its_kth_reply_while_other_nodes_work():
    """Rounds: C, D, E are fast; then A and B are ready, one round late, beside E; then all three are fresh."""
    grid, (a, b, c, d, e) = make_grid(), [NODES[i] for i in ORDER]

    def before_round(t):
        grid.slow = [{a, b}, {c, d}, set(), set()][t] | grid.slow
        for node in [[], [a, b], [], []][t]:
            grid.go(node)

    policy = RoundPolicy(buffer=3, max_staleness=3, discount=0.5)
    strategy, _ = run("FedAvg", grid, 3, before_round=before_round, policy=policy, min_train_nodes=5)
    index = dict(zip((a, b, c, d, e), ORDER, strict=True))
    accepted = [list(zip(report.accepted, report.ages.tolist(), strict=True)) for report in strategy.reports]
    assert accepted == [[(c, 0), (d, 0), (e, 0)], [(e, 0), (a, 1), (b, 1)], [(a, 0), (b, 0), (e, 0)]]
    assert {report.closed for report in strategy.reports} == {"buffer"}
    asked = [node for kind, node, _ in grid.sent if kind == "train"]
    assert asked == [a, b, c, d, e, c, d, e, a, b, e]  # those at work are not asked again

    server = simulate("FedAvg", {}, [], policy=policy)
    server.add_clients(list(range(5)))
    engine, sent = make_engine(), {}
    for t, updates in enumerate(accepted):
        for update in engine.updates(server.broadcast(ORDER)):
            sent[update.client, t] = update._replace(value=update.value.copy(), round=t)
        server.push([sent[index[node], t - age] for node, age in updates])
    np.testing.assert_array_equal(strategy.server.x, server.x)


def test_a_round_does_not_wait_past_its_deadline_and_late_replies_are_dropped_by_default():
    grid = make_grid()
    grid.slow = {NODES[0]}

    def before_round(t):
        if t == 1:
            grid.go(NODES[0])

    began = time.monotonic()
    strategy, _ = run("FedAvg", grid, 2, before_round=before_round, timeout=0.2)
    assert 0.2 < time.monotonic() - began < 5
    assert [len(report.accepted) for report in strategy.reports] == [4, 5]
    expected = simulate("FedAvg", {}, [[i for i in ORDER if i != 0], ORDER])
    np.testing.assert_array_equal(strategy.server.x, expected.x)


def test_a_stock_client_app_takes_part_in_fedavg():
    """One without fedcore: it replies with arrays and num-examples, here as a float."""

    def spoil(node, reply):
        del reply.content["fedcore"]
        reply.content["metrics"]["num-examples"] = float(reply.content["metrics"]["num-examples"])

    strategy, _ = run("FedAvg", make_grid(spoil), 2)
    np.testing.assert_array_equal(strategy.server.x, simulate("FedAvg", {}, 2 * [ORDER]).x)


def test_metrics_are_weighted_means_without_those_of_another_form():
    def spoil(node, reply):
        if node == NODES[0]:
            reply.content["metrics"]["loss"] = [1.0, 2.0]

    strategy, result = run("FedAvg", make_grid(spoil), 1)
    _, parts = make_data()
    sizes = np.array([len(part) for part in parts])[1:]
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx((sizes @ np.arange(1, 5)) / sizes.sum())
    assert len(strategy.reports[0].accepted) == 5


def test_the_configuration_has_round_and_rate():
    seen = []
    grid = make_grid(lambda node, reply: None)
    push = grid.push_messages

    def watch(messages):
        messages = list(messages)
        seen.extend(ConfigRecord(dict(message.content["config"])) for message in messages)
        return push(messages)

    grid.push_messages = watch
    run("FedAvg", grid, 2)
    assert [(config["server-round"], config["lr"]) for config in seen] == 5 * [(1, 0.1)] + 5 * [(2, 0.1)]
