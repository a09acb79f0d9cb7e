"""Rounds of a network: mixing, absent nodes, rejections and errors."""

import copy
import re

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
from fedcore.sim.network.network import among, mixing_matrix
from fedcore.sim.network.topology import Topology
from tests.kit import in_threads
from tests.sim.network.kit import HALVES, LeastSquares, pair, vector


def ys_of(count):
    return [Update(0, vector(1, 0), steps=1), Update(1, vector(0, 1), steps=1)][:count]


@given(st.integers(2, 12), st.integers(0, 2**32))
def test_the_matrix_among_present_nodes_is_symmetric_and_doubly_stochastic(nodes, seed):
    rng = np.random.default_rng(seed)
    W = Topology.named("erdos-renyi", nodes, probability=1.0).W if seed % 2 else Topology.named("ring", nodes).W
    present = np.flatnonzero(rng.random(nodes) < 0.6)
    left = among(W, present.tolist())
    np.testing.assert_array_equal(left, left.T)
    np.testing.assert_allclose(left.sum(axis=1), 1, atol=1e-14)
    assert (left >= 0).all()
    off_diagonal = ~np.eye(len(present), dtype=bool)
    np.testing.assert_array_equal(left[off_diagonal], W[np.ix_(present, present)][off_diagonal])
    np.testing.assert_array_equal(among(W, range(nodes)), W)


def test_float32_matrices_are_accepted_and_zeta_includes_negative_eigenvalues():
    for nodes in (3, 7, 100):
        W, zeta = mixing_matrix(Topology.named("ring", nodes, dtype="float32").W, nodes)
        assert zeta == pytest.approx(Topology.named("ring", nodes).zeta, abs=1e-6)
        assert W.dtype == np.float64
    # Four nodes in a ring that keep a tenth: the eigenvalues are 1, 0.1, 0.1 and -0.8.
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
def test_rounds_match_a_float64_transcription_of_the_paper(name):
    """Algorithm 2: E local steps of every node, then w_j = sum_i W_ji (w_i after its steps)."""
    problem, topology, rate = LeastSquares(12, 5), Topology.named(name, 12), Staircase(0.2)
    start = np.random.default_rng(1).normal(size=(12, 5)).astype(np.float32)
    network, w = Network(list(start), topology, lr=rate), start.astype(np.float64)
    for t in range(100):
        network.round(problem.updates(network.models, 3, network.lr))
        w = topology.W @ np.array([problem.steps(j, w[j], 3, rate(t)) for j in range(12)])
        np.testing.assert_allclose(network.models, w, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(network.output(), w.mean(axis=0), rtol=2e-6, atol=1e-7)


def test_on_the_complete_graph_it_is_fedavg_with_all_clients():
    problem, x0 = LeastSquares(7, 6), np.random.default_rng(3).normal(size=6).astype(np.float32)
    network = Network([x0] * 7, Topology.named("complete", 7), lr=0.1)
    server = Server(x0, FedAvg(weights="uniform"), clients=7, lr=0.1)
    for _ in range(40):
        network.round(problem.updates(network.models, 4, 0.1))
        server.round(list(problem.updates([server.x] * 7, 4, 0.1)))
        np.testing.assert_allclose(network.output(), server.x, rtol=2e-6, atol=2e-7)
        assert all(np.array_equal(model, network.models[0]) for model in network.models)


def test_a_single_node_does_gradient_descent():
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


def test_every_kind_of_update_has_the_same_result():
    base, y = vector(1, 2), vector(0.5, 3)
    results = []
    for update in (
        Update(0, y, steps=4),
        Update(0, y - base, steps=4, kind="delta"),
        Update(0, (base - y) / 2, steps=4, kind="gradient"),
        Update(0, y.tobytes(), steps=4),
        Update(0, torch.from_numpy(y.copy()), steps=4),
    ):
        network = pair([base, vector(0, 0)], HALVES, lr=0.5)
        report = network.round([update, Update(1, vector(1, 1), steps=1)])
        assert report.rejected == ()
        results.append((np.array(network.models), report.norms, report.diversity))
    for models, norms, diversity in results[1:]:
        np.testing.assert_array_equal(models, results[0][0])
        np.testing.assert_array_equal(norms, results[0][1])
        assert diversity == results[0][2]


# Absent nodes


def test_an_absent_node_keeps_its_model_and_its_neighbours_keep_its_weight():
    network = Network([vector(1), vector(2), vector(3)], Topology.named("star", 3), lr=0.1)
    report = network.round([Update(0, vector(10), steps=1), Update(2, vector(40), steps=1)])
    # W = [[1, 1, 1], [1, 2, 0], [1, 0, 2]] / 3; node 0 keeps node 1's third: [[2, 1], [1, 2]] / 3 among 0 and 2.
    np.testing.assert_allclose(np.ravel(network.models), [20, 2, 30], rtol=1e-6)
    assert report.accepted == (0, 2)
    assert report.zeta == pytest.approx(1 / 3)
    report = network.round([Update(1, vector(5), steps=1), Update(2, vector(7), steps=1)])  # not neighbours
    np.testing.assert_allclose(np.ravel(network.models), [20, 5, 7], rtol=1e-6)
    assert report.zeta == pytest.approx(1)


def test_the_mean_of_the_models_does_not_depend_on_absent_nodes():
    rng = np.random.default_rng(2)
    network = Network(list(rng.normal(size=(10, 40)).astype(np.float32)), Topology.named("ring", 10), lr=0.1)
    for _ in range(30):
        present = np.flatnonzero(rng.random(10) < 0.6)
        before = np.array(network.models, np.float64)
        report = network.round([Update(int(j), network.models[j] + np.float32(0.5), steps=1) for j in present])
        after = np.array(network.models, np.float64)
        np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0) + 0.05 * len(present), rtol=1e-5, atol=1e-6)
        absent = np.setdiff1d(np.arange(10), present)
        np.testing.assert_array_equal(after[absent], before[absent])
        distance = np.sqrt(np.square(after - after.mean(axis=0)).sum(axis=1).mean())
        assert report.consensus == pytest.approx(distance, rel=1e-5)


