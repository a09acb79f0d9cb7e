"""Workers that are killed at random moments, and machines that come and go: whatever is lost, the bits are the same."""

import os
import re
import signal
import threading
from contextlib import suppress

import numpy as np
import pytest

from fedcore import algorithms
from tests.simulation.engines.ray.problems import Problem, program, results

METHODS = sorted(algorithms.REGISTRY.own)


class Storm:
    """Kills workers as updates come, at moments that a seed draws: at which update, how long after it, and whom.

    Args:
        engine: on Ray.
        seed: of the draws.
        chance: of a kill, at each update.
        most: kills.
        everybody: whether all workers are killed at once.
    """

    def __init__(self, engine, seed, chance, most, everybody=False):
        self._engine, self._random = engine, np.random.default_rng(seed)
        self._chance, self._most, self._everybody, self.timers = chance, most, everybody, []

    def __call__(self, *_):
        moment, after, whom = self._random.random(), self._random.uniform(0, 0.05), self._random.integers(2**31)
        there = [worker.process for worker in self._engine._pool._ready]  # and none that is waited for
        if moment < self._chance and len(self.timers) < self._most and there:
            victims = there if self._everybody else [there[whom % len(there)]]
            self.timers.append(threading.Timer(after, _kill, [victims]))
            self.timers[-1].start()

    def over(self):
        for timer in self.timers:
            timer.join()


def _kill(processes):
    for process in processes:
        with suppress(ProcessLookupError):  # killed before
            os.kill(process, signal.SIGKILL)


def same_in_a_storm(problem, engine, method, storm, rounds):
    """Tell whether a run that a storm goes over has the bits of one in this process."""
    got = problem.run(engine, method, rounds, seen=storm)
    storm.over()
    return got == problem.run(problem.here, method, rounds)


@pytest.mark.parametrize(("problem", "everybody"), [("together", False), ("one_by_one", True)])
def test_workers_are_killed(problem, everybody, request):
    """One, or all at once; the long form kills more of them, for every method."""
    problem = request.getfixturevalue(problem)
    there, lost = len(problem.there.processes()), problem.there.stats.lost
    storm = Storm(problem.there, seed=17, chance=0.5, most=1, everybody=everybody)
    assert same_in_a_storm(problem, problem.there, "MimiC", storm, rounds=12)
    assert problem.there.stats.lost == lost + (there if everybody else 1)


@pytest.mark.endurance
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_every_method_in_a_storm(model, workers, ray_session):
    """Half of an hour in all."""
    seed = [workers, len(model)]
    with Problem(model, clients=12, examples=20, workers=workers, cpus=0.5) as problem:
        for number, method in enumerate(METHODS):
            problem.there.processes()
            lost = problem.there.stats.lost
            storm = Storm(problem.there, [*seed, number], chance=0.1, most=1 + workers)
            assert same_in_a_storm(problem, problem.there, method, storm, rounds=12), (method, seed, number)
            assert problem.there.stats.lost > lost


@pytest.mark.endurance
@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_every_method_while_machines_come_and_go(model):
    """In each run a machine comes, and the one that was there before is gone."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    told, _ = program("machines.py", model, *METHODS).communicate(timeout=3600)
    found = results(told)
    assert [line.partition(":")[0] for line in found] == METHODS
    for line in found:  # where this machine is busy Ray may miss another one's heartbeats, and count it as lost
        assert re.fullmatch(r"\w+: the same bits, [2-9] machines, [1-9] worker lost", line), line
