"""Replies that cannot be believed are refused by name, and the round goes on; late ones count if they may."""

import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

from fedcore.adapters import npy
from tests.adapters.flower.federation import METHODS, NODES, make_app, make_data, run, simulate
from tests.adapters.flower.local_grid import LocalGrid

ORDER = sorted(range(5), key=lambda i: NODES[i])


def make_grid(spoil=None, steps=(4, 4, 4, 4, 4)):
    dataset, parts = make_data()
    return LocalGrid({NODES[i]: (make_app(i, dataset, parts, steps[i]), {}) for i in range(5)}, spoil)


def bytes_of(arrays, data, name="0.weight"):
    old = arrays[name]
    arrays[name] = Array(old.dtype, old.shape, old.stype, data)


def huge(old):
    return (
        npy.write(np.zeros((7, 12), np.float32))
        .replace(b"(7, 12)", b"(9999999999999, 99999999999)")
        .replace(b"\x76\x00", b"\x8a\x00")
    )


BAD = {
    "not an npy": lambda arrays, reply: bytes_of(arrays, b"no array at all"),
    "a pickle": lambda arrays, reply: bytes_of(arrays, b"\x80\x04\x95" + bytes(100)),
    "a cut payload": lambda arrays, reply: bytes_of(arrays, arrays["0.weight"].data[:-1]),
    "a header of 64 KiB": lambda arrays, reply: bytes_of(arrays, b"\x93NUMPY\x01\x00\xff\xff" + b" " * 65535),
    "an absurd shape": lambda arrays, reply: bytes_of(arrays, huge(arrays["0.weight"])),
    "objects": lambda arrays, reply: bytes_of(arrays, arrays["0.weight"].data.replace(b"'<f4'", b"'|O8'")),
    "another shape": lambda arrays, reply: arrays.update({"0.weight": Array(np.zeros((12, 7), np.float32))}),
    "another dtype": lambda arrays, reply: arrays.update({"1.num_batches_tracked": Array(np.zeros((), np.float32))}),
    "fields that lie": lambda arrays, reply: arrays.update(
        {"0.bias": Array("float32", (1, 7), "numpy.ndarray", arrays["0.bias"].data)}
    ),
    "another serialisation": lambda arrays, reply: arrays.update({"0.bias": Array("float32", (7,), "pickle", b"\x80")}),
    "a name too many": lambda arrays, reply: arrays.update({"more": Array(np.zeros(1, np.float32))}),
    "a name too few": lambda arrays, reply: arrays.pop("0.weight"),
    "a NaN": lambda arrays, reply: arrays.update({"0.bias": Array(np.full(7, np.nan, np.float32))}),
    "a NaN in a buffer": lambda arrays, reply: arrays.update({"1.running_var": Array(np.full(7, np.nan, np.float32))}),
    "no examples": lambda arrays, reply: reply.content["metrics"].pop("num-examples"),
    "examples < 1": lambda arrays, reply: reply.content["metrics"].update({"num-examples": 0}),
    "examples in a list": lambda arrays, reply: reply.content["metrics"].update({"num-examples": [3]}),
    "steps < 1": lambda arrays, reply: reply.content["fedcore"].update({"steps": -4}),
    "steps that are text": lambda arrays, reply: reply.content["fedcore"].update({"steps": "4" * 10**6}),
    "a rate of NaN": lambda arrays, reply: reply.content["fedcore"].update({"lr": float("nan")}),
    "two models": lambda arrays, reply: reply.content.update({"again": ArrayRecord()}),
    "two records of metrics": lambda arrays, reply: reply.content.update({"again": MetricRecord()}),
    "no model": lambda arrays, reply: reply.content.pop("arrays"),
    "metrics where the method's record should be": lambda arrays, reply: reply.content.update(
        {"fedcore": MetricRecord({"steps": 4})}
    ),
}


@pytest.mark.parametrize("why", BAD)
def test_a_bad_reply_is_refused_by_name_and_the_round_goes_on(why):
    bad = NODES[2]

    def spoil(node, reply):
        if node == bad:
            BAD[why](reply.content["arrays"], reply)

    strategy, result = run("MIFA", make_grid(spoil), 2)
    for report in strategy.reports:
        assert [node for node, _ in report.rejected] == [bad]
        assert len(report.rejected[0][1]) < 500
        assert len(report.accepted) == 4
    expected = simulate("MIFA", METHODS["MIFA"], 2 * [[i for i in ORDER if i != 2]])
    np.testing.assert_array_equal(strategy.server.x, expected.x)
    assert result.train_metrics_clientapp.keys() == {1, 2}


@pytest.mark.parametrize("why", ["missing", "short", "NaN", "two arrays"])
def test_a_bad_second_vector_is_refused(why):
    def spoil(node, reply):
        if node == NODES[0]:
            control = reply.content.pop("fedcore.control")
            if why == "short":
                reply.content["fedcore.control"] = ArrayRecord([np.zeros(3, np.float32)])
            elif why == "NaN":
                reply.content["fedcore.control"] = ArrayRecord([control["0"].numpy() * np.float32("nan")])
            elif why == "two arrays":
                reply.content["fedcore.control"] = ArrayRecord(2 * [control["0"].numpy()])

    strategy, _ = run("SCAFFOLDMVR", make_grid(spoil), 2)
    expected = simulate("SCAFFOLDMVR", {}, 2 * [[i for i in ORDER if i != 0]])
    np.testing.assert_array_equal(strategy.server.x, expected.x)
    assert [[node for node, _ in report.rejected] for report in strategy.reports] == [[NODES[0]], [NODES[0]]]