def test_a_round_without_nodes_counts_and_changes_nothing():
    network = pair()
    network.round(ys_of(2))
    before = np.array(network.models)
    report = network.round([])
    np.testing.assert_array_equal(network.models, before)
    assert (report.round, report.accepted, report.diversity, report.zeta) == (1, (), None, 1)
    assert report.consensus == pytest.approx(np.sqrt(0.25**2 + 0.75**2) / 2)  # (1/2, 0) and (0, 3/2), mixed
    assert network.round_number == 2


# Open and failed rounds


def test_an_exception_rolls_a_round_back():
    network = pair()
    network.round(ys_of(2))
    before = np.array(network.models)
    with pytest.raises(ZeroDivisionError), network.open_round() as opened:
        opened.add(0, vector(9, 9), steps=1)
        raise ZeroDivisionError
    np.testing.assert_array_equal(network.models, before)
    for call in (lambda: opened.add(1, vector(9, 9), steps=1), opened.finish):
        with pytest.raises(errors.RoundError, match="finished or aborted"):
            call()
    opened.abort()
    assert network.round_number == 1
    assert network.round([]).round == 1


def test_leaving_a_round_finishes_it_and_dropping_it_closes_it():
    network = pair()
    network.open_round()  # dropped
    with network.open_round() as opened:
        opened.add(0, vector(4, 4), steps=1)
        with pytest.raises(errors.RoundError, match="round 0 is open already"):
            network.open_round()
        copied = copy.deepcopy(network)
        assert copied.round([]).round == 0
        assert not copied.W.flags.writeable
        assert not copied.q.flags.writeable
    assert opened.report.accepted == (0,)
    np.testing.assert_array_equal(network.models, [[2, 2], [0, 0]])  # 2 q_0 = 1/2 of the step


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, where it is the reference that mixes
def test_a_mixing_that_overflows_changes_nothing():
    largest = np.finfo(np.float32).max  # 7 x float32(1/7) is more than 1
    network = Network([vector(largest)] * 7, Topology.named("complete", 7), lr=0.1)
    before = np.array(network.models)
    with pytest.raises(errors.DivergedError, match=r"^round 0\b"):
        network.round([Update(j, network.models[j], steps=1) for j in range(7)])
    np.testing.assert_array_equal(network.models, before)
    assert network.round_number == 0


