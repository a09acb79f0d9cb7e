"""Server optimisers against a float64 transcription of Reddi et al. 2021, Algorithm 2."""

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Model, Server, Storage, Update
from fedcore.algorithms import MBSTORM, FedExP, FedNova, QFedAvg, optimizers
from fedcore.errors import AlgorithmError, CheckpointError, DivergedError, RangeError, UnknownNameError

n, rounds = 7, 25
OPTIMIZERS = {
    "SGD": optimizers.SGD(momentum=0.7),
    "Nesterov": optimizers.Nesterov(momentum=0.7, eta=0.5),
    "Adagrad": optimizers.Adagrad(beta1=0.3, tau=0.05),
    "Adam": optimizers.Adam(beta1=0.8, beta2=0.95, tau=0.01),
    "Yogi": optimizers.Yogi(beta1=0.8, beta2=0.95, tau=0.01),
}


def transcribed(name, options, x, deltas, eta):
    """x after steps with these pseudo-gradients Delta_t = the clients' mean of y - x."""
    m = np.zeros(n)
    v = np.full(n, getattr(options, "tau", 0.0) ** 2)
    for delta in deltas:
        if name in ("SGD", "Nesterov"):
            m = options.momentum * m + delta
            x = x + eta * (m if name == "SGD" else delta + options.momentum * m)
            continue
        m = options.beta1 * m + (1 - options.beta1) * delta
        if name == "Adagrad":
            v = v + delta**2
        elif name == "Adam":
            v = options.beta2 * v + (1 - options.beta2) * delta**2
        else:
            v = v - (1 - options.beta2) * delta**2 * np.sign(v - delta**2)
        x = x + eta * m / (np.sqrt(v) + options.tau)
    return x


