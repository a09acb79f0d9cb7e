"""Networks."""

import re
import threading

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedcore import Network, Server, Update, errors
from fedcore.algorithms import FedAvg
from fedcore.algorithms.rates import Staircase
from fedcore.network.round import among, mixing_matrix
from fedcore.network.topology import Topology
from tests.network.problem import LeastSquares, pair, vector


@given(st.integers(2, 12), st.integers(0, 2**32))
def test_what_is_left_is_symmetric_and_doubly_stochastic(nodes, seed):
    rng = np.random.default_rng(seed)
    W = Topology.named("erdos-renyi", nodes, probability=1.0).W if seed % 2 else Topology.named("ring", nodes).W
    heard = np.flatnonzero(rng.random(nodes) < 0.6).tolist()
    left = among(W, heard)
    assert left.shape == (len(heard), len(heard))
    np.testing.assert_array_equal(left, left.T)
    np.testing.assert_allclose(left.sum(axis=1), 1, atol=1e-14)
    assert (left >= 0).all()
    for i, a in enumerate(heard):
        for j, b in enumerate(heard):
            assert i == j or left[i, j] == W[a, b]


def test_nobody_away_leaves_the_matrix_as_it_is():
    W = Topology.named("star", 5).W
    np.testing.assert_array_equal(among(W, range(5)), W)


def test_float32_matrices_pass():
    for nodes in (3, 7, 100):
        W, zeta = mixing_matrix(Topology.named("ring", nodes, dtype="float32").W, nodes)
        assert zeta == pytest.approx(Topology.named("ring", nodes).zeta, abs=1e-6)
        assert W.dtype == np.float64


def test_zeta_sees_negative_eigenvalues():
    """Four nodes in a ring that keep a tenth: the eigenvalues are 1, 0.1, 0.1 and -0.8."""
    W = 0.1 * np.eye(4) + 0.45 * (np.roll(np.eye(4), 1, axis=0) + np.roll(np.eye(4), -1, axis=0))
    assert mixing_matrix(W, 4)[1] == pytest.approx(0.8)


def test_a_round_by_hand():
    network = pair()
    report = network.round([Update(1, vector(8, 0), steps=4), Update(0, vector(4, 4), steps=2, lr=0.25)])
    # q = 1/4, 3/4: a half of node 0's step counts, and three halves of node 1's: (2, 2) and (12, 0), which are mixed.
    np.testing.assert_array_equal(network.models, [[4.5, 1.5], [9.5, 0.5]])
    np.testing.assert_array_equal(network.output(), [8.25, 0.75])
    np.testing.assert_array_equal(np.mean(network.models, axis=0), [4 / 4 + 8 * 3 / 4, 4 / 4])  # eq. 75
    assert (report.round, report.accepted, report.rejected, report.steps, report.gamma) == (0, (1, 0), (), 6, 0)
    np.testing.assert_allclose(report.norms, [8 / (0.5 * 4), np.sqrt(32) / (0.25 * 2)])
    # q = 1/4, 3/4: (1/4 32 + 3/4 64) / |(1/4 4 + 3/4 8, 1/4 4)|^2
    assert report.diversity == pytest.approx(56 / 50)
    assert report.zeta == network.zeta == 0.5
    assert report.consensus == pytest.approx(np.sqrt(6.5))  # both are (2.5, -.5) from their mean
    assert report.bytes == 16
    assert report.seconds > 0
    assert network.round_number == 1
    # Each node's step is measured from its own model.
    report = network.round([Update(0, vector(4.5, 5.5), steps=2), Update(1, vector(12.5, 4.5), steps=1)])
    np.testing.assert_allclose(report.norms, [4 / (0.5 * 2), 5 / (0.5 * 1)])
    assert report.diversity == pytest.approx((16 / 4 + 25 * 3 / 4) / ((3 * 3 / 4) ** 2 + (4 / 4 + 4 * 3 / 4) ** 2))


