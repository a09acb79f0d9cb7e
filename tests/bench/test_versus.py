"""The benchmarks' protocol: timing, disagreements, and measurements in a child process."""

import ast
from pathlib import Path

import numpy as np
import pytest

from bench.alone import Alone, Work
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


def test_a_rival_with_another_result_is_found():
    work = Work(ones, 8)
    rivals = {"twice": work.rival(doubled)}
    compare(Pedantic, "equal", lambda: np.full(8, 2.0), rivals, bytes=32, rounds=1, agree=1e-6, alone=False)
    with pytest.raises(AssertionError, match="twice does something else"):
        compare(Pedantic, "not", lambda: np.full(8, 2.1), rivals, bytes=32, rounds=1, agree=1e-6, alone=False)


def test_a_child_process_measures_time_and_memory():
    n = 4 * MIB
    with Alone(ones, (n,), summed, threads=1) as process:
        assert 0.9 * 4 * n < process.peak() < 1.2 * 4 * n
        assert all(seconds > 0 for seconds in process.turn())


def test_a_failing_child_process_reports_its_error(capfd):
    with Alone(ones, (1,), fails, threads=1) as process, pytest.raises(RuntimeError, match="status 1"):
        process.turn()
    assert "as a rival may" in capfd.readouterr().err


def test_rivals_do_not_import_fedcore():
    for file in RIVALS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] == "fedcore"], file