def test_threads_may_add_at_once():
    network = Network([np.zeros(1000, np.float32)] * 16, Topology.named("complete", 16), lr=0.1)
    opened = network.open_round()
    in_threads(lambda j: opened.add(j, np.full(1000, j, np.float32), steps=1), range(16))
    assert len(opened.finish().accepted) == 16
    np.testing.assert_allclose(network.output(), 7.5, rtol=1e-6)


@pytest.mark.parametrize(
    "W",
    [HALVES, HALVES.astype(np.float32), HALVES.tolist(), scipy.sparse.csr_array(HALVES), Topology.named("complete", 2)],
)
def test_every_kind_of_matrix(W):
    network = pair([vector(0, 2), vector(4, 0)], W)
    network.round([Update(0, vector(0, 2), 1), Update(1, vector(4, 0), 1)])
    np.testing.assert_array_equal(network.models, [[2, 1], [2, 1]])


# Models


def test_models_are_copied_and_views_are_read_only_and_valid_until_the_next_round():
    start = [vector(1, 2), vector(3, 4)]
    network = pair(start, HALVES)
    start[0][:] = 9
    views = network.models
    np.testing.assert_array_equal(views[0], [1, 2])
    with pytest.raises(ValueError, match="read-only"):
        views[0][0] = 1
    out = np.empty(2, np.float32)
    assert network.output(out) is out
    np.testing.assert_array_equal(out, [2, 3])
    network.round([Update(0, views[0], 1), Update(1, views[1], 1)])
    np.testing.assert_array_equal(views, [[1, 2], [3, 4]])
    np.testing.assert_array_equal(network.models, [[2, 3], [2, 3]])


def test_modules_go_in_and_tensors_come_out():
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    network = pair(modules, HALVES)
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
    with pytest.raises(errors.RangeError, match=r"^node\b"):
        network.tensors(2)


def test_a_gradient_does_not_change_float_buffers():
    state = {"w": vector(1, 1), "bn.running_mean": vector(4)}
    network = pair([state, state], HALVES, lr=0.5)
    gradient = Update(0, vector(2, 2), steps=1, kind="gradient")
    assert network.round([gradient, Update(1, vector(1, 1, 8), steps=1)]).rejected == ()
    np.testing.assert_array_equal(network.models, [[0.5, 0.5, 6], [0.5, 0.5, 6]])
    bad = network.round([Update(0, vector(1, 1, np.nan), steps=1)])
    assert re.match("update: .*NaN", bad.rejected[0][1])


def test_the_rate_is_that_of_the_round():
    network, rates = pair([vector(0)] * 2, HALVES, lr=Staircase(1.0)), []
    for _ in range(3):
        rates.append(network.lr)
        network.round([])
    assert rates == [1, 1 / 2, 1 / 3]


def test_callbacks_get_the_report_of_every_finished_round(tmp_path):
    reports = []
    network = pair([np.zeros(3, np.float32)] * 2, HALVES, callbacks=[reports.append])
    first = network.round([Update(0, np.ones(3, np.float32), steps=1)])
    network.open_round().abort()
    assert reports == [first]
    network.save(tmp_path / "network")
    loaded = Network.load(tmp_path / "network", callbacks=[reports.append])
    assert reports == [first, loaded.round([Update(1, np.ones(3, np.float32), steps=1)])]


# Invalid updates are rejected, and mistakes of the caller raise; the round continues.


INVALID = [
    *((dict(value=vector(*y)), "update: .*NaN") for y in ((np.nan, 0), (0, -np.inf), (1e31, 0))),
    *((dict(value=vector(y, 0), kind=kind), "update: .*NaN") for y, kind in ((3e38, "delta"), (np.nan, "gradient"))),
    (dict(value=vector(3e38, 0), kind="gradient", steps=10**6), "update: .*NaN"),
    *(
        (dict(value=y), rf"model: expected float32\[2\].*{told}")
        for y, told in ((vector(1), ""), (np.ones(2, int), "int64"))
    ),
    *((dict(value=y), rf"model{told}") for y, told in ((b"1234567", ": .*8 bytes"), (None, ""))),
    *((dict(steps=steps), f"steps.*{told}") for steps, told in ((0, 0), (10**7, ""), (2.0, ""))),
    *((change, f"{next(iter(change))}") for change in (dict(lr=-1.0), dict(lr=float("nan")))),
    (dict(round=3), "round=3: must be 0"),
]