@pytest.mark.parametrize("name", ["complete", "ring", "star", "torus"])
def test_rounds_are_the_transcription_of_the_paper(name):
    """Algorithm 2 in float64: E local steps of every node, then w_j = sum_i W_ji (w_i after its steps)."""
    problem, topology, rate = LeastSquares(12, 5), Topology.named(name, 12), Staircase(0.2)
    rng = np.random.default_rng(1)
    start = rng.normal(size=(12, 5)).astype(np.float32)
    network = Network(list(start), topology, lr=rate)
    w = start.astype(np.float64)
    for t in range(100):
        network.round(
            Update(j, problem.steps(j, network.models[j], 3, network.lr).astype(np.float32), steps=3) for j in range(12)
        )
        w = topology.W @ np.array([problem.steps(j, w[j], 3, rate(t)) for j in range(12)])
        np.testing.assert_allclose(network.models, w, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(network.output(), w.mean(axis=0), rtol=2e-6, atol=1e-7)


def test_on_the_complete_graph_it_is_fedavg_with_everybody():
    problem = LeastSquares(7, 6)
    x0 = np.random.default_rng(3).normal(size=6).astype(np.float32)
    network = Network([x0] * 7, Topology.named("complete", 7), lr=0.1)
    server = Server(x0, FedAvg(weights="uniform"), clients=7, lr=0.1)
    for _ in range(40):
        network.round(Update(j, problem.steps(j, network.models[j], 4, 0.1).astype(np.float32), 4) for j in range(7))
        server.round([Update(j, problem.steps(j, server.x, 4, 0.1).astype(np.float32), 4) for j in range(7)])
        np.testing.assert_allclose(network.output(), server.x, rtol=2e-6, atol=2e-7)
        assert all(np.array_equal(model, network.models[0]) for model in network.models)  # the same bits everywhere


def test_one_node_alone_is_gradient_descent():
    network = Network([vector(0, 0)], [[1.0]], lr=0.1)
    report = network.round([Update(0, vector(1, 2), steps=1)])
    np.testing.assert_array_equal(network.models, [[1, 2]])
    assert (report.zeta, report.consensus) == (0, 0)


def test_the_order_of_updates_changes_no_model():
    rng = np.random.default_rng(0)
    ys = rng.normal(size=(9, 300)).astype(np.float32)
    results = []
    for order in (range(9), reversed(range(9)), rng.permutation(9)):
        network = Network([np.zeros(300, np.float32)] * 9, Topology.named("torus", 9), lr=0.1)
        report = network.round([Update(int(j), ys[j], steps=1) for j in order])
        results.append((np.array(network.models), report.consensus))
    for models, consensus in results[1:]:
        np.testing.assert_array_equal(models, results[0][0])
        assert consensus == results[0][1]


def test_kinds_of_updates_say_the_same():
    base, y = np.float32([1, 2]), np.float32([0.5, 3])
    results = []
    for update in (
        Update(0, y, steps=4),
        Update(0, y - base, steps=4, kind="delta"),
        Update(0, (base - y) / 2, steps=4, kind="gradient"),
        Update(0, y.tobytes(), steps=4),
        Update(0, torch.from_numpy(y.copy()), steps=4),
    ):
        network = Network([base, vector(0, 0)], [[0.5, 0.5], [0.5, 0.5]], lr=0.5)
        report = network.round([update, Update(1, vector(1, 1), steps=1)])
        assert report.rejected == ()
        results.append((np.array(network.models), report.norms, report.diversity))
    for models, norms, diversity in results[1:]:
        np.testing.assert_array_equal(models, results[0][0])
        np.testing.assert_array_equal(norms, results[0][1])
        assert diversity == results[0][2]


# Nodes that are away


def test_a_node_that_is_away_keeps_its_model_and_its_neighbours_their_weight():
    network = Network([vector(1), vector(2), vector(3)], Topology.named("star", 3), lr=0.1)
    report = network.round([Update(0, vector(10), steps=1), Update(2, vector(40), steps=1)])
    # W = [[1, 1, 1], [1, 2, 0], [1, 0, 2]] / 3; node 0 keeps node 1's third: [[2, 1], [1, 2]] / 3 among 0 and 2.
    np.testing.assert_allclose(np.ravel(network.models), [20, 2, 30], rtol=1e-6)
    assert report.accepted == (0, 2)
    assert report.zeta == pytest.approx(1 / 3)
    report = network.round([Update(1, vector(5), steps=1), Update(2, vector(7), steps=1)])  # not neighbours
    np.testing.assert_allclose(np.ravel(network.models), [20, 5, 7], rtol=1e-6)
    assert report.zeta == pytest.approx(1)


def test_the_mean_of_the_models_survives_whoever_is_away():
    rng = np.random.default_rng(2)
    network = Network(list(rng.normal(size=(10, 40)).astype(np.float32)), Topology.named("ring", 10), lr=0.1)
    for _ in range(30):
        there = np.flatnonzero(rng.random(10) < 0.6)
        before = np.array(network.models, np.float64)
        report = network.round([Update(int(j), network.models[j] + np.float32(0.5), steps=1) for j in there])
        after = np.array(network.models, np.float64)
        np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0) + 0.05 * len(there), rtol=1e-5, atol=1e-6)
        away = np.setdiff1d(np.arange(10), there)
        np.testing.assert_array_equal(after[away], before[away])
        apart = np.sqrt(np.square(after - after.mean(axis=0)).sum(axis=1).mean())
        assert report.consensus == pytest.approx(apart, rel=1e-5)


