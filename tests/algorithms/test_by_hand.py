"""Weights, steps and directions by hand on two clients, and the ranges of options."""

from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest

from fedcore import Server, Update
from fedcore.algorithms import (
    MBSTORM,
    MIFA,
    SCAFFOLD,
    SCAFFOLDM,
    SCAFFOLDMVR,
    Claims,
    Cohort,
    Direction,
    FedACG,
    FedAsync,
    FedAU,
    FedAvg,
    FedAvgM,
    FedAvgMVR,
    FedAWE,
    FedDyn,
    FedExP,
    FedNova,
    FedProx,
    FedStale,
    FlexibleFedAvg,
    Linear,
    LocalDescent,
    MimiC,
    QFedAvg,
    Step,
    Terms,
)
from fedcore.algorithms.local_rules import FullGradient, OneMinibatch, Sgd
from fedcore.errors import RangeError, UnknownNameError

CLAIMS = Claims(
    steps=np.array([2.0, 5.0]),
    examples=np.array([4.0, 6.0]),
    counts=np.array([1.0, 3.0]),
    shares=np.array([0.25, 0.75]),
    clients=[1, 0],
    intervals=np.array([2.5, 1.0]),
    absences=np.array([3.0, 1.0]),
)
COHORT = Cohort(
    S=2,
    weighed=1,
    N=8,
    devices=10,
    W=4.0,
    rows=2,
    claims=CLAIMS,
    weights=np.array([1.0, 3.0]),
    squares=np.array([16.0, 4.0]),
    eta_steps=np.array([0.2, 0.5]),
    square_of_sum=8.0,
)
NOBODY = Cohort(S=0, weighed=0, N=8, devices=8, W=1.0, rows=2)


@pytest.mark.parametrize("value", [Direction(), Step(v=Linear()), CLAIMS, COHORT], ids="dsac")
def test_values_are_immutable(value):
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field.name, 0)


def test_a_cohort_takes_keywords_only():
    with pytest.raises(TypeError):
        Cohort(*vars(COHORT).values())


def test_fedavgs_weights():
    assert FedAvg().weigh(CLAIMS).tolist() == [4, 18]
    assert FedAvg("uniform").weigh(CLAIMS).tolist() == [1, 3]
    assert FedAvg().step(COHORT) == Step(v=Linear(A=0.25))


def test_fednovas_lengths_are_those_of_momentum_steps():
    """The k-th gradient from the end counts (1 - rho^k) / (1 - rho) times: 1 + 1.5 + 1.75 after three steps."""
    assert FedNova(0.5).accumulation(np.array([1.0, 2.0, 3.0])).tolist() == [1, 2.5, 4.25]
    assert FedNova().accumulation(np.array([1.0, 7.0])).tolist() == [1, 7]


def test_fednova_with_momentum_by_hand():
    method, a = FedNova(0.5), FedNova(0.5).accumulation(CLAIMS.steps)
    np.testing.assert_allclose(a, [2.5, 1 + 1.5 + 1.75 + 1.875 + 1.9375])
    np.testing.assert_allclose(method.weigh(CLAIMS), [4 * 2 / a[0], 18 * 5 / a[1]])
    step = method.step(COHORT)  # eta = 0.1, p = 4/22 and 18/22
    assert step.v == Linear(A=1 / 22)
    assert step.gamma == pytest.approx(0.1 * (4 * a[0] + 18 * a[1]) / 22)


def test_a_server_of_fednova_undoes_its_clients_momentum():
    """Of constant gradients 1 and 3 with p = 1/4 and 3/4: x' = x - (sum p eta a) (1/4 + 9/4)."""
    server, a = Server(np.zeros(1, np.float32), FedNova(0.5), clients=2, lr=0.1), [1, 2.5]
    ys = [server.x - np.float32(0.1 * a[i] * gradient) for i, gradient in enumerate((1, 3))]
    server.round([Update(i, ys[i], steps=1 + i, examples=1 + 2 * i) for i in range(2)])
    np.testing.assert_allclose(server.x, -0.1 * (1 * a[0] + 3 * a[1]) / 4 * (1 + 9) / 4, rtol=1e-6)


def test_fedexps_step_by_hand():
    """Sum w |d|^2 = 16 + 12, W = 4, |D|^2 = 8 / 16: 28 / (8 (0.5 + 0.2)) = 5."""
    step = FedExP(0.2).step(COHORT)
    assert step.v == Linear(A=0.25)
    assert step.gamma == pytest.approx(5)
    assert FedExP(0.2).step(replace(COHORT, square_of_sum=16.0 * 28)).gamma == 1  # never less


