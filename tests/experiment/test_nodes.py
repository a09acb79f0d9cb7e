"""Networked local SGD as an experiment: it is local descent where all are neighbours, and slower the larger zeta."""

import numpy as np
import pytest

from fedcore import Network
from fedcore.errors import ConfigError
from fedcore.experiment import load_preset
from fedcore.experiment.results import read
from fedcore.experiment.schema import Trial
from fedcore.experiment.trial import build, rounds, run_trial
from fedcore.simulation.engines import Nodes


def trial_of(graph, *changes):
    return Trial(load_preset(f"descent/nfsgd-{graph}", ["seeds=[0]", "rounds=8", "evaluate.every=8", *changes]), 0, 0)


def course(trial):
    parts = build(trial)
    return parts, list(rounds(parts, count=8, evaluate_every=8))


def test_the_complete_graph_is_local_descent_with_everybody():
    parts, lines = course(trial_of("complete"))
    changes = [
        "data={name='synthetic', alpha=1.0, beta=1.0, smallest=200, largest=200}",
        "local.batch=20",
        "rate.lr=0.05",
        "participation={name='Always'}",
        "algorithms=['LocalDescent']",
    ]
    with_server, theirs = course(Trial(load_preset("descent/lfsgd-lfgd", changes), 0, 0))
    assert isinstance(parts.server, Nodes)
    np.testing.assert_allclose(parts.server.x, with_server.server.x, rtol=1e-4, atol=1e-6)
    assert [line.steps for line in lines] == [16 * 5] * 8 == [line.steps for line in theirs]
    n = parts.server.network.layout.n
    assert {line.bytes_down for line in lines} == {4 * n * 16 * 15}  # a model from each neighbour
    assert lines[-1].accuracy == pytest.approx(theirs[-1].accuracy, abs=1e-3)


def test_a_ring_is_behind_and_its_nodes_apart():
    complete, _ = course(trial_of("complete"))
    ring, lines = course(trial_of("ring"))
    apart = [np.std(parts.server.network.models, axis=0).mean() for parts in (ring, complete)]
    assert apart[0] > 100 * apart[1]
    assert {line.bytes_down for line in lines} == {4 * ring.server.network.layout.n * 16 * 2}
    evaluated = [parts.evaluate(7, parts.server.x).loss for parts in (ring, complete)]
    assert evaluated[0] > evaluated[1]


def test_nodes_that_are_away_keep_their_models():
    parts, lines = course(trial_of("torus", "participation={name='Uniform', k=3}"))
    assert [line.heard for line in lines] == [3] * 8
    before = [model.copy() for model in parts.server.network.models]
    (line,) = list(rounds(parts, count=9, evaluate_every=9))
    changed = [
        j for j, (old, new) in enumerate(zip(before, parts.server.network.models, strict=True)) if (old != new).any()
    ]
    assert changed == line.active


def test_weights_by_examples_are_the_networks():
    sizes = "data={name='synthetic', alpha=1.0, beta=1.0, smallest=50, largest=400}"
    parts = build(trial_of("ring", sizes, "network.weights='examples'"))
    assert len(set(parts.server.network.q)) > 3
    assert len(set(build(trial_of("ring", sizes)).server.network.q)) == 1


def test_a_stopped_trial_goes_on_bit_for_bit(tmp_path):
    trial = trial_of("ring")
    run_trial(trial, tmp_path / "straight")

    def stop(line):
        if line.round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(trial, tmp_path / "stopped", stop, checkpoint_seconds=0)
    (folder,) = (tmp_path / "stopped" / "checkpoints").glob("*")
    assert Network.load(folder).round_number == 4
    run_trial(trial, tmp_path / "stopped")
    one, two = (read(tmp_path / name / "records" / trial.file_name) for name in ("straight", "stopped"))
    assert [(line.norm, line.loss) for line in one.rounds] == [(line.norm, line.loss) for line in two.rounds]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("algorithms=['FedAvg']", "must be LocalDescent"),
        ("network.graph='cube'", "Input should be 'complete'"),
        ("network.probability=0.5", "probability"),
        ("network={graph='torus', rows=5}", "rows"),
        ("network={graph='erdos-renyi', probability=0.01}", "connected"),
        ("rate.server_lr=0.1", "leave out rate.server_lr, which is a server's"),
        ("objective={departures='include'}", "leave out objective"),
    ],
)
def test_what_a_network_cannot_be_is_refused_when_it_is_read(change, message):
    with pytest.raises(ConfigError, match=message):
        load_preset("descent/nfsgd-ring", [change])