def test_a_round_without_nodes_counts_and_changes_nothing():
    network = pair()
    network.round([Update(0, vector(1, 0), steps=1), Update(1, vector(0, 1), steps=1)])
    before = np.array(network.models)
    report = network.round([])
    np.testing.assert_array_equal(network.models, before)
    assert (report.round, report.accepted, report.diversity, report.zeta) == (1, (), None, 1)
    assert report.consensus == pytest.approx(np.sqrt(0.25**2 + 0.75**2) / 2)  # (1/2, 0) and (0, 3/2), mixed
    assert network.round_number == 2


# Rounds that fail


def test_a_round_left_by_an_exception_never_happened():
    network = pair()
    network.round([Update(0, vector(1, 2), steps=1), Update(1, vector(3, 4), steps=1)])
    before = np.array(network.models)
    with pytest.raises(ZeroDivisionError), network.open_round() as opened:
        opened.add(0, vector(9, 9), steps=1)
        raise ZeroDivisionError
    np.testing.assert_array_equal(network.models, before)
    with pytest.raises(errors.RoundError, match="expected an open one"):
        opened.add(1, vector(9, 9), steps=1)
    with pytest.raises(errors.RoundError, match="expected an open one"):
        opened.finish()
    opened.abort()
    assert network.round_number == 1
    assert network.round([]).round == 1


def test_leaving_a_round_finishes_it():
    network = pair()
    with network.open_round() as opened:
        opened.add(0, vector(4, 4), steps=1)
        with pytest.raises(errors.RoundError, match="round 0 is open already"):
            network.open_round()
    assert opened.report is not None
    assert opened.report.accepted == (0,)
    np.testing.assert_array_equal(network.models, [[2, 2], [0, 0]])  # 2 q_0 = 1/2 of the step


def test_a_dropped_round_does_not_stay_open():
    network = pair()
    network.open_round()
    assert network.round([]).round == 0


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, where it is the reference that mixes
def test_a_mixing_that_overflows_changes_nothing():
    largest = np.finfo(np.float32).max  # 7 x float32(1/7) is more than 1
    network = Network([vector(largest)] * 7, Topology.named("complete", 7), lr=0.1)
    before = np.array(network.models)
    with pytest.raises(errors.DivergedError, match="round 0: mixing would make a model infinite"):
        network.round([Update(j, network.models[j], steps=1) for j in range(7)])
    np.testing.assert_array_equal(network.models, before)
    assert network.round_number == 0


def test_threads_may_add_at_once():
    network = Network([np.zeros(1000, np.float32)] * 16, Topology.named("complete", 16), lr=0.1)
    opened = network.open_round()
    threads = [
        threading.Thread(target=opened.add, args=(j, np.full(1000, j, np.float32)), kwargs={"steps": 1})
        for j in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened.finish().accepted) == 16
    np.testing.assert_allclose(network.output(), 7.5, rtol=1e-6)


W2 = np.full((2, 2), 0.5)


@pytest.mark.parametrize(
    "kind", [W2, W2.astype(np.float32), W2.tolist(), scipy.sparse.csr_array(W2), Topology.named("complete", 2)]
)
def test_every_kind_of_matrix(kind):
    network = Network([vector(0, 2), vector(4, 0)], kind, lr=0.1)
    network.round([Update(0, vector(0, 2), 1), Update(1, vector(4, 0), 1)])
    np.testing.assert_array_equal(network.models, [[2, 1], [2, 1]])


# Models


def test_the_callers_models_are_copied_and_views_are_read_only():
    start = [vector(1, 2), vector(3, 4)]
    network = Network(start, W2, lr=0.1)
    start[0][:] = 9
    np.testing.assert_array_equal(network.models[0], [1, 2])
    with pytest.raises(ValueError, match="read-only"):
        network.models[0][0] = 1
    out = np.empty(2, np.float32)
    assert network.output(out) is out
    np.testing.assert_array_equal(out, [2, 3])


def test_a_view_is_good_until_the_next_round_is_finished():
    network = Network([vector(1), vector(3)], W2, lr=0.1)
    seen = network.models
    network.round([Update(0, seen[0], 1), Update(1, seen[1], 1)])
    np.testing.assert_array_equal(seen, [[1], [3]])
    np.testing.assert_array_equal(network.models, [[2], [2]])


