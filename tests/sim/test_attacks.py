"""Attacks: the vectors and numbers that dishonest clients send, by hand; their place in a loop and in a trial."""

import numpy as np
import pytest

from fedcore import Server, Update
from fedcore.errors import ConfigError, ShapeError
from fedcore.sim import attacks
from fedcore.sim.attacks import ALIE, IPM, REGISTRY, Drift, FalseExamples, FalseSteps, LabelFlip, Liars, Noise
from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment.schema import Trial
from fedcore.sim.experiment.trial import build
from tests.sim.experiment.kit import assert_resumes

OWN = np.float32([3, 4])
OTHERS = [np.float32([1, 2]), np.float32([5, -2]), np.float32([3, 3])]


def lie(attack, *, round=0, client=0, seed=0):
    return attack.vector(OWN, OTHERS if attack.sees_honest else [], seed=seed, round=round, client=client)


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (attacks.Honest(), [3, 4]),
        (attacks.Scaling(10.0), [30, 40]),
        (attacks.SignFlip(2.0), [-6, -8]),
        (ALIE(1.5), [3 - 1.5 * np.sqrt(8 / 3), 1 - 1.5 * np.sqrt(14 / 3)]),
        (IPM(9.0), [-27, -9]),
        (attacks.FreeRider(), [0, 0]),
        (LabelFlip(), [3, 4]),
        (FalseExamples(), [-3, -4]),
        (FalseSteps(1.0), [3, 4]),
    ],
    ids=lambda one: type(one).__name__,
)
def test_vectors_by_hand(attack, expected):
    assert lie(attack) == pytest.approx(np.float32(expected), rel=1e-6)


def test_noise_and_drift_have_their_norms_and_seeds():
    noise = [lie(Noise(2.0), round=round, client=client) for round, client in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert [np.linalg.norm(one) for one in noise] == pytest.approx([10] * 4)  # twice the own norm, 5
    assert len({tuple(one) for one in noise}) == 3
    drift = [lie(Drift(2.0), round=round, client=client) for round, client in ((0, 0), (7, 1))]
    assert np.linalg.norm(drift[0]) == pytest.approx(2 * np.sqrt(18))  # the middle one of sqrt(5), sqrt(18), sqrt(29)
    assert (drift[0] == drift[1]).all()
    assert (lie(Drift(2.0), seed=1) != drift[0]).any()


@pytest.mark.parametrize("kind", ["model", "delta", "gradient"])
def test_a_loop_replaces_the_updates_of_dishonest_clients(kind):
    server = Server(np.float32([1, 1]), "SCAFFOLD", 4, lr=0.1)
    broadcast = server.broadcast(range(4))
    moved = [*OTHERS, OWN]
    sent = [vector + broadcast.x if kind == "model" else vector for vector in moved]
    updates = [Update(i, sent[i], 5, 10, control=2 * moved[i], kind=kind) for i in (3, 0, 1, 2)]
    *honest, false = Liars(IPM(2.0), [3]).updates(broadcast, updates)
    assert all(one is other for one, other in zip(honest, updates[1:], strict=True))
    assert (false.client, false.steps, false.examples, false.kind) == (3, 5, 10, kind)
    assert false.value == pytest.approx(np.float32([-6, -2]) + (broadcast.x if kind == "model" else 0))
    assert false.control == pytest.approx(np.float32([-12, -4]))
    server.round([*honest, false])
    assert updates[0].value == pytest.approx(sent[3])  # the client's own memory is unchanged


def test_reported_numbers_and_updates_that_cannot_be_changed():
    server = Server({"w": np.zeros(2, np.float32)}, "FedAvg", 2, lr=0.1)
    broadcast, update = server.broadcast([0, 1]), Update(1, OWN, 5, 10)
    (heavy,) = Liars(FalseExamples(), [1]).updates(broadcast, [update])
    (short,) = Liars(FalseSteps(), [1]).updates(broadcast, [update])
    assert (heavy.examples, heavy.steps, short.examples, short.steps) == (10**9, 5, 10, 1)
    with pytest.raises(ShapeError, match="value"):
        list(Liars(IPM(), [1]).updates(broadcast, [update._replace(value={"w": OWN})]))


def test_buffers_stay_honest():
    model = {"w": np.ones(2, np.float32), "running_var": np.ones(1, np.float32)}
    server = Server(model, "FedAvg", 2, lr=0.1)
    y = np.float32([2, 3, 4])
    (false,) = Liars(attacks.SignFlip(), [1]).updates(server.broadcast([0, 1]), [Update(1, y, 5)])
    assert false.value == pytest.approx(np.float32([0, -1, 4]))


def trial(*changes):
    """Two rounds of the digits with six clients, of which the last two attack."""
    small = ["rounds=2", "seeds=[0]", "algorithms=['FedAvg']", "local={batch=16, steps=2}"]
    small += ["partition={name='iid', clients=6}", "participation={name='Bernoulli', p=1.0}"]
    return Trial(load_preset("quickstart", [*small, *changes]), 0, 0)


def test_the_last_clients_of_a_trial_attack():
    honest, attacked = (build(trial(*more)) for more in ((), ("attack={name='Scaling', factor=100.0, clients=2}",)))
    active = honest.pattern.active(0)
    first, second = (
        {one.client: np.array(one.value) for one in parts.updates(parts.server.broadcast(active.clients), active)}
        for parts in (honest, attacked)
    )
    x = honest.server.x
    for client in range(6):
        factor = 100 if client >= 4 else 1
        np.testing.assert_allclose(second[client] - x, factor * (first[client] - x), rtol=1e-3, atol=1e-5)


def test_clients_train_on_flipped_labels():
    parts = build(trial("attack={name='LabelFlip', clients=2}"))
    dataset, held = parts.engine._train[1].numpy(), parts.engine.parts
    true = build(trial()).engine._train[1].numpy()
    for client in range(6):
        expected = 9 - true[held[client]] if client >= 4 else true[held[client]]
        assert (dataset[held[client]] == expected).all()


def test_an_attacked_trial_resumes(tmp_path):
    assert_resumes(trial("attack={name='Noise', clients=2}", "rounds=3"), tmp_path, [0])


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ("{name='ALIE', clients=6}", r"attack\.clients: must be less than the 6 clients"),
        ("{name='ALIE', zz=1.0}", r"attack\.zz.*'z'"),
        ("ALI", r"attack\.name.*ALIE"),
    ],
)
def test_wrong_attacks_are_rejected(attack, message):
    with pytest.raises(ConfigError, match=message):
        trial(f"attack={attack}")


def test_every_attack_has_an_experiment():
    for name in REGISTRY:
        assert trial(f"attack={name}").experiment.attack.make() == REGISTRY[name]()


def test_a_client_with_its_own_start_lies_from_there():
    x = np.zeros(2, np.float32)
    server = Server(x, "FedAWE", 2, lr=0.1)
    for _ in range(3):
        server.round([Update(0, server.x + 1, 1)])
    broadcast = server.broadcast([0, 1])
    assert (broadcast.start(1) == 0).all()
    [lie] = Liars(attacks.SignFlip(), [1]).updates(broadcast, [Update(1, x + 0.5, 1)])
    assert (lie.value == -0.5).all()