def test_q_fedavgs_weights_and_step():
    """L = 10; sum w = 4^2 + 3 1^2; sum q F^(q-1) |d|^2 = 2 (4 16 + 3 1 4)."""
    method, claims = QFedAvg(2.0), replace(CLAIMS, losses=np.array([4.0, 1.0]))
    np.testing.assert_allclose(method.weigh(claims), [16, 3], rtol=1e-8)
    step = method.step(replace(COHORT, claims=claims, W=19.0))
    assert step.v == Linear(A=1 / 19)
    assert step.gamma == pytest.approx(10 * 19 / (100 * 152 + 10 * 19))
    assert QFedAvg().weigh(CLAIMS).tolist() == [1, 3]
    assert QFedAvg().step(COHORT) == Step(v=Linear(A=1 / 4), gamma=1.0)


def test_q_fedavg_needs_losses():
    server = Server(np.zeros(1, np.float32), QFedAvg(1.0), clients=3, lr=0.1)
    assert server.broadcast([0]).needs_loss
    report = server.round([Update(i, server.x + 1, 1, loss=loss) for i, loss in enumerate([0.0, -1.0, None])])
    assert report.accepted == (0,)
    assert [reason.partition(":")[0].partition("=")[0] for _, reason in report.rejected] == ["loss", "loss"]


def test_fedaus_weights_and_step():
    assert FedAU().weigh(CLAIMS).tolist() == [2.5, 1]
    assert FedAU().step(COHORT) == Step(v=Linear(A=1 / 8))


def test_fedaus_intervals_by_hand():
    """The server accepts client 0 in rounds 1, 3 and 8, client 1 in all, and client 2 joins before round 2; K = 3."""
    server = Server(np.zeros(1, np.float32), FedAU(cutoff=3), clients=2, lr=0.1)
    received = [[1], [0, 1], [1], [0, 1, 2], [1], [1], [1], [1], [0, 1, 2]]
    # Client 0's intervals: 2 | 2 | 3, then 2. Client 2's: 2, then 3 of K.
    due = {1: [1, 1], 3: [2, 1, 1], 8: [7 / 3, 1, 5 / 2]}
    for t, cohort in enumerate(received):
        if t == 2:
            server.add_clients([2])
        report = server.round([Update(i, server.x + 1, 1) for i in cohort])
        assert report.weights.tolist() == due.get(t, [1])
    server.remove_client(0)
    server.add_clients([0])  # the count starts again
    assert server.round([Update(0, server.x, 1)]).weights.tolist() == [1]


def test_fedawes_weights_and_step():
    assert FedAWE(0.5).weigh(CLAIMS).tolist() == [1.5, 0.5]
    assert FedAWE(0.5).step(COHORT) == Step(v=Linear(A=1 / 2))


def test_fedawe_by_hand():
    """The first model is 0. Client 1 first replies in round 1, so its move counts twice; then both start from x."""
    model = {"w": np.zeros(1, np.float32), "running_mean": np.zeros(1, np.float32)}
    server = Server(model, FedAWE(), clients=2, lr=0.1)

    def sends(client, w, mean):
        return Update(client, {"w": np.float32([w]), "running_mean": np.float32([mean])}, 1)

    server.round([sends(0, -1, 4)])
    np.testing.assert_allclose(server.x, [-1, 4])
    sent = server.broadcast([0, 1])
    assert [sent.start(i).tolist() for i in (0, 1)] == [[-1, 4], [0, 0]]
    assert [sent.of(i).start.tolist() for i in (0, 1)] == [[-1, 4], [0, 0]]
    assert server.round([sends(0, -1.5, 6), sends(1, -1, 3)]).weights.tolist() == [1, 2]
    np.testing.assert_allclose(server.x, [(-1.5 - 2) / 2, (6 + 2 * 3) / 3])
    assert server._backend.snapshot.past == {}  # no client starts from an earlier model
    server.round([])
    server.add_clients([2])
    server.round([sends(0, -1.75, 4), Update(2, np.float32([-1, 0]), 1, kind="delta")])
    np.testing.assert_allclose(server.x, [(-1.75 - 2.75) / 2, (2 * 4 + 4) / 3], rtol=1e-6)
    assert server._backend.snapshot.past.keys() == {2}


def test_fedawes_limits():
    server = Server(np.zeros(3, np.float32), FedAWE(), clients=2, lr=0.1)
    with pytest.raises(RangeError, match=r"^start\b"):
        server.broadcast([0]).of(0).numbers()
    server.round([Update(0, server.x, 1)])
    server.change(lr=0.2)  # client 1 still starts from the first model
    assert server.broadcast([1]).start(1).tolist() == [0, 0, 0]


