"""Every method equals a float64 transcription of its paper: any cohorts, draws, warm starts, changes of clients."""

import numpy as np
import pytest

import fedcore
from fedcore import Server, algorithms
from fedcore.algorithms.rates import Exponential, Staircase
from tests.outsiders.house.mine.methods import Accelerated
from tests.server import papers
from tests.server.further_papers import fedacg, fedau, fedawe, feddyn, fedexp, fednova, fedstale, fedvarp, qfedavg
from tests.server.papers import (
    ROUNDS,
    Clients,
    Course,
    K,
    N,
    arbitrary_course,
    fedavg,
    flexible,
    follow,
    mb_storm,
    mifa,
    mimic,
    momentum,
    n,
    start_of,
)

BETA, CHANCES, LR, CLOSE = 0.3, [0.3 + 0.05 * i for i in range(N)], Exponential(0.1, 0.98), 2e-6
UNIFORM = dict(weigh=lambda n_k: 1)
# Whether the transcription takes draws with replacement (D), a warm start (W), or clients that are removed (R).
METHODS = {
    "FedAvg": (algorithms.FedAvg(), fedavg, {}, "D"),
    "FedAvg, uniform": (algorithms.FedAvg("uniform"), fedavg, UNIFORM, "D"),
    "FedAsync": (algorithms.FedAsync(0.6), fedavg, UNIFORM | dict(alpha=0.6), "D"),
    "FedProx": (algorithms.FedProx(mu=0.5), fedavg, dict(mu=0.5), "D"),
    "MIFA": (algorithms.MIFA(), mifa, dict(wait=True), "WR"),
    "MIFA, no waiting": (algorithms.MIFA(wait=False), mifa, dict(wait=False), "WR"),
    "MimiC": (algorithms.MimiC(), mimic, {}, "R"),
    "MimiC, update units": (algorithms.MimiC(units="update"), mimic, dict(update_units=True), "R"),
    "MimiC, short history": (algorithms.MimiC(history=2), mimic, {}, "R"),
    "SCAFFOLD": (algorithms.SCAFFOLD(), momentum, dict(beta=1, controls=True), "WR"),
    "SCAFFOLD, two vectors": (algorithms.SCAFFOLD(control="sent"), momentum, dict(beta=1, controls=True), "WR"),
    "FedAvgM": (algorithms.FedAvgM(BETA), momentum, dict(beta=BETA), "D"),
    "SCAFFOLDM": (algorithms.SCAFFOLDM(BETA), momentum, dict(beta=BETA, controls=True), "WR"),
    "SCAFFOLDM, two vectors": (algorithms.SCAFFOLDM(BETA, "sent"), momentum, dict(beta=BETA, controls=True), "W"),
    "FedAvgMVR": (algorithms.FedAvgMVR(BETA), momentum, dict(beta=BETA, vr=True), "DW"),
    "SCAFFOLDMVR": (algorithms.SCAFFOLDMVR(BETA), momentum, dict(beta=BETA, controls=True, vr=True), "WR"),
    "MBSTORM": (algorithms.MBSTORM(BETA), mb_storm, dict(beta=BETA), "DW"),
    "FlexibleFedAvg A": (algorithms.FlexibleFedAvg("A", K), flexible, dict(scheme="A"), ""),
    "FlexibleFedAvg B": (algorithms.FlexibleFedAvg("B", K), flexible, dict(scheme="B"), ""),
    "FlexibleFedAvg C": (algorithms.FlexibleFedAvg("C", K), flexible, dict(scheme="C"), ""),
    "LocalDescent": (algorithms.LocalDescent(), fedavg, UNIFORM, "D"),
    "FedVARP": (algorithms.FedVARP(), fedvarp, {}, ""),
    "FedStale": (algorithms.FedStale(0.6), fedstale, dict(beta=0.6), ""),
    "FedStale, one chance": (algorithms.FedStale(0.6, chances=0.5), fedstale, dict(beta=0.6, chances=0.5), ""),
    "FedStale, chances": (algorithms.FedStale(0.6, chances=CHANCES), fedstale, dict(beta=0.6, chances=CHANCES), ""),
    "FedDyn": (algorithms.FedDyn(0.5), feddyn, dict(alpha=0.5), ""),
    "FedNova": (algorithms.FedNova(), fednova, {}, "D"),
    "FedExP": (algorithms.FedExP(), fedexp, {}, "D"),
    "FedACG": (algorithms.FedACG(0.6, 0.3), fedacg, dict(lam=0.6, beta=0.3), "D"),
    "FedAU": (algorithms.FedAU(), fedau, dict(cutoff=50), "R"),
    "FedAU, cutoff": (algorithms.FedAU(3), fedau, dict(cutoff=3), "R"),
    "FedAWE": (algorithms.FedAWE(0.2), fedawe, dict(eta=0.2), "R"),
    "QFedAvg": (algorithms.QFedAvg(2.0), qfedavg, dict(q=2.0), "D"),
    "QFedAvg, small q": (algorithms.QFedAvg(0.1), qfedavg, dict(q=0.1), "D"),
    "QFedAvg, q = 0": (algorithms.QFedAvg(), fedavg, UNIFORM, "D"),
    "Accelerated of a caller": (Accelerated(0.6, 0.3), fedacg, dict(lam=0.6, beta=0.3), ""),
}