@pytest.mark.parametrize(("sent", "reason"), INVALID)
def test_an_invalid_update_is_rejected_and_the_round_continues(sent, reason):
    network, clean = pair(), pair()
    with network.open_round() as opened:
        opened.add(0, **({"steps": 1, "value": vector(1, 1)} | sent))
        opened.add(1, vector(3, 4), steps=1)
    ((node, got),) = opened.report.rejected
    assert node == 0
    assert re.match(reason, got)
    assert opened.report.accepted == (1,)
    clean_report = clean.round([Update(1, vector(3, 4), steps=1)])
    np.testing.assert_array_equal(network.models, clean.models)
    assert opened.report.diversity == clean_report.diversity == 1
    assert opened.report.consensus == clean_report.consensus


@pytest.mark.parametrize("ys", [[(2, 2), (9, 9)], [(np.inf, 1), (2, 2)]], ids=["second", "after a rejection"])
def test_one_update_of_a_node_counts(ys):
    network, valid = pair(), [np.isfinite(ys[0]).all(), not np.isfinite(ys[0]).all()]
    with network.open_round() as opened:
        assert [opened.add(0, vector(*y), steps=1) for y in ys] == valid
    assert (opened.report.accepted, [node for node, _ in opened.report.rejected]) == ((0,), [0])
    np.testing.assert_array_equal(network.models, [[1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        *((dict(client=node), errors.UnknownClientError) for node in (2, -1, "0", True)),
        (dict(kind="both"), errors.UnknownNameError),
        (dict(count=2), errors.RangeError),
    ],
)
def test_a_mistake_of_the_caller_raises_and_the_round_stays_open(change, error):
    name = "node" if "client" in change else next(iter(change))
    with pair().open_round() as opened:
        opened.add(np.int64(1), vector(1, 1), steps=1)
        with pytest.raises(error, match=rf"^{name}\b"):
            opened.add_batch([Update(0, vector(1, 1), 1)._replace(**change)])
    assert opened.report.accepted == (1,)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(models=[]), errors.ArrayError, "models: must be a list"),
        (dict(models=np.zeros((2, 3), np.float32)), errors.ArrayError, "models: must be a list"),
        (dict(models=[vector(1), vector(1, 2)]), errors.ShapeError, "x: expected shape"),
        (dict(models=[vector(1), vector(np.nan)]), errors.ArrayError, r"models\[1\]"),
        (dict(models=[[], []]), errors.ShapeError, r"models\[0\]"),
        (dict(W=np.eye(3)), errors.ShapeError, r"W: .*\[2, 2\].*\[3, 3\]"),
        (dict(W=[[1], [1, 2]]), errors.ShapeError, "W: .*lengths"),
        (dict(W=[["1", "0"], ["0", "1"]]), errors.DtypeError, "W: .*float32"),
        (dict(W=[[1.5, -0.5], [-0.5, 1.5]]), errors.RangeError, "W: .*>= 0"),
        (dict(W=[[np.nan, 1], [1, 0]]), errors.RangeError, "W: .*finite"),
        (dict(W=[[0.5, 0.5], [0.4, 0.6]]), errors.RangeError, "W: .*symmetric"),
        (dict(W=[[0.5, 0.4], [0.4, 0.6]]), errors.RangeError, r"W: .*row 0 adds up to 0\.9"),
        (dict(W=np.eye(2)), errors.RangeError, "W: zeta=1"),
        (dict(W=[[0.0, 1.0], [1.0, 0.0]]), errors.RangeError, "W: zeta=1"),  # the nodes only swap their models
        (dict(W=Topology.named("ring", 3)), errors.ShapeError, r"W: .*\[2, 2\]"),
        (dict(q=[1]), errors.ShapeError, "q: expected 2"),
        (dict(q=[1, -1]), errors.RangeError, "q=.*>= 0"),
        (dict(q=[0, 0]), errors.RangeError, "q=.*sum > 0"),
        (dict(q=["a", "b"]), errors.DtypeError, "^q.*numbers"),
        (dict(lr=0), errors.RangeError, "rate"),
        (dict(limits={"max_steps": 0}), errors.RangeError, "max_steps"),
    ],
)
def test_arguments_are_checked(change, error, message):
    with pytest.raises(error, match=rf"^{message}"):
        Network(**(dict(models=[vector(1, 2), vector(3, 4)], W=HALVES, lr=0.1) | change))