def test_float64_and_fortran_order_count():
    def spoil(node, reply):
        arrays = reply.content["arrays"]
        arrays["0.weight"] = Array(np.asfortranarray(arrays["0.weight"].numpy()).astype(np.float64))

    strategy, _ = run("MimiC", make_grid(spoil), 2)
    expected = simulate("MimiC", {}, 2 * [ORDER])
    np.testing.assert_array_equal(strategy.server.x, expected.x)


def test_incomplete_work_counts_by_scheme_C():
    steps = [4, 1, 4, 2, 3]
    dataset, parts = make_data()
    sizes = {NODES[i]: len(part) for i, part in enumerate(parts)}
    strategy, _ = run("FlexibleFedAvg", make_grid(steps=steps), 1, client_sizes=sizes.get)
    from fedcore import Server
    from tests.adapters.flower.federation import BATCH, SEED, InProcess, make_module

    server = Server(make_module(), strategy.algorithm, dict(enumerate([len(part) for part in parts])), lr=0.1)
    sent, updates = server.broadcast(ORDER), []
    for i in ORDER:
        engine = InProcess(make_module(), dataset, parts, batch=BATCH, steps=steps[i], seed=SEED)
        [update] = engine.updates(server.broadcast([i]))
        updates.append(update._replace(value=update.value.copy()))
    assert sent.round == 0
    server.round(updates)
    np.testing.assert_array_equal(strategy.server.x, server.x)


def test_nodes_tell_their_examples_when_they_are_asked_and_later_if_they_were_away():
    grid = make_grid()
    grid.dead = {NODES[1]}

    def before_round(t):
        grid.dead = {NODES[1]} if t < 2 else set()

    strategy, _ = run("FlexibleFedAvg", grid, 4, before_round=before_round)
    first = [i for i in range(5) if i != 1]
    without = [i for i in ORDER if i != 1]
    assert [len(report.accepted) for report in strategy.reports] == [4, 4, 5, 5]
    assert strategy.server.clients.number(NODES[1]) == 4  # it came last
    assert set(strategy.server.clients) == set(NODES)
    assert [kind for kind, node, _ in grid.sent if node == NODES[1]] == ["query", "query", "query", "train", "train"]
    assert len(first) == len(without)


def test_replies_after_the_deadline_count_later_against_the_x_that_they_started_from():
    slow = NODES[3]
    grid = make_grid()

    def before_round(t):
        grid.slow = {slow} if t == 1 else set()
        if t == 3:
            grid.go(slow)

    strategy, _ = run("MIFA", grid, 5, before_round=before_round, timeout=0.05, max_staleness=3)
    rest = [i for i in ORDER if i != 3]
    assert [sorted(map(NODES.index, report.accepted)) for report in strategy.reports] == [
        [0, 1, 2, 3, 4], [0, 1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4],
    ]  # fmt: skip
    assert [t for t, (kind, node, _) in enumerate(grid.sent) if node == slow] == [2, 7, 20]  # not asked while at work
    server = simulate("MIFA", METHODS["MIFA"], [ORDER], max_staleness=3)
    from fedcore.simulation.in_process import InProcess
    from tests.adapters.flower.federation import BATCH, SEED, STEPS, make_module

    dataset, parts = make_data()
    engine = InProcess(make_module(), dataset, parts, batch=BATCH, steps=STEPS, seed=SEED)
    [late] = [update._replace(value=update.value.copy(), round=1) for update in engine.updates(server.broadcast([3]))]
    server.round(engine.updates(server.broadcast(rest)))
    server.round(engine.updates(server.broadcast(rest)))
    with server.open_round() as opened:
        for update in engine.updates(server.broadcast(rest)):
            opened.add_batch([update])
        opened.add_batch([late])
    server.round(engine.updates(server.broadcast(ORDER)))
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
    """One that knows nothing of fedcore: it replies with arrays and num-examples, as a float even."""

    def spoil(node, reply):
        del reply.content["fedcore"]
        reply.content["metrics"]["num-examples"] = float(reply.content["metrics"]["num-examples"])

    strategy, _ = run("FedAvg", make_grid(spoil), 2)
    np.testing.assert_array_equal(strategy.server.x, simulate("FedAvg", {}, 2 * [ORDER]).x)


def test_metrics_are_weighted_means_of_those_heard_and_odd_ones_are_left_out():
    def spoil(node, reply):
        if node == NODES[0]:
            reply.content["metrics"]["loss"] = [1.0, 2.0]

    strategy, result = run("FedAvg", make_grid(spoil), 1)
    _, parts = make_data()
    sizes = np.array([len(part) for part in parts])[1:]
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx((sizes @ np.arange(1, 5)) / sizes.sum())
    assert len(strategy.reports[0].accepted) == 5


def test_config_says_round_and_rate():
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
