"""Comparison of fedcore with rivals and the floor, in turns within one run."""

from contextlib import ExitStack
from functools import partial

import numpy as np

import fedcore
from bench.alone import Rival
from bench.line import ALONE, OURS, Line
from bench.machine import OtherPrograms, huge_page_share
from bench.probe import Floor
from bench.turns import WALL, pause, seconds, turn, warm_up


def compare(
    benchmark, title, ours, rivals, *, bytes, targets=None, calls=1, rounds=11, agree=None, alone=True, clock=WALL
):
    """Time ``ours`` against rivals that do the same work, and return the ``Line``.

    In every round each function has one turn, ``ours`` last, so that the machine's speed drifts equally for all. A turn
    has four steps:

    1. Pause until the threads of the previous turn sleep.
    2. Run the operation once, which gives the time "after a pause".
    3. Repeat the operation until the processor is warm.
    4. Run the operation once more, which gives the time that counts.

    A ratio is the median over rounds of (rival's time / our time) within a round. The first round does not count.

    Args:
        benchmark: pytest-benchmark's fixture, which stores our times.
        ours: the fedcore function.
        rivals: by name, a function; a ``Rival``, which is also timed in a separate process as "NAME, alone"; or a
            ``Floor``, which times itself.
        bytes: the bytes that the work must move, for GB/s; None if bandwidth does not matter.
        targets: by name, the ratio to reach, also for the rival alone.
        calls: the number of calls per turn; more than 1 for a very short function.
        agree: the relative tolerance of the rivals' results from ours, in the second call, since an operation may have
            a state. Default: results are not compared.
        alone: whether to start processes for rivals that can be timed alone.
        clock: the function that times an operation. With ``time.process_time`` other programs do not disturb a line.
    """
    others = OtherPrograms()
    expected = None if agree is None else (ours(), ours())[1]
    with ExitStack() as processes:
        turns = {}
        for name, rival in rivals.items():
            if isinstance(rival, Floor):
                rival.choose(clock)
                turns[name] = rival.turn
                continue
            run = rival.here() if isinstance(rival, Rival) else rival
            if agree is not None:
                _require_agreement(expected, name, (run(), run())[1], agree)
            turns[name] = partial(turn, run, calls, clock)
            if alone and isinstance(rival, Rival):
                turns[name + ALONE] = processes.enter_context(rival.alone(fedcore.threads(), calls)).turn
        took = {name: [] for name in turns}
        first, mine = [], []

        def before_ours():
            for name, take in turns.items():
                took[name].append(take())
            pause()
            first.append(seconds(ours, calls, clock))
            warm_up(ours)

        def run_ours():
            mine.append(seconds(ours, calls, clock))

        before_ours()
        run_ours()
        for times in (*took.values(), first, mine):
            times.clear()
        benchmark.pedantic(run_ours, setup=before_ours, rounds=rounds, iterations=1)
        line = _line(title, took, np.array(mine), np.array(first))
        line.huge_pages = huge_page_share()
    if clock is WALL:
        line.others = others.share()
    line.bytes, line.targets = bytes, targets or {}
    return line


def _line(title, took, mine, first):
    line = Line(title, {}, seconds={OURS: float(np.median(mine))})
    for name, times in took.items():
        is_turn = isinstance(times[0], tuple)
        ways = np.array(times)
        warm = ways[:, 0 if is_turn else np.argmin(np.median(ways, axis=0))]
        low, middle, high = np.quantile(warm / mine, [0.25, 0.5, 0.75]).tolist()
        line.seconds[name], line.ratios[name], line.quartiles[name] = float(np.median(warm)), middle, [low, high]
        if is_turn:
            line.after_pause[name] = float(np.median(ways[:, 1] / first))
    return line


def _require_agreement(ours, name, theirs, rtol):
    for mine, their in zip(_arrays(ours), _arrays(theirs), strict=True):
        np.testing.assert_allclose(mine, np.asarray(their), rtol=rtol, err_msg=f"{name} does something else")


def _arrays(result):
    return result if isinstance(result, list) else [result]