def test_modules_go_in_and_tensors_come_out():
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    network = Network(modules, W2, lr=0.1)
    for module, shift, count in ((modules[0], 1.0, 5), (modules[1], 3.0, 2)):
        module[1].running_mean += shift
        module[1].num_batches_tracked += count
    report = network.round([Update(node, module, steps=1) for node, module in enumerate(modules)])
    assert report.rejected == ()
    for named in (network.tensors(), network.tensors(0), network.tensors(1, library="torch")):
        np.testing.assert_allclose(named["1.running_mean"], 2)
        np.testing.assert_allclose(named["0.weight"], modules[0][0].weight.detach().numpy(), rtol=1e-6)
        assert named["1.num_batches_tracked"] == 5
        assert named["1.num_batches_tracked"].dtype == torch.int64
    assert network.tensors(0, library="numpy")["1.num_batches_tracked"].dtype == np.int64
    with pytest.raises(errors.RangeError, match=r"node: expected an integer in 0\.\.1, got 2"):
        network.tensors(2)


def test_a_gradient_leaves_float_buffers_alone():
    state = {"w": vector(1, 1), "bn.running_mean": vector(4)}
    network = Network([state, state], W2, lr=0.5)
    report = network.round(
        [
            Update(0, vector(2, 2), steps=1, kind="gradient"),
            Update(1, np.float32([1, 1, 8]), steps=1),
        ]
    )
    assert report.rejected == ()
    np.testing.assert_array_equal(network.models, [[0.5, 0.5, 6], [0.5, 0.5, 6]])
    bad = network.round([Update(0, np.float32([1, 1, np.nan]), steps=1)])
    assert re.match("update: .*NaN", bad.rejected[0][1])


def test_the_rate_is_that_of_the_round():
    network = Network([vector(0), vector(0)], W2, lr=Staircase(1.0))
    rates = []
    for _ in range(3):
        rates.append(network.lr)
        network.round([])
    assert rates == [1, 1 / 2, 1 / 3]


def test_a_listener_hears_of_every_round_that_counted(tmp_path):
    seen, ring = [], np.full((2, 2), 0.5)
    network = Network([np.zeros(3, np.float32)] * 2, ring, lr=0.1, callbacks=[seen.append])
    report = network.round([Update(0, np.ones(3, np.float32), steps=1)])
    network.open_round().abort()
    assert seen == [report]
    network.save(tmp_path / "network")
    again = Network.load(tmp_path / "network", callbacks=[seen.append])
    assert seen == [report, again.round([Update(1, np.ones(3, np.float32), steps=1)])]


# What nodes send wrongly is refused by name, and a caller's mistake raises; the others' round goes on.


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (dict(value=vector(1)), r"model: expected float32\[2\]"),
        (dict(value=np.ones(2, np.int64)), r"model: expected float32\[2\], got int64\[2\]"),
        (dict(value=vector(np.nan, 0)), "update: .*NaN"),
        (dict(value=vector(0, -np.inf)), "update: .*NaN"),
        (dict(value=vector(1e31, 0)), "update: .*NaN"),
        (dict(value=vector(3e38, 0), kind="delta"), "update: .*NaN"),
        (dict(value=vector(3e38, 0), kind="gradient", steps=10**6), "update: .*NaN"),
        (dict(value=vector(np.nan, 0), kind="gradient"), "update: .*NaN"),
        (dict(value=b"1234567"), "model: expected 8 bytes"),
        (dict(value=None), "model: expected"),
        (dict(steps=0), "steps: expected an integer in 1..1000000, got 0"),
        (dict(steps=10**7), "steps: expected"),
        (dict(steps=2.0), "steps: expected"),
        (dict(lr=-1.0), "lr: expected"),
        (dict(lr=float("nan")), "lr: expected"),
        (dict(round=3), "round: expected 0, the open one, got 3"),
    ],
)
def test_what_a_node_sent_wrongly_is_refused_and_the_round_goes_on(sent, message):
    network, clean = pair(), pair()
    with network.open_round() as opened:
        opened.add(0, **({"steps": 1, "value": vector(1, 1)} | sent))
        opened.add(1, vector(3, 4), steps=1)
    (refusal,) = opened.report.rejected
    assert refusal[0] == 0
    assert re.match(message, refusal[1])
    assert opened.report.accepted == (1,)
    clean_report = clean.round([Update(1, vector(3, 4), steps=1)])
    np.testing.assert_array_equal(network.models, clean.models)
    assert opened.report.diversity == clean_report.diversity == 1
    assert opened.report.consensus == clean_report.consensus


