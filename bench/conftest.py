"""One fixture: fedcore against its rivals and the read floor, in turn within one run."""

import statistics
import time

import pytest
from rich.console import Console
from rich.table import Table

SETTLE_SECONDS = 0.05
"""Torch's and OpenBLAS's threads spin for milliseconds after an operation, and would take a core from the next."""


@pytest.fixture
def versus(benchmark):
    """Time ``ours`` against rivals that do the same work.

    Every round runs each rival once and then ours, so that all see the same drift of the machine's speed; a ratio is
    the median over rounds of (rival's time / our time) within a round. The ratios go to the benchmark's JSON too.
    Everybody waits before each turn until the others' threads sleep; ``bench_after_torch`` is about those that do not.

    Args:
        ours: the function that fedcore is judged by.
        rivals: name -> function, or name -> function returning its own seconds if it is in ``timed``.
        bytes: what the work must move, for GB/s.
    """

    def run(title, ours, rivals, *, bytes, timed=(), rounds=11):
        seconds = {name: [] for name in rivals}

        def run_rivals():
            for name, rival in rivals.items():
                time.sleep(SETTLE_SECONDS)
                began = time.perf_counter()
                own = rival()
                seconds[name].append(own if name in timed else time.perf_counter() - began)
            time.sleep(SETTLE_SECONDS)

        def run_ours():
            began = time.perf_counter()
            ours()
            mine.append(time.perf_counter() - began)

        mine = []
        ours()
        benchmark.pedantic(run_ours, setup=run_rivals, rounds=rounds, iterations=1, warmup_rounds=1)
        ratios = {
            name: statistics.median(theirs / own for theirs, own in zip(times, mine, strict=True))
            for name, times in seconds.items()
        }
        benchmark.extra_info["ratios"] = ratios
        table = Table(title=title)
        for column in ("", "ms (median)", "GB/s", "time / fedcore's"):
            table.add_column(column, justify="left" if not column else "right")
        for name, times, ratio in [("fedcore", mine, 1.0)] + [(name, seconds[name], ratios[name]) for name in rivals]:
            median = statistics.median(times)
            table.add_row(name, f"{1e3 * median:.2f}", f"{bytes / median / 1e9:.1f}", f"{ratio:.2f}")
        Console(width=100).print(table)
        return ratios

    return run
