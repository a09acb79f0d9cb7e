"""Clients that keep rows in an experiment: the same models as with rows at the server, also after a resume."""

import json
from itertools import pairwise

import numpy as np
import pytest

from fedcore.errors import ConfigError
from fedcore.sim.engines import KeepingClients
from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment.schema import Evaluate, Trial
from fedcore.sim.experiment.trial import build, rounds
from tests.sim.experiment.kit import assert_resumes

METHODS = {
    "FedAvgM": {"beta": 0.5},
    "FedAvgM, reparameterised": {"name": "FedAvgM", "beta": 0.5, "reparameterised": True},
    "MimiC": {},
    "MimiC in update units": {"name": "MimiC", "units": "update"},
    "SCAFFOLD": {"control": "sent"},
    "SCAFFOLDM": {"control": "sent", "beta": 0.5},
    "SCAFFOLDMVR": {"beta": 0.5},
}


def written(method, **more):
    options = {"name": method} | METHODS[method] | more
    if more.get("placement") == "client":
        options.pop("control", None)
    return "{" + ", ".join(f"{key}={json.dumps(value)}" for key, value in options.items()) + "}"


def trial_of(method, *changes, **more):
    changes = ["rounds=12", "seeds=[0]", "rate.lr={name='Exponential', initial=0.05, decay=0.95}", *changes]
    return Trial(load_preset("quickstart", [f"algorithms=[{written(method, **more)}]", *changes]), 0, 0)


def run(trial):
    parts = build(trial)
    lines = list(rounds(parts, count=12, evaluate=Evaluate(every=12)))
    return np.array(parts.server.x), lines, parts


@pytest.mark.parametrize("method", METHODS)
def test_rows_at_the_clients_give_the_same_model(method):
    at_server, theirs, _ = run(trial_of(method))
    at_clients, ours, parts = run(trial_of(method, placement="client"))
    assert isinstance(parts.engine, KeepingClients)
    assert not parts.server.algorithm.keeps_rows
    start = parts.engine.inner.initial
    assert np.linalg.norm(at_clients - at_server) < 1e-4 * np.linalg.norm(at_server - start)
    assert [line.uploadings for line in ours] == [line.uploadings for line in theirs]
    if "FedAvgM" not in method:
        assert parts.engine.rows.keys() == {client for line in ours for client in line.active}


def test_a_rejected_client_keeps_its_row():
    parts = build(trial_of("MimiC", placement="client"))
    list(rounds(parts, count=1, evaluate=Evaluate(every=12)))
    engine, server = parts.engine, parts.server
    before = {client: row.copy() for client, row in engine.rows.items()}
    broadcast = server.broadcast([0, 1])
    with server.open_round() as opened:
        for update in engine.updates(broadcast):
            if update.client == 1:
                update.value[0] = np.nan
            opened.add_batch([update])
    assert [client for client, _ in opened.report.rejected] == [1]
    engine.after(server, opened.report)
    assert (engine.rows[1] == before[1]).all()
    assert (engine.rows[0] != before[0]).any()
    np.testing.assert_allclose(sum(engine.rows[0] - before[0]), sum(server.v - before[0]), rtol=1)


def test_momentum_with_float_buffers_outlasts_a_round_without_clients():
    """Clients with BatchNorm recover the same g as the server sends."""
    changes = ["model='tests.sim.engines.test_inprocess:Stateful'", "participation.p=0.03", "local={batch=99, steps=2}"]
    (theirs, lines, _), (ours, *_) = (run(trial_of("FedAvgM", *changes, placement=one)) for one in ("server", "client"))
    assert 0 in [len(line.active) for line in lines[1:-1]]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["MimiC", "SCAFFOLD", "FedAvgM"])
def test_a_resumed_trial_has_its_clients_rows(tmp_path, method):
    trial = trial_of(method, placement="client")
    files = []
    resumed = assert_resumes(
        trial, tmp_path, [6], before_resume=lambda path: files.extend(path.parent.parent.glob("checkpoints/*.npz"))
    )
    assert (len(files), len(resumed)) == (1, 12)
    assert not list((tmp_path / "interrupted" / "checkpoints").glob("*"))


def test_a_warm_start_sets_the_clients_rows():
    method = "SCAFFOLDMVR"
    start = build(trial_of(method, "algorithms=[{name='SCAFFOLDMVR', placement='client', warm_start=true}]"))
    kept = build(trial_of(method, "algorithms=[{name='SCAFFOLDMVR', warm_start=true}]"))
    assert len(start.engine.rows) == 30
    for client in (0, 29):
        assert (start.engine.rows[client] == kept.server.store.read(client)).all()


def test_a_warm_start_takes_b_minibatches():
    """B minibatches of a client; with an epoch of minibatches it is the full gradient."""
    rows = {}
    for B in ("true", "1", "40"):
        trial = trial_of("SCAFFOLD", f"algorithms=[{{name='SCAFFOLD', warm_start={B}}}]", "local.batch=1000")
        rows[B] = build(trial).server.store.read(3)
        label = trial.method.label
        assert label == ("SCAFFOLD (warm start)" if B == "true" else f"SCAFFOLD (warm start, B={B})")
    np.testing.assert_allclose(rows["40"], rows["1"], atol=1e-6)  # A minibatch of 1,000 has all its examples.
    small = [build(trial_of("SCAFFOLD", f"algorithms=[{{name='SCAFFOLD', warm_start={B}}}]")) for B in (1, 200)]
    one, many = (np.linalg.norm(parts.server.store.read(3) - rows["40"]) for parts in small)
    assert many < 0.3 * one
    with pytest.raises(ConfigError, match="warm_start"):
        trial_of("SCAFFOLD", "algorithms=[{name='SCAFFOLD', warm_start=0}]")


@pytest.mark.parametrize(("pattern", "part"), [("{name='Always'}", 0.5), ("{name='Uniform', k=3}", None)])
def test_clients_of_the_last_round_are_sent_only_the_model(pattern, part):
    """Sec. 3.1 of Cheng et al.: g follows from two models. Other clients are sent both, as many bytes as g."""
    change = f"participation={pattern}"
    _, theirs, _ = run(trial_of("FedAvgM", change))
    _, ours, parts = run(trial_of("FedAvgM", change, placement="client"))
    one = 4 * parts.server.layout.n_parameters
    active = [set(line.active) for line in ours]
    late = [0, *(len(now - before) for before, now in pairwise(active))]
    assert [line.bytes_down for line in ours] == [one * (len(a) + more) for a, more in zip(active, late, strict=True)]
    assert [line.bytes_down for line in theirs] == [2 * one * len(a) for a in active]
    if part:
        assert sum(line.bytes_down for line in ours) == part * sum(line.bytes_down for line in theirs)
    else:
        assert 0 < sum(late) < 3 * len(late)
