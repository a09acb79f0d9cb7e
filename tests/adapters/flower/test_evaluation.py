"""Replies to *evaluate* and to the query for examples are read as strictly as those to *train*."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedcore.adapters.flower.metrics import Collected
from fedcore.rules import CapExamples
from tests.adapters.flower.federation import NODES, make_app, make_data, run
from tests.adapters.flower.local_grid import LocalGrid

BAD = NODES[2]
_, PARTS = make_data()
SIZES = {node: len(part) for node, part in zip(NODES, PARTS, strict=True)}
OTHERS = [node for node in NODES if node != BAD]


def make_grid(kind, spoil):
    """Five nodes with accuracies 0.1 to 0.5; ``spoil`` changes the answers of one of them to messages of a kind."""

    def app_of(i):
        app = make_app(i, *make_data())

        @app.evaluate()
        def _(message, context):
            metrics = MetricRecord({"num-examples": len(PARTS[i]), "accuracy": (i + 1) / 10})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        return app

    def change(node, reply):
        if node == BAD and reply.metadata.message_type == kind:
            spoil(reply.content)

    return LocalGrid({NODES[i]: (app_of(i), {}) for i in range(5)}, change)


def reporting(**numbers):
    named = {name.replace("_", "-"): number for name, number in numbers.items()}
    return lambda content: content["metrics"].update(named)


def mean(nodes):
    weights = np.array([SIZES[node] for node in nodes])
    return float(weights @ [(NODES.index(node) + 1) / 10 for node in nodes] / weights.sum())


WRONG = {
    "two records": (lambda content: content.update({"again": MetricRecord({"num-examples": 1})}), "2 metric records"),
    "none": (lambda content: [content.pop(name) for name in [*content]], "0 metric records"),
    "a record of another name": (lambda content: content.update(m=content.pop("metrics")), "names or lengths"),
    "a metric too many": (reporting(loss=1), "names or lengths"),
    "a metric too few": (lambda content: content["metrics"].pop("accuracy"), "names or lengths"),
    "a list for a number": (reporting(accuracy=[0.5]), "names or lengths"),
    "no examples": (lambda content: content["metrics"].pop("num-examples"), "num-examples="),
    "examples in a list": (reporting(num_examples=[1]), "num-examples="),
    "zero examples": (reporting(num_examples=0), "num-examples="),
    "examples below zero": (reporting(num_examples=-sum(SIZES.values()) + SIZES[BAD]), "num-examples="),
    "too many examples": (reporting(num_examples=2**62), "num-examples="),
    "NaN examples": (reporting(num_examples=float("nan")), "num-examples="),
    "a NaN": (reporting(accuracy=float("nan")), "metric 'accuracy'"),
    "an infinity": (reporting(accuracy=float("inf")), "metric 'accuracy'"),
    "a number past float32's range": (reporting(accuracy=1e300), "metric 'accuracy'"),
    "10^5 numbers": (reporting(accuracy=[0.5] * 10**5), "metrics: 800"),
    "10^4 metrics": (lambda content: content["metrics"].update({f"m{i}": i for i in range(10**4)}), "bytes"),
}


def replies(changes=None):
    """The replies of five nodes, by node, of which some are changed."""
    contents = {}
    for i, node in enumerate(NODES):
        metrics = MetricRecord({"num-examples": len(PARTS[i]), "accuracy": (i + 1) / 10})
        contents[node] = RecordDict({"metrics": metrics})
        (changes or {}).get(node, lambda content: None)(contents[node])
    return {node: SimpleNamespace(content=content) for node, content in contents.items()}


def collected(replies):
    metrics = Collected()
    for node, reply in replies.items():
        metrics.add(node, reply)
    return metrics.usual("num-examples", "test")


@pytest.mark.parametrize("why", WRONG)
def test_a_reply_with_wrong_metrics_is_rejected_by_its_node(why):
    spoil, reason = WRONG[why]
    contents, [(node, text)] = collected(replies({BAD: spoil}))
    assert node == BAD
    assert reason in text
    assert contents == [reply.content for node, reply in replies().items() if node != BAD]


def test_an_evaluation_continues_without_a_rejected_reply(caplog):
    spoil, _ = WRONG["a NaN"]
    strategy, result = run("MIFA", make_grid("evaluate", spoil), 2, fraction_evaluate=1.0)
    assert [len(report.accepted) for report in strategy.reports] == [5, 5]
    assert [node for node, _ in strategy.left_out] == [BAD]
    for number in (1, 2):
        assert dict(result.evaluate_metrics_clientapp[number]) == {"accuracy": pytest.approx(mean(OTHERS))}
    assert sum(f"rejected 1 ({BAD}), accepted 4: 1 x" in record.message for record in caplog.records) == 2


def claimed_mean(claim):
    """The mean where the node that claims so many examples counts with 10 times the median of the claims."""
    claims = np.array([claim if node == BAD else SIZES[node] for node in NODES], float)
    weights = np.minimum(claims, 10 * np.sort(claims)[2])
    return float(weights @ [(i + 1) / 10 for i in range(5)] / weights.sum())


@pytest.mark.parametrize("kind", ["evaluate", "train"])
def test_a_claim_of_examples_weighs_up_to_10_medians_in_a_mean_too(kind, caplog):
    grid = make_grid(kind, reporting(num_examples=10**9))
    if kind == "train":
        number = lambda node: {"accuracy": (NODES.index(node) + 1) / 10}  # noqa: E731
        spoil, grid.spoil = grid.spoil, None

        def both(node, reply):
            if reply.metadata.message_type == "train":
                reply.content["metrics"].update(number(node))
            spoil(node, reply)

        grid.spoil = both
    strategy, result = run("MIFA", grid, 1, fraction_evaluate=1.0, aggregation=[CapExamples(10)])
    found = result.evaluate_metrics_clientapp if kind == "evaluate" else result.train_metrics_clientapp
    assert found[1]["accuracy"] == pytest.approx(claimed_mean(10**9))
    assert strategy.left_out == []
    [line] = [record.message for record in caplog.records if "CapExamples(10)" in record.message]
    assert f"node {BAD}: examples capped" in line


def test_honest_replies_all_count_and_whole_floats_too():
    strategy, result = run(
        "MIFA", make_grid("evaluate", reporting(num_examples=float(SIZES[BAD]))), 1, fraction_evaluate=1.0
    )
    assert strategy.left_out == []
    assert dict(result.evaluate_metrics_clientapp[1]) == {"accuracy": pytest.approx(mean(NODES))}


def test_an_evaluation_without_an_accepted_reply_is_none_and_an_error(caplog):
    grid = make_grid("evaluate", lambda content: None)
    grid.spoil = lambda node, reply: (
        reporting(num_examples=0)(reply.content) if "accuracy" in str(reply.content) else None
    )
    strategy, result = run("MIFA", grid, 1, fraction_evaluate=1.0)
    assert result.evaluate_metrics_clientapp == {}
    assert sorted(node for node, _ in strategy.left_out) == sorted(NODES)
    [line] = [record for record in caplog.records if "rejected" in record.message]
    assert (line.levelname, "accepted 0: 5 x num-examples" in line.message) == ("ERROR", True)


def test_a_nan_among_the_metrics_of_training_is_left_out_of_the_means_but_the_update_counts(caplog):
    strategy, result = run("FedAvg", make_grid("train", reporting(loss=float("nan"))), 1)
    assert len(strategy.reports[0].accepted) == 5
    weights = np.array([SIZES[node] for node in OTHERS])
    due = weights @ [NODES.index(node) for node in OTHERS] / weights.sum()
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(due)
    assert any(f"> Metrics: rejected 1 ({BAD})" in record.message for record in caplog.records)


def test_the_log_counts_the_reasons_of_wrong_metrics(caplog):
    odd = {NODES[0]: {"loss": float("nan")}, NODES[1]: {"loss": float("-inf")}, NODES[2]: {"error": float("nan")}}
    grid = make_grid("train", lambda content: None)
    change = lambda node, reply: reply.content["metrics"].update({"error": 1.0} | odd.get(node, {}))  # noqa: E731
    grid.spoil = lambda node, reply: change(node, reply) if reply.metadata.message_type == "train" else None
    run("FedAvg", grid, 1)
    [line] = [record.message for record in caplog.records if "> Metrics:" in record.message]
    for part in ("rejected 3", "2 x metric 'loss': ", "1 x metric 'error': "):
        assert part in line


def test_functions_of_metrics_get_only_the_metrics():
    seen = []

    def look(replies, weight):
        seen.extend(replies)
        return MetricRecord({"replies": len(replies)})

    def bloat(node, reply):
        if reply.metadata.message_type == "train":
            reply.content["much"] = ConfigRecord({"text": "x" * 10**6})

    grid = make_grid("train", lambda content: None)
    grid.spoil = bloat
    strategy, _ = run("FedAvg", grid, 1, train_metrics_aggr_fn=look)
    assert len(strategy.reports[0].accepted) == len(seen) == 5
    assert {name for content in seen for name in content} == {"metrics"}


def test_a_node_answers_the_query_only_for_itself():
    def as_another_node(node, reply):
        if node == BAD and reply.metadata.message_type == "query":
            reply.content["metrics"]["num-examples"] = 1
            reply.metadata.__dict__["_src_node_id"] = NODES[0]

    grid = make_grid("query", lambda content: None)
    grid.spoil = as_another_node
    strategy, _ = run("FlexibleFedAvg", grid, 1)
    total = sum(SIZES.values()) - SIZES[BAD] + 1
    shares = dict(
        zip(
            sorted(NODES),
            strategy.server._backend.snapshot.population.shares(strategy.server.clients, sorted(NODES)),
            strict=True,
        )
    )
    assert shares == {node: pytest.approx((1 if node == BAD else SIZES[node]) / total) for node in NODES}


def test_a_wrong_answer_to_the_query_is_named(caplog):
    strategy, _ = run("FlexibleFedAvg", make_grid("query", reporting(num_examples=-3)), 1)
    assert set(strategy.reports[0].accepted) == set(OTHERS)
    [line] = [record.message for record in caplog.records if record.message.startswith("query: rejected 1")]
    assert f"({BAD}), accepted 4: 1 x num-examples=" in line


def test_a_node_that_fails_at_the_query_is_left_out_without_a_warning(caplog):
    grid = make_grid("query", lambda content: None)
    grid.dead = {BAD}
    strategy, _ = run("FlexibleFedAvg", grid, 1)
    assert set(strategy.reports[0].accepted) == set(OTHERS)
    assert "query: rejected" not in caplog.text


def test_an_answer_to_the_query_counts_up_to_10_times_the_median(caplog):
    strategy, _ = run(
        "FlexibleFedAvg", make_grid("query", reporting(num_examples=10**9)), 1, aggregation=[CapExamples(10)]
    )
    honest, _ = run("FlexibleFedAvg", make_grid("query", lambda content: None), 1)
    assert max(strategy.server.client_sizes) <= 10 * sorted(honest.server.client_sizes)[-1]
    [line] = [record.message for record in caplog.records if "CapExamples(10)" in record.message]
    assert line.startswith(f"query: node {BAD}: examples capped")


@pytest.mark.parametrize("liar_first", [False, True])
def test_without_a_most_frequent_form_all_metrics_are_rejected(liar_first):
    two = replies({NODES[1]: lambda content: content["metrics"].update(lie=0.5)})
    order = [NODES[1], NODES[0]] if liar_first else [NODES[0], NODES[1]]
    metrics, rejected = collected({node: two[node] for node in order})
    assert metrics == []
    assert {node for node, _ in rejected} == {*order}


def test_a_function_that_fails_for_one_node_s_metrics_does_not_end_the_run(caplog):
    """If it fails for several nodes with the same metrics, it is at fault."""

    def mean(contents, weight):
        return MetricRecord({"accuracy": np.mean([content["metrics"]["accuracy"] for content in contents])})

    grid = make_grid("train", lambda content: None)
    grid.nodes = {NODES[0]: grid.nodes[NODES[0]]}
    grid.spoil = lambda node, reply: reply.content["metrics"].pop("accuracy", None)
    strategy, result = run("FedAvg", grid, 2, train_metrics_aggr_fn=mean)
    assert [len(report.accepted) for report in strategy.reports] == [1, 1]
    assert not result.train_metrics_clientapp
    assert sum("metrics: the aggregation failed for 1 " in record.message for record in caplog.records) == 2


def test_a_function_of_metrics_that_fails_for_every_node_raises():
    grid = make_grid("train", lambda content: None)
    with pytest.raises(KeyError, match="missing"):
        run("FedAvg", grid, 1, train_metrics_aggr_fn=lambda contents, weight: contents[0]["metrics"]["missing"])


@pytest.mark.parametrize("value", [-5.0, 1e38])
def test_a_value_for_which_a_function_raises_is_left_out(value, caplog):
    """Such as a perplexity: the logarithm of a negative number, the power of a large one."""

    def mean(contents, weight):
        losses = [math.exp(math.log(content["metrics"]["loss"])) for content in contents]
        return MetricRecord({"perplexity": np.mean([math.exp(loss) for loss in losses])})

    grid = make_grid("train", lambda content: None)
    grid.spoil = lambda node, reply: reply.content["metrics"].update(loss=value if node == BAD else 1.0)
    strategy, result = run("FedAvg", grid, 1, train_metrics_aggr_fn=mean)
    assert len(strategy.reports[0].accepted) == 5
    assert result.train_metrics_clientapp[1]["perplexity"] == pytest.approx(math.e)


def test_metrics_weigh_by_fractions_and_by_large_numbers():
    for scale in (0.001, 10**12):
        grid = make_grid("train", lambda content: None)
        grid.spoil = lambda node, reply, scale=scale: reply.content["metrics"].update(
            {"num-examples": reply.content["metrics"]["num-examples"] * scale}
        )
        strategy, result = run("FedAvg", grid, 1)
        assert len(strategy.reports[0].accepted) == 5
        weights = np.array([SIZES[node] for node in NODES])
        assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(weights @ np.arange(5) / weights.sum())