def methods(kind):
    return [name for name, (*_, kinds) in METHODS.items() if kind in kinds]


def distance(method, seed, course, clients, warm=None):
    """The largest relative distance of a server's x from the paper's."""
    algorithm, paper, options, _ = METHODS[method]
    data, x0 = Clients(seed), start_of(seed)
    server = Server(x0, algorithm, clients, lr=LR)
    if warm is not None:
        server.warm_start({i: gradient.astype(np.float32) for i, gradient in warm.items()})
        options = options | dict(warm=warm)
    return follow(server, data, course, paper(data, x0.astype(np.float64), LR, course, **options))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sample(1)
def test_any_cohorts(method, seed):
    assert distance(method, seed, arbitrary_course(seed), dict(enumerate(Clients(seed).examples))) < CLOSE


def test_every_method_is_transcribed():
    names = {type(algorithm).__name__ for algorithm, *_ in METHODS.values()}
    assert names == {*algorithms.REGISTRY, "Accelerated"}
    several = {name for name, method in algorithms.REGISTRY.items() if not method().updates_once}
    assert {type(METHODS[name][0]).__name__ for name in methods("D")} == several


@pytest.mark.parametrize("method", methods("D"))
def test_draws_with_replacement(method):
    """The paper sums over the draws; the server sums over the clients, each with its number of draws."""
    assert distance(method, 0, arbitrary_course(0, draws=True), N) < CLOSE


@pytest.mark.sample(1)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("method", methods("W"))
def test_warm_starts(method, step):
    """c_i^0 is the mean of minibatch gradients at x_0, c^0 their mean, g^0 = c^0 (-VR) or 0 (-M); others are zero."""
    seed = step // 2
    gradients = Clients(seed).warm(start_of(seed), seed)
    assert distance(method, seed, arbitrary_course(seed), N, {i: gradients[i] for i in range(0, N, step)}) < CLOSE


def changing_clients(seed):
    """Eight clients at first; before every fifth round one joins or leaves, and clients may return."""
    rng = np.random.default_rng([seed, 2])
    start = frozenset(range(8))
    here, changes, active = set(start), {}, []
    for t in range(ROUNDS):
        if t % 5 == 4:
            away = sorted(set(range(N)) - here)
            comes = len(here) < 5 or (away and rng.random() < 0.5)
            client = int(rng.choice(away if comes else sorted(here)))
            changes[t] = [("arrive" if comes else str(rng.choice(["exclude", "include"])), client)]
            here ^= {client}
        if t == 41:  # removed and added at once
            changes[t] = [("exclude", min(here)), ("arrive", min(here))]
        if t in (62, 63):  # two changes at once
            first, second = sorted(here)[:2]
            changes[t] = [("exclude", first), ("include", second)]
            here -= {first, second}
            if t == 63:
                changes[t].append(("arrive", first))
                here.add(first)
        active.append([i for i in sorted(here) if rng.random() < 0.6])
    active[3], active[20] = [], active[20][:1]
    steps = np.where(rng.random((ROUNDS, N)) < 0.5, K, rng.integers(1, K + 1, size=(ROUNDS, N)))
    return Course(active, steps.tolist(), start, changes)


