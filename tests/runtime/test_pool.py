"""The pool under fork, spawn, concurrent callers, busy machines and interpreter exit."""

import multiprocessing
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import fedcore
from fedcore import kernels

N = 1_000_003
ROWS = [np.full(N, i, np.float32) for i in range(4)]
WEIGHTS = np.float32([1, 10, 100, 1000])
DUE = 3210.0


@pytest.fixture(autouse=True)
def _three_threads():
    before = fedcore.threads()
    fedcore.set_threads(3)
    yield
    fedcore.set_threads(before)


def total():
    out = kernels.weighted_sum(ROWS, WEIGHTS)
    assert (out == DUE).all()
    return float(out[0])


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_have_their_own_threads(method):
    assert total() == DUE  # the parent's workers exist before the child does
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.starmap_async(total, [()] * 8).get(timeout=60) == [DUE] * 8
    assert total() == DUE


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_fork_while_another_thread_is_in_a_kernel():
    stop = threading.Event()

    def work():
        while not stop.is_set():
            total()

    busy = threading.Thread(target=work)
    busy.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0 if total() == DUE else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        busy.join()


def test_many_python_threads_at_once():
    results = []

    def work():
        results.extend(total() for _ in range(10))

    callers = [threading.Thread(target=work) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert results == [DUE] * 80


def test_the_thread_count_can_change_between_calls():
    for count in (1, 7, 2, 1, 5):
        fedcore.set_threads(count)
        assert total() == DUE


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "raise SystemExit(0)",
        "import threading; threading.Thread(target=work).start()",
        "import threading; threading.Thread(target=work, daemon=True).start()",
    ],
)
def test_the_interpreter_exits_with_sleeping_and_with_working_threads(ending):
    code = (
        "import numpy as np, fedcore\n"
        "from fedcore import kernels\n"
        "fedcore.set_threads(3)\n"
        "rows = [np.ones(4_000_000, np.float32)] * 4\n"
        "def work():\n    for _ in range(20): kernels.squared_norms(rows)\n"
        f"work()\n{ending}\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_threads_come_from_the_environment():
    code = "import fedcore; print(fedcore.threads())"
    for value, due in (("5", "5"), ("nonsense", str(len(os.sched_getaffinity(0))))):
        environment = os.environ | {"FEDCORE_THREADS": value}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == due
