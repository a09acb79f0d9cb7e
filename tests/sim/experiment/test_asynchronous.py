"""Asynchronous trials: two clients by hand, a plain loop over Server.push, resumption, and errors."""

from dataclasses import replace

import numpy as np
import pytest

from fedcore import Server
from fedcore.errors import ConfigError, RangeError
from fedcore.sim.engines import AtWork
from fedcore.sim.experiment import load_preset, trial
from fedcore.sim.experiment.schema import Trial
from fedcore.sim.experiment.trial import build, rounds
from fedcore.sim.reports.statistics import difference
from tests.sim.experiment.kit import assert_resumes, read, rounds_of, run_trial

BUFFER = "concurrency=6, policy={buffer=3, max_staleness=2"
METHODS = {
    "FedBuff": ("{name='FedAvg', weights='uniform', label='m'}", f"{BUFFER}, discount=0.5}}"),
    "FedAsync": ("{name='FedAsync', label='m'}", f"{BUFFER.replace('3', '1')}, discount=[2.0, 1.0]}}"),
    "CA2FL": ("{name='FedVARP', label='m'}", f"{BUFFER}}}"),
}


def asynchronous(name, *changes):
    method, clock = METHODS[name]
    shared = ["rounds=5", "local={batch=16, steps=2}", "participation={name='Bernoulli', p=0.3}", *changes]
    return Trial(load_preset("quickstart", [*shared, f"algorithms=[{method}]", f"clock={{{clock}}}"]), 0, 0)


def test_two_clients_of_different_speed_by_hand(tmp_path):
    """Client 0 needs 1 second and client 1 needs 3. At time 3 both arrive, and client 0 is first."""
    path = tmp_path / "durations.csv"
    path.write_text("client,seconds\n0,1\n1,3\n")
    clock = f"clock={{trace='{path}', concurrency=2, policy={{buffer=2, max_staleness=3}}}}"
    changes = ["rounds=3", "partition={name='iid', clients=2}", "participation='Always'", clock]
    run_trial(own := Trial(load_preset("quickstart", ["algorithms=['FedAvg']", *changes]), 0, 0), tmp_path)
    found = [(line.active, line.ages, line.clock, line.accepted, line.uploads) for line in rounds_of(own, tmp_path)]
    assert found == [([0, 0], [0, 0], 2, 2, 2), ([0, 1], [0, 1], 3, 2, 4), ([0, 0], [1, 0], 5, 2, 6)]


@pytest.mark.parametrize("name", METHODS)
def test_a_trial_is_a_plain_loop_over_push(name):
    own = asynchronous(name)
    parts, again = build(own), build(own)
    lines = list(rounds(parts, count=5, evaluate=own.experiment.evaluate))
    course, server, sent, arrived = again.course, again.server, {}, 0
    reports = []
    while server.round_number < 5:
        for number, active in course.start():
            sent[number] = server.broadcast(active.clients.tolist())
        if (arrival := course.next()) is not None:  # the client trains only now
            start = sent.pop(arrival.number)
            [update] = again.engine.updates(replace(start, round=arrival.number))
            reports += server.push([update._replace(round=start.round)])
            arrived += 1
    assert np.array_equal(parts.server.x, server.x)
    assert not np.array_equal(server.x, build(own).server.x)
    assert [(line.active, line.ages) for line in lines] == [(list(r.accepted), r.ages.tolist()) for r in reports]
    assert lines[-1].uploads == arrived == sum(line.accepted + line.rejected for line in lines)
    assert lines[-1].clock == course.time
    assert max(max(line.ages) for line in lines) > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_trial_has_the_clients_at_work(tmp_path, name):
    assert_resumes(asynchronous(name), tmp_path, [1, 3])


def test_fedbuff_runs_beside_fedavg_with_a_deadline(tmp_path):
    policy = "{buffer=3, max_staleness=2, discount=0.5}"
    methods = f"algorithms=['FedAvg', {{name='FedAvg', label='FedBuff', clock={{concurrency=6, policy={policy}}}}}]"
    clock = "clock={cohort=3, policy={deadline=1.5}}"
    experiment = load_preset("quickstart", ["rounds=3", "local={batch=16, steps=2}", "seeds=[0]", methods, clock])
    both = [Trial(experiment, order, 0) for order in range(2)]
    for own in both:
        run_trial(own, tmp_path)
    records = [read(tmp_path / "records" / own.file_name) for own in both]
    one, other = (record.rounds for record in records)
    assert (one[0].ages, len(other[0].ages)) == (None, 3)
    assert [type(build(own).engine) is AtWork for own in both] == [False, True]
    assert difference(records, "FedBuff", "FedAvg").apart == ()


@pytest.mark.parametrize(
    ("clock", "changes", "message"),
    [
        ("policy={buffer=3, max_staleness=2}", [], r"concurrency: missing; buffer needs"),
        ("concurrency=6", [], r"policy\.buffer: missing"),
        ("concurrency=6, policy={buffer=3}", [], r"policy\.max_staleness: missing"),
        (f"{BUFFER}, deadline=1.0}}", [], "deadline does not apply"),
        (f"cohort=3, {BUFFER}}}", [], "cohort does not apply"),
        (f"{BUFFER}}}", ["algorithms=['FedAWE']"], r"FedAWE.*start of each client"),
        (f"{BUFFER}, discount=0.5}}", ["algorithms=['FedVARP']"], "discount=0.5: .*FedVARP"),
        (f"{BUFFER}}}", ["algorithms=[{name='MimiC', placement='client'}]"], "clients keep rows"),
        (f"{BUFFER}}}", ["algorithms=['SCAFFOLD']"], "SCAFFOLD: takes no late updates"),
        (f"{BUFFER}}}", ["aggregation={name='TrimmedMean', f=2}"], "TrimmedMean.* needs at least 5 updates, got 3"),
        (f"{BUFFER}}}", ["attack='SignFlip'"], "attack"),
        (BUFFER.replace("6", "31") + "}", [], "concurrency=31"),
        (BUFFER.replace("=3", "=31") + "}", ["algorithms=['FedVARP']"], "must be at most 30"),
        (BUFFER.replace("=3", "=31") + "}", ["aggregation=open"], "must be at most 30"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(clock, changes, message):
    with pytest.raises(ConfigError, match=f"(clock|algorithms).*{message}"):
        load_preset("quickstart", [f"clock={{{clock}}}", "algorithms=['FedAvg']", *changes])


def test_a_method_needs_the_clock_of_the_experiment():
    with pytest.raises(ConfigError, match=r"algorithms.*clock: needs a table clock"):
        load_preset("quickstart", ["algorithms=[{name='FedAvg', clock={concurrency=6}}]"])


def test_a_buffer_that_never_fills_is_an_error(monkeypatch):
    monkeypatch.setattr(trial, "MOST_ARRIVALS", 2)
    parts = build(asynchronous("FedBuff"))
    monkeypatch.setattr(Server, "push", lambda self, updates: [])
    parts.server.open_buffer().reject(0, "a reason")
    with pytest.raises(RangeError, match=r"policy\.buffer=3: .* after 7 updates, of which 1 .*a reason"):
        next(rounds(parts, count=1, evaluate=asynchronous("FedBuff").experiment.evaluate))