@pytest.mark.parametrize("server_lr", [None, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_is_the_papers(name, server_lr):
    rng = np.random.default_rng(0)
    x0, lr, steps = rng.normal(size=n).astype(np.float32), 0.25, 2
    server = Server(x0, "FedAvg", clients=3, lr=lr, server_lr=server_lr, optimizer=OPTIMIZERS[name])
    deltas = []
    for _ in range(rounds):
        sent = rng.normal(size=(3, n)).astype(np.float32)
        deltas.append(sent.mean(axis=0, dtype=np.float64))
        server.round([Update(i, value=sent[i], kind="delta", steps=steps) for i in range(3)])
    # With a server rate v is a mean gradient, Delta / (eta K).
    unit = 1.0 if server_lr is None else 1 / (lr * steps)
    eta = server_lr or (1.0 if name == "SGD" else OPTIMIZERS[name].eta)
    due = transcribed(name, OPTIMIZERS[name], x0.astype(np.float64), unit * np.array(deltas), eta)
    np.testing.assert_allclose(server.x, due, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("method", ["FedAvg", "MIFA"])
def test_the_optimizers_rate_without_a_server_rate(method):
    rng = np.random.default_rng(1)
    one, other = (
        Server(np.zeros(n, np.float32), method, 2, lr=0.5, optimizer=optimizers.Adam(), **more)
        for more in ({}, {"server_lr": 0.1})
    )
    for server in (one, other):
        report = server.round([Update(i, value=rng.normal(size=n), kind="delta", steps=4) for i in range(2)])
        assert report.gamma == 0.1
    plain = Server(np.zeros(n, np.float32), method, 2, lr=0.5, optimizer=optimizers.Adam(eta=None))
    report = plain.round([Update(i, value=np.ones(n), kind="delta", steps=4) for i in range(2)])
    assert report.gamma == (1.0 if method == "FedAvg" else 2.0)


@pytest.mark.parametrize("method", [FedExP(), QFedAvg(), FedNova(), MBSTORM(0.5, steps=2)], ids=repr)
def test_an_optimizer_s_rate_goes_before_that_of_the_method(method):
    server = Server(np.zeros(n, np.float32), method, 1, lr=0.5, optimizer=optimizers.SGD(0.0, eta=0.25))
    assert server.round([Update(0, np.ones(n), method.most_steps or 1, loss=1.0)]).gamma == 0.25


def test_kingma_and_ba_s_correction_makes_the_first_step_eta_long():
    adam = optimizers.Adam(eta=0.3, s0=0.0, tau=1e-9, corrected_from=1)
    server = Server(np.zeros(n, np.float32), "FedAvg", 2, lr=1.0, optimizer=adam)
    for k in range(1, 4):
        server.round([Update(i, value=np.full(n, 7.0), kind="delta", steps=1) for i in range(2)])
        np.testing.assert_allclose(server.x, 0.3 * k, rtol=1e-6)  # m and s, corrected, are 7 and 49 in every round


def test_a_folder_from_before_the_optimizers_rates(tmp_path):
    server = Server(np.zeros(n, np.float32), "FedAvg", 2, lr=1.0, optimizer=optimizers.Adam(eta=None))
    server.save(tmp_path / "run")
    with ClientStore.open(tmp_path / "run") as rows:
        state = rows.state
        for option in ("eta", "s0", "corrected_from"):
            del state["settings"]["optimizer"]["options"][option]
        rows.commit(0, state=state)
    for given in (None, optimizers.Adam(eta=None)):
        with Server.load(tmp_path / "run", optimizer=given) as loaded:
            assert loaded.round([Update(0, value=np.ones(n), kind="delta", steps=1)]).gamma == 1.0
    with pytest.raises(CheckpointError, match=r"^optimizer\b"):
        Server.load(tmp_path / "run", optimizer=optimizers.Adam())


def test_an_unknown_name_and_wrong_numbers_are_refused():
    with pytest.raises(UnknownNameError, match=r"^optimizer\b.*Adam"):
        optimizers.named("Adma")
    for wrong in (dict(beta2=1.5), dict(tau=0.0), dict(tau=1e-40), dict(beta1=-0.1)):
        with pytest.raises(RangeError):
            optimizers.Adam(**wrong)


class Own(optimizers.SGD):
    """An optimizer of a user; ``fault`` is what it does wrong."""

    fault = None

    def turn(self, v, moments, x, *, gamma, moments_out, x_out):
        before = x_out.copy()
        super().turn(v, moments, x, gamma=gamma, moments_out=moments_out, x_out=x_out)
        if self.fault == "skip":
            x_out[-1] = before[-1]
        elif self.fault is not None:
            self.fault(v, moments, x, moments_out, x_out)
        return 0.0  # a wrong norm has no effect


def write(vector, value=np.nan):
    vector[...] = value


FAULTS = {
    "x' is NaN": (lambda v, m, x, m_out, x_out: write(x_out), DivergedError),
    "x' is infinite": (lambda v, m, x, m_out, x_out: write(x_out, np.inf), DivergedError),
    "a moment is NaN": (lambda v, m, x, m_out, x_out: write(m_out[0]), DivergedError),
    "writes to v": (lambda v, m, x, m_out, x_out: write(v), AlgorithmError),
    "writes to x": (lambda v, m, x, m_out, x_out: write(x), AlgorithmError),
    "writes to a moment": (lambda v, m, x, m_out, x_out: write(m[0]), AlgorithmError),
    "raises": (lambda *_: 1 / 0, AlgorithmError),
    "does not write the last number of x'": ("skip", DivergedError),
}
PLACES = {
    "in memory": lambda path: {},
    "in files": lambda path: {"storage": Storage(path / "run", resident=1 << 20)},
    "in shards": lambda path: {"compute": Compute(shards=2)},
    "in groups": lambda path: {},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_an_own_optimizer_end_the_round(fault, place, tmp_path, monkeypatch):
    net = {"a": np.linspace(-1, 1, 30_000, dtype=np.float32), "b": np.ones(10_000, np.float32)}
    model = Model(net, partial={"a": "a", "b": "b"}) if place == "in groups" else net

    def add(server, step):
        return server.round([Update(0, {name: x + np.float32(step) for name, x in net.items()}, steps=1)])

    with (
        Server(model, "FedAvg", 2, lr=0.1, optimizer=Own(), **PLACES[place](tmp_path)) as server,
        Server(net, "FedAvg", 2, lr=0.1, optimizer=optimizers.SGD()) as due,
    ):
        add(server, 1), add(due, 1)
        wrong, error = FAULTS[fault]
        monkeypatch.setattr(Own, "fault", staticmethod(wrong) if callable(wrong) else wrong)
        with pytest.raises(error, match="Own"):
            add(server, 2)
        assert (server.round_number, server.x.tobytes()) == (1, due.x.tobytes())
        monkeypatch.setattr(Own, "fault", None)
        add(server, 3), add(due, 3)
        assert server.x.tobytes() == due.x.tobytes()


@pytest.mark.parametrize("wrong", [np.nan, -1.0, 0.0, "fast", None])
def test_rate_of_an_own_optimizer_is_checked(wrong, monkeypatch):
    own = Own()
    monkeypatch.setattr(Own, "rate", lambda self, round: 1 / 0 if wrong is None else wrong)
    with pytest.raises((AlgorithmError, RangeError), match=r"Own.*rate"):
        Server(np.zeros(n, np.float32), "FedAvg", 2, lr=1.0, optimizer=own)


@pytest.mark.parametrize(
    "start",
    [lambda n: None, lambda n: 1 / 0, np.zeros, lambda n: (np.zeros(n),), lambda n: (np.zeros(n + 1, np.float32),)],
)
def test_moments_of_an_own_optimizer_are_checked(start, monkeypatch):
    monkeypatch.setattr(Own, "start", lambda self, n: start(n))
    with pytest.raises(AlgorithmError, match=r"Own.*start"):
        Server(np.zeros(n, np.float32), "FedAvg", 2, lr=1.0, optimizer=Own())
