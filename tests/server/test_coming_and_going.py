"""Clients that come, go and come back, in 100 rounds of arbitrary cohorts and incomplete work.

A forgotten client's row leaves the sum, N is the number of registered clients, and one that comes back has a row of
zero. The objective of flexible participation changes with an arrival or an exclusion, and stays with an inclusion.
"""

import numpy as np
import pytest

from fedcore import Server, algorithms
from fedcore.algorithms.rates import Exponential, Staircase
from tests.server.papers import (
    ROUNDS,
    Clients,
    Course,
    K,
    N,
    flexible,
    follow,
    mifa,
    mimic,
    momentum,
    start_of,
)

BETA = 0.3
LR = Exponential(0.1, 0.98)


def comings_and_goings(seed):
    """Eight are there from the start; somebody comes or goes before every fifth round, and who went may come back."""
    rng = np.random.default_rng([seed, 2])
    start = frozenset(range(8))
    here, changes, active = set(start), {}, []
    for t in range(ROUNDS):
        if t % 5 == 4:
            away = sorted(set(range(N)) - here)
            comes = len(here) < 5 or (away and rng.random() < 0.5)
            who = int(rng.choice(away if comes else sorted(here)))
            changes[t] = [("arrive" if comes else str(rng.choice(["exclude", "include"])), who)]
            here ^= {who}
        if t == 41:  # forgotten, and back at once
            changes[t] = [("exclude", min(here)), ("arrive", min(here))]
        if t in (62, 63):  # two at once
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


def what_happens(course):
    return [what for t in sorted(course.changes) for what, _ in course.changes[t]]


@pytest.mark.parametrize("seed", range(2))
def test_the_course_has_everything_in_it(seed):
    course = comings_and_goings(seed)
    happened = what_happens(course)
    assert all(happened.count(what) >= 4 for what in ("arrive", "exclude", "include"))
    came = [i for changes in course.changes.values() for what, i in changes if what == "arrive"]
    assert set(came) & course.start  # back again
    assert set(came) - course.start  # new
    assert len(came) > len(set(came))


METHODS = {
    "MIFA": (algorithms.MIFA(), mifa, dict(wait=True)),
    "MIFA at once": (algorithms.MIFA(wait=False), mifa, dict(wait=False)),
    "MimiC": (algorithms.MimiC(), mimic, {}),
    "MimiC, update units": (algorithms.MimiC(units="update"), mimic, dict(update_units=True)),
    "MimiC, short history": (algorithms.MimiC(history=2), mimic, {}),
    "SCAFFOLD": (algorithms.SCAFFOLD(), momentum, dict(beta=1, controls=True)),
    "SCAFFOLD, two vectors": (algorithms.SCAFFOLD(control="sent"), momentum, dict(beta=1, controls=True)),
    "SCAFFOLDM": (algorithms.SCAFFOLDM(BETA), momentum, dict(beta=BETA, controls=True)),
    "SCAFFOLDMVR": (algorithms.SCAFFOLDMVR(BETA), momentum, dict(beta=BETA, controls=True, vr=True)),
}


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_those_who_go_leave_the_sum(method):
    algorithm, paper, options = METHODS[method]
    seed = 1 if "," in method else 0
    clients, course, x0 = Clients(seed), comings_and_goings(seed), start_of(seed)
    server = Server(x0, algorithm, sorted(course.start), lr=LR)
    assert follow(server, clients, course, paper(clients, x0.astype(np.float64), LR, course, **options)) < 2e-6
    here = set(server.clients)
    assert 4 <= len(here) < N


def test_mifa_steps_in_an_empty_round_once_the_only_one_unheard_has_gone():
    """What it steps along is remembered from rounds in which x stayed, and so is the last gamma."""
    clients, x0 = Clients(0), start_of(0)
    course = Course([[0, 1], [], [], [1]], [[K] * N] * 4, frozenset({0, 1, 2}), {1: [("exclude", 2)]})
    server = Server(x0, algorithms.MIFA(), 3, lr=LR)
    assert follow(server, clients, course, mifa(clients, x0.astype(np.float64), LR, course, wait=True)) < 2e-6


@pytest.mark.parametrize("reboot", ["fast", "vanilla"])
@pytest.mark.parametrize("scheme", "ABC")
def test_shares_boosts_and_restarts(scheme, reboot):
    seed = int(reboot == "vanilla")
    clients, course, x0 = Clients(seed), comings_and_goings(seed), start_of(seed)
    lr, objective = Staircase(0.2), set(course.start)
    for t, changes in course.changes.items():
        for what, i in changes:
            if what == "exclude" or (what == "arrive" and i not in objective):
                lr = lr.restarted(t)
            (objective.discard if what == "exclude" else objective.add)(i)
    server = Server(
        x0, algorithms.FlexibleFedAvg(scheme, K, reboot), {i: clients.examples[i] for i in course.start}, lr=lr
    )
    paper = flexible(clients, x0.astype(np.float64), 0.2, course, scheme, fast=reboot == "fast")
    assert follow(server, clients, course, paper) < 2e-6