def test_fedacgs_step():
    assert FedACG(0.5, 0.25).step(COHORT) == Step(v=Linear(A=1 / 4, g=0.5), lookahead=0.5)
    assert FedACG(0.5, 0.25).direction == Direction(mu=0.25)


def test_mb_storms_gamma():
    assert MBSTORM(0.5).step(COHORT) == Step(v=Linear(A=0.25))
    step = MBSTORM(0.5, steps=3).step(COHORT)
    assert step.v == Linear(A=0.25)
    assert step.gamma == pytest.approx(3 * (0.2 + 3 * 0.5) / 4)
    assert MBSTORM(0.5, steps=3).step(NOBODY).gamma is None


def test_fedstales_weights_and_steps():
    assert FedStale().weigh(CLAIMS).tolist() == [1, 1]
    assert FedStale(chances=0.25).weigh(CLAIMS).tolist() == [4, 4]
    assert FedStale(chances=[0.5, 0.25]).weigh(CLAIMS).tolist() == [4, 2]
    assert FedStale(0.25).adds == Terms(row=1, r=-0.25)
    assert FedStale(0.25).step(COHORT) == Step(v=Linear(A=1 / 2, T=0.25 / 8), T=Linear(T=1, B=1))
    assert FedStale(0.25, 0.5).step(COHORT) == Step(v=Linear(A=1 / 8, T=0.25 / 8), T=Linear(T=1, B=1))


@pytest.mark.parametrize("stranger", [2, -1, "a"])
def test_a_client_without_a_chance_is_refused(stranger):
    claims = replace(CLAIMS, clients=[0, stranger])
    with pytest.raises(RangeError, match=rf"^chances\b.*{stranger!r}"):
        FedStale(chances=[0.5, 0.25]).weigh(claims)


def test_the_schemes_weights():
    """p = (1/4, 3/4); the first did two of five steps."""
    assert FlexibleFedAvg("A", 5).weigh(CLAIMS).tolist() == [0, 0.75]
    assert FlexibleFedAvg("A", 2).weigh(CLAIMS).tolist() == [0.25, 0.75]
    assert FlexibleFedAvg("B", 5).weigh(CLAIMS).tolist() == [0.25, 0.75]
    assert FlexibleFedAvg("C", 5).weigh(CLAIMS).tolist() == [0.625, 0.75]
    young = replace(CLAIMS, ages=np.array([2.0, np.inf]))
    assert FlexibleFedAvg("B", 5).weigh(young).tolist() == [0.375, 0.75]  # 1 + 2 / 2^2
    assert FlexibleFedAvg("B", 5, "vanilla").weigh(young).tolist() == [0.25, 0.75]
    assert FlexibleFedAvg("A", 5).step(COHORT) == Step(v=Linear(A=10))  # devices / weighed
    assert FlexibleFedAvg("C", 5).step(COHORT) == Step(v=Linear(A=1))


def test_steps_of_methods_with_rows():
    assert FedDyn(0.5).step(COHORT) == Step(v=Linear(A=1 / 2 + 1 / 8, T=1 / 8), T=Linear(T=1, A=1))
    assert MIFA().step(COHORT) == Step(v=Linear(A=1 / 8, T=1 / 8), T=Linear(T=1, A=1))
    assert MimiC().step(COHORT) == Step(v=Linear(A=1 / 2, T=-1 / 8), T=Linear(T=1, A=-1, v=2))
    assert MimiC(placement="client").step(COHORT) == Step(v=Linear(A=1 / 4))
    assert SCAFFOLDM(0.25).step(COHORT) == Step(v=Linear(A=0.25 / 2, T=0.25 / 8, g=0.75), T=Linear(T=1, A=1))
    assert SCAFFOLDMVR(0.25).step(COHORT) == Step(v=Linear(A=1 / 2), T=Linear(T=1, B=1))
    assert LocalDescent().step(COHORT) == Step(v=Linear(A=1 / 4))
    assert FedAsync(0.5).step(COHORT) == Step(v=Linear(A=0.5 / 4))


def test_rounds_in_which_x_moves():
    alone = replace(COHORT, W=0.0)
    assert FedAvg().moves(COHORT)
    assert not FedAvg().moves(alone)
    assert [MIFA().moves(replace(NOBODY, rows=rows)) for rows in (7, 8)] == [False, True]
    assert MIFA(wait=False).moves(NOBODY)
    assert FedStale(chances=0.5).moves(alone)
    assert not FedStale().moves(alone)


