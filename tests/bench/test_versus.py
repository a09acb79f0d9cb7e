"""The benchmarks' protocol: timing, disagreements, and measurements in a child process."""

import ast
import time
from pathlib import Path

import numpy as np
import pytest

from bench.alone import Alone, Work
from bench.line import ALONE, Line
from bench.probe import Floor
from bench.turns import WARM_SECONDS, turn
from bench.versus import compare

RIVALS = Path(__file__).parent.parent.parent / "bench" / "rivals"
MIB = 2**20


class Pedantic:
    """A fake of pytest-benchmark's fixture for ``compare``."""

    @staticmethod
    def pedantic(run, *, setup, rounds, iterations):
        for _ in range(rounds * iterations):
            setup()
            run()


def ones(n):
    return [np.ones(n, np.float32)]


def doubled(x):
    return lambda: x * 2


def summed(x):
    return lambda: float((x * 2).sum())  # twice x is there for a moment only


def fails(x):
    raise ValueError("as a rival may")


def test_the_floor_is_the_fastest_median():
    floor = Floor("", (), [9, 1, 3, 2], (), keep=())
    rounds = iter([[9.0, 9.0, 9.0], *5 * [[1.0, 3.0, 2.0]], *6 * [[4.0, 3.0, 2.0]]])
    floor._seconds = lambda way: way / 1e3
    floor.turn = lambda: np.array(next(rounds))
    line = compare(Pedantic, "floors", lambda: None, {"floor": floor}, bytes=8, rounds=11, calls=9)
    assert floor._ways == [1, 2, 3]  # 9 was slower
    assert line.seconds["floor"] == 2.0  # the medians are 4, 3 and 2; the first round is thrown away
    assert line.ratios["floor"] > 1
    assert line.quartiles["floor"][0] <= line.ratios["floor"] <= line.quartiles["floor"][1]


def test_a_turn_warms_up_and_divides():
    called = []
    took = turn(lambda: called.append(time.perf_counter()), calls=50)
    assert len(called) > 101
    assert called[-51] - called[50] > 0.9 * WARM_SECONDS
    assert 0 < took.warm < 0.01
    assert 0 < took.after_pause < 0.01


def test_a_rival_with_another_result_is_found():
    work = Work(ones, 8)
    rivals = {"twice": work.rival(doubled)}
    compare(Pedantic, "equal", lambda: np.full(8, 2.0), rivals, bytes=32, rounds=1, agree=1e-6, alone=False)
    with pytest.raises(AssertionError, match="twice does something else"):
        compare(Pedantic, "not", lambda: np.full(8, 2.1), rivals, bytes=32, rounds=1, agree=1e-6, alone=False)


def test_results_are_compared_in_the_second_call():
    ours, same, other = iter([1.0, 2.0, 3.0, 4.0]), iter([9.0, 2.0, 0.0]), iter([1.0, 9.0])
    compare(Pedantic, "equal", lambda: next(ours, 0), {"same": lambda: next(same, 0)}, bytes=8, rounds=1, agree=1e-6)
    ours = iter([1.0, 2.0])
    with pytest.raises(AssertionError, match="other does something else"):
        compare(Pedantic, "not", lambda: next(ours, 0), {"other": lambda: next(other)}, bytes=8, rounds=1, agree=1e-6)


def test_a_child_process_measures_time_and_memory():
    n = 4 * MIB
    with Alone(ones, (n,), summed, threads=1) as process:
        assert 0.9 * 4 * n < process.peak() < 1.2 * 4 * n
        assert all(seconds > 0 for seconds in process.turn())


def test_a_failing_child_process_reports_its_error(capfd):
    with Alone(ones, (1,), fails, threads=1) as process, pytest.raises(RuntimeError, match="status 1"):
        process.turn()
    assert "as a rival may" in capfd.readouterr().err


def test_a_target_must_hold_in_turns_and_alone():
    line = Line("two ways", {"torch": 2.5, "torch" + ALONE: 1.9, "numpy": 3.0}, targets={"torch": 2.0, "numpy": 3.0})
    assert line.met("torch", "torch" + ALONE) == "no"
    assert [line.met(name) for name in ("torch", "torch" + ALONE, "numpy", "scipy")] == ["yes", "no", "yes", ""]
    line.others = 0.2
    assert [line.met(name) for name in ("torch", "scipy")] == ["?", ""]
    line.short = True
    assert line.met("numpy") == ""


def test_rivals_do_not_import_fedcore():
    for file in RIVALS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] == "fedcore"], file