@pytest.mark.parametrize("method", methods("R"))
def test_rows_of_removed_clients_leave_the_sums(method):
    seed = int("," in method)
    course = changing_clients(seed)
    assert distance(method, seed, course, sorted(course.start)) < CLOSE


def test_mifa_steps_in_an_empty_round_after_the_only_client_without_a_row_was_removed():
    """It steps along the mean of rounds in which x stayed, with the last K and today's rate."""
    course = Course([[0, 1], [], [], [1]], [[K] * N] * 4, frozenset({0, 1, 2}), {1: [("exclude", 2)]})
    assert distance("MIFA", 0, course, 3) < CLOSE


@pytest.mark.parametrize("reboot", ["fast", "vanilla"])
@pytest.mark.parametrize("scheme", "ABC")
def test_shares_boosts_and_restarts_of_flexible_participation(scheme, reboot):
    seed = int(reboot == "vanilla")
    clients, course, x0 = Clients(seed), changing_clients(seed), start_of(seed)
    lr, objective = Staircase(0.2), set(course.start)
    for t, changes in course.changes.items():
        for kind, i in changes:
            if kind == "exclude" or (kind == "arrive" and i not in objective):
                lr = lr.restarted(t)
            (objective.discard if kind == "exclude" else objective.add)(i)
    sizes = {i: clients.examples[i] for i in course.start}
    server = Server(x0, algorithms.FlexibleFedAvg(scheme, K, reboot), sizes, lr=lr)
    paper = flexible(clients, x0.astype(np.float64), 0.2, course, scheme, fast=reboot == "fast")
    assert follow(server, clients, course, paper) < CLOSE


@pytest.mark.parametrize("units", ["gradient", "update"])
@pytest.mark.parametrize("kind", ["model", "delta", "gradient"])
def test_mimic_with_rows_on_the_clients(kind, units):
    """Algorithm 1's "practical implementation": clients send h + c and keep v - h; "delta" also with draws."""
    seed = 0 if kind == "model" else 1
    clients, course, x0 = Clients(seed), arbitrary_course(seed, draws=kind == "delta"), start_of(seed)
    server = Server(x0, algorithms.MimiC(units, placement="client"), N, lr=LR)
    c, h = np.zeros((N, n)), {}

    def work(broadcast, i, steps):
        distance = broadcast.lr * steps
        unit = distance if units == "gradient" else 1.0
        h[i] = (broadcast.x - clients.train(i, broadcast.x, broadcast.lr, steps)[0]) / unit
        delta = -unit * (h[i] + c[i])
        y = {"model": broadcast.x + delta, "delta": delta, "gradient": -delta / distance}[kind]
        return dict(value=y.astype(np.float32), kind=kind)

    def after(accepted):
        for i in accepted:
            c[i] = server.v - h[i]

    paper = mimic(clients, x0.astype(np.float64), LR, course, update_units=units == "update", centred=False)
    assert follow(server, clients, course, paper, work, after) < CLOSE
    assert np.abs(c).max() > 0.1


