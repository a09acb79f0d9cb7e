"""Networked local SGD: equal to local descent on the complete graph, and slower on sparse graphs."""

import numpy as np
import pytest

from fedcore import Network
from fedcore.errors import ConfigError
from fedcore.sim.engines import Nodes
from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment.schema import Evaluate, Trial
from fedcore.sim.experiment.trial import build, rounds
from tests.sim.experiment.kit import DECAY, assert_resumes
from tests.sim.experiment.test_additions import Cosine


def trial_of(graph, *changes):
    return Trial(load_preset(f"descent/nfsgd-{graph}", ["seeds=[0]", "rounds=8", "evaluate.every=8", *changes]), 0, 0)


def run_rounds(trial):
    parts = build(trial)
    return parts, list(rounds(parts, count=8, evaluate=Evaluate(every=8)))


def test_complete_graph_is_local_descent_with_all_clients():
    parts, lines = run_rounds(trial_of("complete"))
    changes = [
        "data={name='synthetic', alpha=1.0, beta=1.0, smallest=200, largest=200}",
        *("local.batch=20", "rate.lr=0.05", "participation={name='Always'}", "algorithms=['LocalDescent']"),
    ]
    with_server, expected = run_rounds(Trial(load_preset("descent/lfsgd-lfgd", changes), 0, 0))
    assert isinstance(parts.server, Nodes)
    np.testing.assert_allclose(parts.server.x, with_server.server.x, rtol=1e-4, atol=1e-6)
    assert [line.steps for line in lines] == [16 * 5] * 8 == [line.steps for line in expected]
    n = parts.server.layout.n
    assert {line.bytes_down for line in lines} == {4 * n * 16 * 15}  # a model from each neighbour
    assert lines[-1].accuracy == pytest.approx(expected[-1].accuracy, abs=1e-3)
    ring, lines = run_rounds(trial_of("ring"))
    spread = [np.std(one.server.models, axis=0).mean() for one in (ring, parts)]
    assert spread[0] > 100 * spread[1]
    assert {line.bytes_down for line in lines} == {4 * n * 16 * 2}
    assert ring.evaluate(7, ring.server.x).loss > parts.evaluate(7, parts.server.x).loss


def test_inactive_nodes_keep_their_models():
    parts, lines = run_rounds(trial_of("torus", "participation={name='Uniform', k=3}"))
    assert [line.accepted for line in lines] == [3] * 8
    before = [model.copy() for model in parts.server.models]
    (line,) = list(rounds(parts, count=9, evaluate=Evaluate(every=9)))
    pairs = zip(before, parts.server.models, strict=True)
    assert [node for node, (old, new) in enumerate(pairs) if (old != new).any()] == line.active


def test_weights_by_examples():
    sizes = "data={name='synthetic', alpha=1.0, beta=1.0, smallest=50, largest=400}"
    assert len(set(build(trial_of("ring", sizes, "network.weights='examples'")).server.q)) > 3
    assert len(set(build(trial_of("ring", sizes)).server.q)) == 1


def test_interrupted_trial_resumes_from_the_network(tmp_path):
    def check(path):
        (folder,) = (path.parent.parent / "checkpoints").glob("*")
        assert Network.load(folder, lr=Cosine()).round_number == 4

    assert_resumes(trial_of("ring", f"rate.lr={DECAY}"), tmp_path, [4], before_resume=check)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("algorithms=['FedAvg']", "must be LocalDescent"),
        ("network.graph='cube'", "Input should be 'complete'"),
        ("network.probability=0.5", "probability"),
        ("network={graph='torus', rows=5}", "rows"),
        ("network={graph='erdos-renyi', probability=0.01}", "connected"),
        ("rate.server_lr=0.1", "rate.server_lr needs a server"),
        ("objective={departures='include'}", "objective needs a server"),
        ("evaluate.keep=1", "keep: does not work with a network"),
    ],
)
def test_settings_that_do_not_fit_a_network_are_rejected(change, message):
    with pytest.raises(ConfigError, match=message):
        load_preset("descent/nfsgd-ring", [change])
