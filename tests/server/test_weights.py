"""Weights of updates: FedAvg's definition, missing examples, the caller's weights, and second updates."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from fedcore import Compute, EdgeAggregator, RoundPolicy, Server, Storage, Update
from fedcore.algorithms import FedAvg, FedNova, MimiC, QFedAvg
from fedcore.errors import CheckpointError, RangeError, UnknownClientError
from fedcore.rules import CapExamples, Chain, Mean
from tests.algorithms.outsiders import WeighedMIFA
from tests.rejections import rejected_arguments

ONE, THREE = np.float32([1.0]), np.float32([3.0])
X0 = np.zeros(1, np.float32)


def played(server, *replies, **options):
    """The report of a round of (client, model, options)."""
    with server.open_round() as round:
        for client, model, claims in replies:
            round.add(client, model, **{"steps": 1, **options, **claims})
    return round.report


@pytest.mark.parametrize("sizes", [[3e12] * 2, [20, 1000], [150, 900, 12_000], [100] * 9 + [100_000], [2, 1_000_000]])
def test_fedavg_weighs_by_any_number_of_examples(sizes):
    server, values = Server(X0, "FedAvg", len(sizes), lr=0.1), np.arange(len(sizes), dtype=np.float32)
    report = played(server, *[(k, values[k : k + 1], {"examples": size}) for k, size in enumerate(sizes)])
    assert server.x[0] == pytest.approx(np.average(values, weights=sizes), rel=1e-6)
    assert report.weights.tolist() == sizes


def test_step_counts_are_not_capped_by_default():
    server = Server(X0, MimiC(), 10, lr=0.1)
    report = played(server, *[(k, ONE, {"steps": 1000 if k == 9 else 1}) for k in range(10)])
    assert report.gamma == pytest.approx(0.1 * 1009 / 10)


def test_without_examples_all_weigh_the_same():
    server = Server(X0, "FedAvg", 2, lr=0.1)
    assert (played(server, (0, ONE, {}), (1, THREE, {})).weights.tolist(), server.x[0]) == ([1, 1], 2)


@pytest.mark.parametrize("method", [FedAvg(), WeighedMIFA()], ids=["without rows", "with rows"])
def test_x_stays_if_all_weights_are_zero(method):
    server = Server(X0, method, 2, lr=0.1)
    report = played(server, (0, ONE, {"weight": 0}), (1, THREE, {"weight": 0}))
    assert (report.accepted, server.x[0], server.round_number) == ((0, 1), 0, 1)


@pytest.mark.parametrize("form", ["weight", "loss", "Mean"])
@pytest.mark.parametrize(("of", "least"), [("exact", 2**-40), ("float32", 2**-100), ("float64", 2.0**-900)])
def test_a_sum_of_weights_below_the_range_of_the_sums_rolls_the_round_back(form, of, least):
    for times in (0.4, 1e-20, 1):
        claims = {} if form == "Mean" else {form: (times * least) ** 0.01 if form == "loss" else times * least}
        rule = Mean([least * times] * 2) if form == "Mean" else None
        method = QFedAvg(100) if form == "loss" else FedAvg()
        server = Server(X0, method, 2, lr=0.1, aggregation=rule, compute=Compute(accumulator=of))
        with nullcontext() if times == 1 else pytest.raises(RangeError, match="weights"):
            played(server, (0, ONE, claims), (1, ONE, claims))
        assert (server.round_number, server.x[0] > 0) == (times == 1, times == 1)


ORDERS = [(0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 1, 0)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("form", ["bytes", "arrays", "batch"])
@pytest.mark.parametrize("method", [FedAvg(), FedNova()], ids=str)
def test_updates_without_examples_are_rejected_if_others_have_some(order, form, method):
    """In any order, held or already folded."""
    server = Server(X0, method, 3, lr=0.1)
    models = {0: np.float32([4]), 1: np.float32([100]), 2: np.float32([8])}
    examples = {0: 10, 1: None, 2: 30}
    if form == "batch":
        report = server.round([Update(k, models[k], 1, examples[k]) for k in order])
    else:
        sent = {k: y.tobytes() if form == "bytes" else y for k, y in models.items()}
        report = played(server, *[(k, sent[k], {"examples": examples[k]}) for k in order])
    assert (sorted(report.accepted), rejected_arguments(report)) == ([0, 2], [(1, "examples")])
    assert server.x[0] == pytest.approx(7)


def test_a_client_rejected_for_missing_examples_may_try_again():
    server = Server(X0, "FedAvg", 2, lr=0.1)
    with server.open_round() as round:
        assert round.add(0, ONE, steps=1)
        assert round.add(1, THREE, steps=1, examples=2)
        assert round.add(0, ONE, steps=1, examples=2)
    assert server.x[0] == 2


def test_in_shards_updates_without_examples_are_rejected():
    x0 = np.zeros(40_000, np.float32)
    with Server(x0, "FedAvg", 2, lr=0.1, compute=Compute(shards=2)) as server:
        with server.open_round() as round:
            round.add(0, x0 + 100, steps=1)
            round.add(1, x0 + 4, steps=1, examples=3)
            assert not round.add(1, x0 + 9, steps=1, examples=3)
            assert round.add(0, x0 + 2, steps=1, weight=1)
        assert (round.report.accepted, [client for client, _ in round.report.rejected]) == ((1, 0), [0, 1])
        assert (server.x == 3.5).all()


def test_missing_examples_are_the_known_size():
    server = Server(X0, "FedAvg", {0: 30, 1: 10}, lr=0.1)
    assert played(server, (0, ONE, {}), (1, THREE, {"examples": 10})).weights.tolist() == [30, 10]


def test_an_edge_sums_updates_without_examples():
    root = Server(X0, "FedAvg", 4, lr=0.1, compute=Compute(accumulator="exact"))
    edges = [EdgeAggregator(X0, "FedAvg", own, lr=0.1) for own in ([0, 1], [2, 3])]
    bare = edges[0].fold(root.x, [Update(k, ONE, 1) for k in (0, 1)], round=0)
    counted = edges[1].fold(root.x, [Update(k, THREE, 1, 5) for k in (2, 3)], round=0)
    with root.open_round() as round:
        round.add_partial_sum(bare.to_bytes(), "a")
        round.add_partial_sum(counted.to_bytes(), "b")
    assert (round.report.accepted, [client for client, _ in round.report.rejected], root.x[0]) == ((2, 3), [0, 1], 3)
    with root.open_round() as round:
        round.add_partial_sum(edges[0].fold(root.x, [Update(k, ONE, 1) for k in (0, 1)], round=1), "a")
    assert root.x[0] == 1


def test_weights_of_single_updates():
    server = Server(X0, "FedAvg", 2, lr=0.1, aggregation=[CapExamples(1)])
    assert played(server, (0, ONE, {"weight": 0.25}), (1, THREE, {"weight": 0.75})).weights.tolist() == [0.25, 0.75]
    assert server.x[0] == 2.5
    with server.open_round() as round:
        for weight in (-1, float("nan"), "1", True):
            with pytest.raises(RangeError, match="weight"):
                round.add(0, ONE, steps=1, weight=weight)
        round.add(0, ONE, steps=1, weight=0)
        round.add(1, THREE, steps=1, weight=2)
    assert server.x[0] == 3
    for number, weight in ((np.inf, 0), (1e30, 1e308)):  # without a warning of NumPy
        report = played(server, (0, np.float32([number]), {"weight": weight}), (1, THREE, {"weight": 1}))
        assert (report.accepted, server.x[0]) == ((1,), 3)
        assert ("weight" in report.rejected[0][1]) == (weight > 0)


@pytest.mark.parametrize(
    "weights",
    [{0: 0.25, 1: 0.75}, lambda claims: np.where(claims.examples > 1, 3 * claims.steps, 1.0)],
    ids=["numbers", "callable"],
)
@pytest.mark.parametrize("batch", [False, True])
def test_weights_by_policy(weights, batch, tmp_path):
    server = Server(X0, "FedAvg", 2, lr=0.1, aggregation=[Mean(weights)], storage=tmp_path / "s")
    updates = [Update(0, ONE, 1, 1), Update(1, THREE, 1, 500)]
    if batch:
        server.round(updates)
    else:
        played(server, (0, ONE, {"examples": 1}), (1, THREE, {"examples": 500}))
    assert server.x[0] == 2.5
    server.close()
    with pytest.raises(CheckpointError, match="weights"):
        Server.load(tmp_path / "s", storage=Storage(medium="ram"))
    again = Server.load(tmp_path / "s", aggregation=[Mean(weights)], storage=Storage(medium="ram"))
    assert again.round(updates).accepted == (0, 1)
    assert again.x[0] == 2.5


def test_a_client_without_a_weight_is_rejected_by_name():
    server = Server(X0, "FedAvg", 2, lr=0.1, aggregation=[Mean({1: 2.0})])
    report = played(server, (0, ONE, {}), (1, THREE, {}))
    assert (report.accepted, report.rejected[0][0]) == ((1,), 0)


def test_methods_with_their_own_weights_take_no_others():
    for method in ("MIFA", "MimiC", FedAvg(weights="uniform")):
        with pytest.raises(RangeError, match="weight"):
            Server(X0, method, 2, lr=0.1).round([Update(0, ONE, 1, weight=1)])


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "SCAFFOLD"])
def test_a_second_update_is_rejected_and_the_first_counts(method):
    server = Server(X0, method, 2, lr=0.1)
    claims = {"control": ONE} if method == "SCAFFOLD" else {}
    with server.open_round() as round:
        assert round.add(0, ONE, steps=1, **claims)
        assert not round.add(0, THREE, steps=1, **claims)
        assert not round.add(1, np.float32([np.nan]), steps=1, **claims)
        assert round.add(1, ONE, steps=1, **claims)
    assert (round.report.accepted, [client for client, _ in round.report.rejected]) == ((0, 1), [0, 1])
    other = Server(X0, method, 2, lr=0.1)
    played(other, (0, ONE, claims), (1, ONE, claims))
    assert server.x == other.x


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC", "FedVARP"])
def test_a_late_update_counts_once(method, tmp_path):
    path = tmp_path / "s"
    server = Server(X0, method, 2, lr=1.0, policy=RoundPolicy(max_staleness=3), storage=path)
    assert played(server, (0, -ONE, {"round": 0})).accepted == (0,)
    for number in (1, 2):
        server.close()
        server = Server.load(path)
        report = played(server, (0, -ONE, {"round": 0}))
        assert (report.accepted, "0" in report.rejected[0][1], server.round_number) == ((), True, number + 1)
    assert played(server, (0, -ONE, {"round": 2})).accepted == (0,)  # the client started again
    assert played(server, (0, -ONE, {"round": 1})).accepted == ()  # an older update after a newer one
    assert played(server, (1, -ONE, {"round": 3})).accepted == (1,)
    server.close()


@pytest.mark.parametrize(("clients", "asked"), [([1, 2], "1"), (["1", "2"], 1)])
def test_ids_of_another_type_get_an_error_that_names_it(clients, asked):
    server = Server(X0, "FedAvg", clients, lr=0.1)
    with server.open_round() as round, pytest.raises(UnknownClientError, match="'1'"):
        round.add(asked, ONE, steps=1)


def test_a_weight_of_missing_examples_is_rejected():
    for weights in (lambda claims: claims.examples, lambda claims: np.sqrt(claims.examples)):
        server = Server(np.zeros(2, np.float32), "FedAvg", 2, lr=0.1, aggregation=[Mean(weights)])
        report = server.round([Update(0, np.ones(2), 1, 5000), Update(1, np.ones(2), 1)])
        assert report.accepted == (0,)
        assert rejected_arguments(report) == [(1, "examples")]
    server = Server(np.zeros(2, np.float32), "FedAvg", 2, lr=0.1, aggregation=[Mean(lambda claims: 2.0)])
    assert server.round([Update(i, np.ones(2), 1) for i in range(2)]).weights.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("kind", [list, tuple, np.array, iter])
def test_listed_weights_are_in_the_order_of_the_clients(kind):
    server = Server(np.zeros(2, np.float32), "FedAvg", 3, lr=0.1, aggregation=[Mean(kind([2.5, 1, 0]))])
    report = server.round([Update(i, np.full(2, i, np.float32), 1) for i in range(3)])
    assert (report.weights.tolist(), report.rejected) == ([2.5, 1, 0], ())
    for wrong in ({0: 1, 1: -1}, [np.nan], ["2"], [1, True], {1: 10**400}, {}, [], 0.5, np.float64(2)):
        with pytest.raises(RangeError, match="weights"):
            Mean(wrong)


def test_weights_set_between_rounds_are_needed_on_loading(tmp_path):
    server = Server(X0, "FedAvg", 2, lr=0.1)
    server.change(aggregation=[Mean([1, 3])])
    assert server.round([Update(0, ONE, 1), Update(1, THREE, 1)]).weights.tolist() == [1, 3]
    server.save(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"^aggregation\b.*weights"):
        Server.load(tmp_path / "run")
    assert Server.load(tmp_path / "run", aggregation=[Mean({0: 2, 1: 2})]).aggregation == (Mean({0: 2, 1: 2}),)
    for before in (None, "median"):
        server.change(aggregation=before)
        server.save(tmp_path / "run")
        assert Server.load(tmp_path / "run").aggregation == Chain.of(before).rules
        assert Server.load(tmp_path / "run", aggregation=[Mean([2, 2])]).aggregation == (Mean([2, 2]),)


@pytest.mark.parametrize("of", [np.float16, np.float64, torch.bfloat16, bytes], ids=str)
def test_the_first_examples_may_come_with_any_form_of_update(of):
    sent = (
        THREE.tobytes() if of is bytes else torch.tensor([3.0], dtype=of) if of is torch.bfloat16 else THREE.astype(of)
    )
    server = Server(X0, "FedAvg", 2, lr=0.1)
    assert played(server, (0, ONE, {}), (1, sent, {"examples": 5})).accepted == (1,)
    assert server.x[0] == 3
