"""A saved and loaded network continues with the same bits."""

import numpy as np
import pytest
from torch import nn

import fedcore
from fedcore import ClientStore, Limits, Network, Server, Update, errors
from fedcore.algorithms.rates import InverseStep, Staircase
from fedcore.sim.network.topology import Topology
from tests.sim.network.kit import LeastSquares

PROBLEM, NODES = LeastSquares(6, 5), 6
Q = [0.1, 0.2, 0.3, 0.4, 0.5, 0.7]  # scaled to the sum 1 once, and then once more, they differ in bits


def make_network(lr=0.1, **options):
    start = np.random.default_rng(1).normal(size=(NODES, 5)).astype(np.float32)
    return Network(list(start), Topology.named("ring", NODES), lr=lr, q=Q, **options)


def run_rounds(network, rounds):
    for t in range(network.round_number, network.round_number + rounds):
        present = [j for j in range(NODES) if (j + t) % 4]
        network.round(PROBLEM.updates(network.models, 2, network.lr, present))


@pytest.mark.parametrize("lr", [0.1, Staircase(0.2, restarts=[3]), InverseStep(1.0, 9.0, 2)], ids=str)
def test_a_loaded_network_continues_with_the_same_bits(tmp_path, lr):
    whole, stopped = make_network(lr), make_network(lr)
    run_rounds(whole, 9)
    run_rounds(stopped, 2)
    stopped.save(tmp_path / "network")
    run_rounds(stopped, 2)
    stopped.save(tmp_path / "network")  # in place of the older copy
    loaded = Network.load(tmp_path / "network")
    assert (loaded.round_number, loaded.lr, loaded.zeta) == (4, stopped.lr, stopped.zeta)
    assert loaded.q.tobytes() == stopped.q.tobytes() != (stopped.q / stopped.q.sum()).tobytes()
    run_rounds(loaded, 5)
    np.testing.assert_array_equal(loaded.models, whole.models)
    np.testing.assert_array_equal(loaded.output(), whole.output())
    assert Network.load(tmp_path / "network").round_number == 4  # the folder is unchanged


def test_counters_names_and_limits_are_kept(tmp_path):
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module[1].num_batches_tracked += 5
    network = Network([module] * 2, [[0.75, 0.25], [0.25, 0.75]], lr=0.1, limits=Limits(max_steps=7))
    network.round([Update(0, module.state_dict(), steps=1), Update(1, module.state_dict(), steps=1)])
    network.save(tmp_path / "network")
    loaded = Network.load(tmp_path / "network")
    saved, read = network.tensors(1), loaded.tensors(1)
    assert saved["1.num_batches_tracked"] == 5
    assert {name: array.dtype for name, array in read.items()} == {name: array.dtype for name, array in saved.items()}
    for name in saved:
        np.testing.assert_array_equal(read[name], saved[name])
    report = loaded.round([Update(0, module.state_dict(), steps=8)])
    assert report.rejected[0][0] == 0
    assert "steps" in report.rejected[0][1]


def test_a_user_s_rate_must_be_given_again(tmp_path):
    def lr(round):
        return 0.1 / (round + 1)

    make_network(lr).save(tmp_path / "network")
    with pytest.raises(errors.CheckpointError, match=r"^lr\b"):
        Network.load(tmp_path / "network")
    assert Network.load(tmp_path / "network", lr=lr).lr == 0.1
    make_network(0.1).save(tmp_path / "other")
    with pytest.raises(errors.CheckpointError, match=r"^lr\b"):
        Network.load(tmp_path / "other", lr=0.2)


def test_a_folder_without_a_network_is_rejected(tmp_path):
    Server(np.zeros(2, np.float32), "MIFA", clients=2, lr=0.1).save(tmp_path / "server")
    ClientStore(2, 2).save(tmp_path / "store")
    for folder in ("server", "store"):
        with pytest.raises(errors.CheckpointError, match="folder of a network"):
            Network.load(tmp_path / folder)
    make_network().save(tmp_path / "network")
    with pytest.raises(errors.CheckpointError, match="without a Server"):
        Server.load(tmp_path / "network")
    with pytest.raises(errors.StoreError):
        Network.load(tmp_path / "nothing")


def forged(folder, place, vectors=(), state=(), models=NODES):
    """A copy of a network's folder, sealed like it, in which some things are not what a network has."""
    with ClientStore.open(folder, readonly=True) as saved:
        kept = {name: np.array(saved.vector(name)) for name in saved.vector_names()} | dict(vectors)
        kept, result = {k: v for k, v in kept.items() if v is not None}, saved.state | dict(state)
        rows = ClientStore(models, saved.n)
        for node in range(min(models, NODES)):
            rows.stage(node)[:] = saved.read(node)
    rows.commit(round=0)
    rows.save(place, vectors=kept, state={key: value for key, value in result.items() if value is not None})


VECTORS = {"W": [None, np.ones(7)], "q": [np.arange(1.0, 7.0), None], "counter/foreign": [np.zeros(1, np.int64)]}
RATES = [None, {"name": "Foo", "options": {}}, {"name": "Constant", "options": {"rate": 1}}]
STATE = {"lr": RATES, "limits": [{"most": 1}], "round_number": [-5, "x"]}
STATE["layout"] = [fedcore.Layout.of(np.zeros(7, np.float32)).to_state()]
WRONG = [dict(vectors={name: value}) for name, values in VECTORS.items() for value in values]
WRONG += [dict(state={name: value}) for name, values in STATE.items() for value in values]


@pytest.mark.parametrize("wrong", [*WRONG, dict(models=3)], ids=str)
def test_a_forged_folder_is_rejected(tmp_path, wrong):
    make_network().save(tmp_path / "network")
    forged(tmp_path / "network", tmp_path / "same")
    Network.load(tmp_path / "same")
    forged(tmp_path / "network", tmp_path / "forged", **wrong)
    with pytest.raises(errors.CheckpointError):
        Network.load(tmp_path / "forged")


def test_rates_of_steps():
    network = make_network(InverseStep(mu=2.0, alpha=3.0, E=2))
    run_rounds(network, 3)
    assert [network.lr_of_step(k) for k in (0, 1)] == [4 / (2 * (6 + 10)), 4 / (2 * (7 + 10))]
    assert network.lr == network.lr_of_step(0)
    assert make_network().lr_of_step is None