@pytest.mark.parametrize("warm", [False, True], ids=["from zero", "warm"])
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (algorithms.SCAFFOLD(placement="client"), dict(beta=1)),
        (algorithms.SCAFFOLDM(BETA, placement="client"), dict(beta=BETA)),
        (algorithms.SCAFFOLDMVR(BETA, placement="client"), dict(beta=BETA, vr=True)),
    ],
    ids=["SCAFFOLD", "SCAFFOLDM", "SCAFFOLDMVR"],
)
def test_scaffold_with_rows_on_the_clients(algorithm, options, warm):
    """Clients keep c_i and send its change."""
    seed = int(warm)
    clients, course, x0 = Clients(seed), arbitrary_course(seed), start_of(seed)
    server = Server(x0, algorithm, N, lr=LR)
    c = np.zeros((N, n))
    if warm:
        c[:] = clients.warm(x0, seed)
        server.warm_start(dict(enumerate(c.astype(np.float32))))
        options = options | dict(warm=dict(enumerate(c)))

    def work(broadcast, i, steps):
        own = -options["beta"] * c[i]  # the papers' - beta c_i is not in the server's offset
        y, raw = clients.train(i, broadcast.x, broadcast.lr, steps, clients.direction(broadcast, i, own))
        change, c[i] = raw - c[i], raw
        return dict(value=y.astype(np.float32), control=change.astype(np.float32))

    paper = momentum(clients, x0.astype(np.float64), LR, course, controls=True, **options)
    assert follow(server, clients, course, paper, work) < CLOSE


def eta(t):
    return 0.2 * 0.98**t


def gamma(t):
    return 0.4 * 0.99**t


@pytest.mark.parametrize("own_gamma", [False, True], ids=["gamma = eta K", "gamma"])
@pytest.mark.parametrize(
    ("method", "options", "controls"),
    [
        (algorithms.FedAvgM, {}, False),
        (algorithms.SCAFFOLDM, {}, True),
        (algorithms.SCAFFOLDM, dict(control="sent"), True),
    ],
    ids=["FedAvgM", "SCAFFOLDM", "SCAFFOLDM, two vectors"],
)
def test_the_reparameterised_form(method, options, controls, own_gamma):
    """Eq. 31-33 of Cheng et al.: g / beta, beta eta and beta gamma, against the transcription and the plain form."""
    seed = int(own_gamma)
    clients, course, x0 = Clients(seed), arbitrary_course(seed), start_of(seed)
    plain = Server(x0, method(BETA, **options), N, lr=eta, server_lr=gamma if own_gamma else None)
    hats = dict(lr=lambda t: BETA * eta(t), server_lr=(lambda t: BETA * gamma(t)) if own_gamma else None)
    other = Server(x0, method(BETA, reparameterised=True, **options), N, **hats)
    arguments = clients, x0.astype(np.float64), eta, course, BETA
    rates = dict(gamma=gamma if own_gamma else None, controls=controls)
    xs = list(papers.reparameterised(*arguments, **rates))
    gs, g_hats = [], []
    assert follow(other, clients, course, xs, after=lambda _: g_hats.append(other.v)) < CLOSE
    assert follow(plain, clients, course, xs, after=lambda _: gs.append(plain.v)) < CLOSE
    np.testing.assert_allclose(g_hats, np.array(gs) / BETA, rtol=0, atol=1e-4)
    assert np.abs(gs).max() > 0.1
    np.testing.assert_allclose(xs, list(momentum(*arguments, **rates)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("start", "rounds", "seed"), [(None, 2000, 0), (1e4, 2500, 1)], ids=["near", "far"])
def test_mimic_ends_at_the_optimum_of_all_clients(start, rounds, seed):
    """The corrections add up to zero; without the centring C / N they would keep the rounding of the large rounds."""
    rng, clients = np.random.default_rng(seed), Clients(seed)
    x0 = rng.normal(size=n).astype(np.float32) if start is None else np.full(n, start, np.float32)
    server = Server(x0, "MimiC", clients=N, lr=0.1)
    for t in range(rounds):
        cohort = np.flatnonzero(rng.random(N) < 0.3).tolist()
        server.round([fedcore.Update(i, clients.train(i, server.x, 0.1, 1)[0].astype("f"), steps=1) for i in cohort])
        if start is None and t % 500 == 499:
            corrections = np.array([server.correction(i) for i in range(N)])
            size = np.abs(corrections).sum(axis=0).max()
            assert size > 1
            assert np.abs(corrections.sum(axis=0)).max() < 1e-6 * size
    optimum = (clients.a * clients.optimum).sum(axis=0) / clients.a.sum(axis=0)
    assert np.linalg.norm(server.x - optimum) < 1e-5 * np.linalg.norm(optimum)
