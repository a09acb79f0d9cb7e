"""Workers are killed at random moments, and machines join and are lost: the bits stay the same."""

import os
import re
import signal
import threading
from contextlib import suppress

import numpy as np
import pytest

from tests.sim.engines.ray.problems import METHODS, Problem, program, results


class Storm:
    """Kills workers at random updates, after random delays.

    Args:
        engine: on Ray.
        seed: that of the draws.
        chance: the probability of a kill at each update.
        most: the most kills.
        all_workers: whether a kill takes all workers.
    """

    def __init__(self, engine, seed, chance, most, all_workers=False):
        self._engine, self._random = engine, np.random.default_rng(seed)
        self._chance, self._most, self._all, self.timers = chance, most, all_workers, []

    def __call__(self, *_):
        moment, delay, number = self._random.random(), self._random.uniform(0, 0.05), self._random.integers(2**31)
        ready = [worker.process for worker in self._engine._pool._ready]
        if moment < self._chance and len(self.timers) < self._most and ready:
            victims = ready if self._all else [ready[number % len(ready)]]
            self.timers.append(threading.Timer(delay, _kill, [victims]))
            self.timers[-1].start()


def _kill(processes):
    for process in processes:
        with suppress(ProcessLookupError):  # It was killed before.
            os.kill(process, signal.SIGKILL)


def has_same_bits(problem, method, storm, rounds):
    """Whether a run with kills has the bits of a run in this process."""
    digest = problem.run(problem.there, method, rounds, seen=storm)
    for timer in storm.timers:
        timer.join()
    return digest == problem.run(problem.here, method, rounds)


@pytest.mark.parametrize(("problem", "all_workers"), [("together", False), ("one_by_one", True)])
def test_one_or_all_workers_are_killed(problem, all_workers, request):
    problem = request.getfixturevalue(problem)
    workers, lost = len(problem.there.processes()), problem.there.stats.lost
    storm = Storm(problem.there, seed=17, chance=0.5, most=1, all_workers=all_workers)
    assert has_same_bits(problem, "MimiC", storm, rounds=6)
    assert problem.there.stats.lost == lost + (workers if all_workers else 1)


@pytest.mark.endurance
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_workers_are_killed_for_every_method(model, workers, ray_session):
    """This takes half an hour."""
    seed = [workers, len(model)]
    with Problem(model, clients=12, examples=20, workers=workers, cpus=0.5) as problem:
        for number, method in enumerate(METHODS):
            problem.there.processes()
            lost = problem.there.stats.lost
            storm = Storm(problem.there, [*seed, number], chance=0.1, most=1 + workers)
            assert has_same_bits(problem, method, storm, rounds=12), (method, seed, number)
            assert problem.there.stats.lost > lost


@pytest.mark.endurance
@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_machines_join_and_are_lost_for_every_method(model):
    """In each run a machine joins, and the older one is lost."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    output, _ = program("machines.py", model, *METHODS).communicate(timeout=3600)
    lines = results(output)
    assert [line.partition(":")[0] for line in lines] == METHODS
    for line in lines:  # On a busy machine Ray may miss heartbeats, and count a second machine as lost.
        assert re.fullmatch(r"\w+: the same bits, [2-9] machines, [1-9] worker lost", line), line