def test_a_second_update_of_a_node_is_refused_and_the_first_counts():
    network = pair()
    with network.open_round() as opened:
        assert opened.add(0, vector(2, 2), steps=1)
        assert not opened.add(0, vector(9, 9), steps=1)
    assert opened.report.accepted == (0,)
    assert [node for node, _ in opened.report.rejected] == [0]
    np.testing.assert_array_equal(network.models, [[1, 1], [0, 0]])


def test_a_node_that_was_refused_may_try_again():
    network = pair()
    with network.open_round() as opened:
        opened.add(0, vector(np.inf, 1), steps=1)
        opened.add(0, vector(2, 2), steps=1)
    assert (opened.report.accepted, len(opened.report.rejected)) == ((0,), 1)
    np.testing.assert_array_equal(network.models, [[1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("update", "error", "message"),
    [
        (Update(2, vector(1, 1), 1), errors.UnknownClientError, r"node: expected an integer in 0\.\.1, got 2"),
        (Update(-1, vector(1, 1), 1), errors.UnknownClientError, "node: expected"),
        (Update("0", vector(1, 1), 1), errors.UnknownClientError, "node: expected"),
        (Update(True, vector(1, 1), 1), errors.UnknownClientError, "node: expected"),
        (Update(0, vector(1, 1), 1, kind="both"), errors.UnknownNameError, "kind"),
        (Update(0, vector(1, 1), 1, count=2), errors.RangeError, "count: expected 1, since every node is one, got 2"),
    ],
)
def test_a_callers_mistake_raises_and_the_round_stays_open(update, error, message):
    with pair().open_round() as opened:
        opened.add(np.int64(1), vector(1, 1), steps=1)
        with pytest.raises(error, match=message):
            opened.add_batch([update])
    assert opened.report.accepted == (1,)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(models=[]), errors.ArrayError, "models: expected a list or tuple"),
        (dict(models=np.zeros((2, 3), np.float32)), errors.ArrayError, "models: expected a list or tuple"),
        (dict(models=[vector(1), vector(1, 2)]), errors.ShapeError, "x: expected shape"),
        (dict(models=[vector(1), vector(np.nan)]), errors.ArrayError, r"models\[1\]: expected finite"),
        (dict(models=[[], []]), errors.ShapeError, r"models\[0\]: expected at least one parameter"),
        (dict(W=np.eye(3)), errors.ShapeError, r"W: expected \[2, 2\], one row a model, got \[3, 3\]"),
        (dict(W=[[1], [1, 2]]), errors.ShapeError, "W: expected"),
        (dict(W=[["1", "0"], ["0", "1"]]), errors.DtypeError, "W: expected float32 or float64"),
        (dict(W=[[1.5, -0.5], [-0.5, 1.5]]), errors.RangeError, "W: expected finite entries >= 0"),
        (dict(W=[[np.nan, 1], [1, 0]]), errors.RangeError, "W: expected finite entries >= 0"),
        (dict(W=[[0.5, 0.5], [0.4, 0.6]]), errors.RangeError, "W: expected a symmetric matrix"),
        (dict(W=[[0.5, 0.4], [0.4, 0.6]]), errors.RangeError, "W: expected rows that add up to 1, got 0.9 in row 0"),
        (
            dict(W=np.eye(2)),
            errors.RangeError,
            r"W: expected a matrix that mixes all models \(zeta < 1\), got zeta = 1",
        ),
        (dict(W=[[0.0, 1.0], [1.0, 0.0]]), errors.RangeError, r"zeta < 1\), got zeta = 1"),  # they only change places
        (dict(W=Topology.named("ring", 3)), errors.ShapeError, r"W: expected \[2, 2\]"),
        (dict(q=[1]), errors.ShapeError, "q: expected 2 numbers"),
        (dict(q=[1, -1]), errors.RangeError, "q: expected finite numbers >= 0"),
        (dict(q=[0, 0]), errors.RangeError, "q: expected finite numbers >= 0 with a sum > 0"),
        (dict(q=["a", "b"]), errors.DtypeError, "q: expected 2 numbers"),
        (dict(lr=0), errors.RangeError, "rate: expected"),
        (dict(limits={"max_steps": 0}), errors.RangeError, "limits"),
    ],
)
def test_arguments_are_checked(change, error, message):
    with pytest.raises(error, match=message):
        Network(**(dict(models=[vector(1, 2), vector(3, 4)], W=np.full((2, 2), 0.5), lr=0.1) | change))