def test_directions():
    assert FedAvg().direction == LocalDescent().direction == Direction(a=1)
    assert FedProx(mu=0.5).direction == Direction(mu=0.5)
    assert FedAvgM(0.25).direction == Direction(a=0.25, from_momentum=0.75)
    assert FedAvgM(0.25, placement="client").direction == Direction(a=0.25)
    assert FedAvgM(0.25, reparameterised=True).direction == Direction(a=1, from_momentum=0.75)
    assert FedAvgMVR(0.25).direction == MBSTORM(0.25).direction == Direction(b=-0.75, from_momentum=0.75)
    assert FedDyn(0.5).direction == Direction(mu=0.5, from_row=-0.5)
    assert SCAFFOLD().direction == Direction(from_row=-1, from_mean=1)
    assert SCAFFOLDM(0.25).direction == Direction(a=0.25, from_row=-0.25, from_mean=0.25, from_momentum=0.75)
    reparameterised = SCAFFOLDM(0.25, reparameterised=True).direction
    assert reparameterised == Direction(a=1, from_row=-1, from_mean=1, from_momentum=0.75)
    assert SCAFFOLDMVR(0.25).direction == Direction(b=-0.75, from_row=-0.25, from_mean=0.25, from_momentum=0.75)


def test_local_rules():
    assert FedAvg().local_rule == LocalDescent().local_rule == Sgd()
    assert LocalDescent(full_gradient=True).local_rule == FullGradient()
    assert MBSTORM().local_rule == OneMinibatch()


@pytest.mark.parametrize(
    ("make", "ends", "beyond"),
    [
        (lambda end: FedAsync(end), (1e-9, 1), (0, 1.001)),
        (lambda end: FedAvgM(end), (1e-9, 1), (0, 1.001)),
        (lambda end: FedAvgMVR(end), (1e-9, 1), (0, 1.001)),
        (lambda end: MBSTORM(end), (1e-9, 1), (0, 1.001)),
        (lambda end: MBSTORM(steps=end), (1, 2**40), (0, 1.5)),
        (lambda end: SCAFFOLDM(end), (1e-9, 1), (0, 1.001)),
        (lambda end: SCAFFOLDMVR(end), (1e-9, 1), (0, 1.001)),
        (lambda end: FedDyn(end), (1e-9, 1e6), (0, 1.1e6)),
        (lambda end: FedExP(end), (1e-9, 1e9), (0.9e-9, 1.1e9)),
        (lambda end: FedNova(end), (0, 0.9999), (-1e-9, 0.99999)),
        (lambda end: FedProx(mu=end), (0, 1e-9, 1e6), (-1e-9, 1.1e6)),
        (lambda end: FedStale(end), (0, 1), (-1e-9, 1.001)),
        (lambda end: FedStale(chances=end), (1e-9, 1), (0, 1.001, [])),
        (lambda end: FedStale(chances=[0.5, end]), (1e-9, 1), (0, 1.001)),
        (lambda end: FlexibleFedAvg(local_steps=end), (1, 2**40), (0, 1.5)),
    ],
)
def test_the_range_of_an_option(make, ends, beyond):
    for end in ends:
        make(end)
    for end in beyond:
        with pytest.raises(RangeError):
            make(end)


@pytest.mark.parametrize(
    ("make", "option", "known"),
    [
        (lambda word: FedAvg(word), "weights", ("uniform", "examples")),
        (lambda word: FedProx(weights=word), "weights", ("uniform", "examples")),
        (lambda word: FedAvgM(placement=word), "placement", ("server", "client")),
        (lambda word: FlexibleFedAvg(word), "scheme", ("A", "B", "C")),
        (lambda word: FlexibleFedAvg(reboot=word), "reboot", ("fast", "vanilla")),
        (lambda word: MimiC(units=word), "units", ("gradient", "update")),
        (lambda word: MimiC(placement=word), "placement", ("server", "client")),
        (lambda word: SCAFFOLD(control=word), "control", ("derived", "sent")),
        (lambda word: SCAFFOLD(placement=word), "placement", ("server", "client")),
        (lambda word: SCAFFOLDM(control=word), "control", ("derived", "sent")),
        (lambda word: SCAFFOLDMVR(placement=word), "placement", ("server", "client")),
    ],
)
def test_the_values_of_an_option(make, option, known):
    for word in known:
        assert getattr(make(word), option) == word
    with pytest.raises(UnknownNameError, match=rf"{option}\b.*'x'"):
        make("x")


@pytest.mark.parametrize(("q", "loss"), [(1, 1e40), (5, 1e65), (100, 1e5)])
def test_no_loss_of_one_client_ends_a_round_of_qfedavg(q, loss):
    server = Server(np.ones(2, np.float32), QFedAvg(q), 2, lr=0.1)
    ys = np.float32([[2, 3], [1, 1]])
    report = server.round([Update(0, ys[0], 1, loss=1.0), Update(1, ys[1], 1, loss=loss)])
    assert report.accepted == (0, 1)
    assert np.isfinite(server.x).all()
