"""fedcore against its rivals and the floor, in turn within one run."""

from contextlib import ExitStack
from functools import partial

import numpy as np

import fedcore
from bench.alone import Rival
from bench.line import ALONE, OURS, Line
from bench.machine import OtherPrograms, huge_page_share
from bench.probe import Floor
from bench.turns import pause, seconds, turn, warm_up


def compare(benchmark, title, ours, rivals, *, bytes, targets=None, calls=1, rounds=11, agree=None, alone=True):
    """Time ``ours`` against others that do the same work.

    Every round gives each of them one turn, ours last, so that all meet the same drift of the machine's speed. A turn
    is a pause, until the threads of the turn before sleep, then the operation once, which is reported as "after a
    pause", then as often as warms the processor up, and then once more, which counts. A ratio is the median over
    rounds of (the other's time / our time) within a round. One round before the first is thrown away.

    Args:
        benchmark: pytest-benchmark's fixture, which keeps our times.
        ours: the function that fedcore is judged by.
        rivals: name -> function; or name -> ``Rival``, which is also timed in a process of its own, under the name
            with ", alone" behind it; or name -> ``Floor``, which times itself.
        bytes: what the work must move, for GB/s; None where that is not the point.
        targets: name -> the ratio that is due; it also holds for the rival alone.
        calls: how many calls of each function a turn makes, where one is very short.
        agree: the relative tolerance within which what the rivals return must be what ours returns.
        alone: whether to start processes for rivals that can be timed alone.

    Returns:
        The ``Line``.
    """
    others = OtherPrograms()
    with ExitStack() as processes:
        turns = {}
        for name, rival in rivals.items():
            if isinstance(rival, Floor):
                rival.choose()
                turns[name] = rival.turn
                continue
            run = rival.here() if isinstance(rival, Rival) else rival
            if agree is not None:
                _require_agreement(ours(), name, run(), agree)
            turns[name] = partial(turn, run, calls)
            if alone and isinstance(rival, Rival):
                turns[name + ALONE] = processes.enter_context(rival.alone(fedcore.threads(), calls)).turn
        took = {name: [] for name in turns}
        first, mine = [], []

        def before_ours():
            for name, take in turns.items():
                took[name].append(take())
            pause()
            first.append(seconds(ours, calls))
            warm_up(ours)

        def run_ours():
            mine.append(seconds(ours, calls))

        before_ours()
        run_ours()
        for times in (*took.values(), first, mine):
            times.clear()
        benchmark.pedantic(run_ours, setup=before_ours, rounds=rounds, iterations=1)
        line = _line(title, took, np.array(mine), np.array(first))
        line.huge_pages = huge_page_share()
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
