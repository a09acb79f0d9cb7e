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
from tests.kills import killed
from tests.kit import python

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
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_have_their_own_threads(method):
    assert total() == DUE  # the parent's workers exist before the child does
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.starmap_async(total, [()] * 8).get(timeout=300) == [DUE] * 8
        pool.close()  # the end of the block sends SIGTERM, which a fork with another test's handler ignores
        pool.join()
    assert total() == DUE


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_fork_while_another_thread_is_in_a_kernel():
    stop = threading.Event()

    def work():
        while not stop.is_set():
            total()

    def check():
        assert total() == DUE

    busy = threading.Thread(target=work)
    busy.start()
    try:
        for _ in range(20):
            assert not killed(check)
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
        caller.join(timeout=300)
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
    python("-c", code)


@pytest.mark.parametrize(("value", "due"), [("5", 5), ("4096", 4096)])
def test_threads_come_from_the_environment(value, due):
    assert int(python("-c", "import fedcore; print(fedcore.threads())", FEDCORE_THREADS=value).stdout) == due


def test_the_default_number_of_threads():
    """Fewer than its cores with a quota of a control group; see tests/native/base/cores.cpp."""
    done = python("-c", "import fedcore; print(fedcore.threads())", FEDCORE_THREADS="")
    assert 1 <= int(done.stdout) <= len(os.sched_getaffinity(0))


def test_workers_leave_signals_to_the_callers_threads():
    """Except the signals of the worker's own faults, once it runs: a starting thread blocks all signals."""
    code = (
        "import os, signal, time\n"
        "from tests.runtime import test_pool\n"
        "import fedcore\n"
        "theirs = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM}\n"
        "faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}\n"
        "def blocked(task):\n"
        "    mask = int(open(f'/proc/self/task/{task}/status').read().split('SigBlk:')[1].split()[0], 16)\n"
        "    return {number for number in range(1, 65) if mask >> (number - 1) & 1}\n"
        "before = set(os.listdir('/proc/self/task'))\n"
        "fedcore.set_threads(3)\n"
        "test_pool.total()\n"
        "workers = set(os.listdir('/proc/self/task')) - before\n"
        "assert len(workers) == 2, workers\n"
        "deadline = time.monotonic() + 30\n"
        "while any(blocked(task) & (theirs | faults) != theirs for task in workers):\n"
        "    assert time.monotonic() < deadline, {task: blocked(task) for task in workers}\n"
        "    time.sleep(0.01)\n"
    )
    python("-c", code)


def test_a_bad_number_of_threads_in_the_environment_is_an_error():
    code = (
        "import os, numpy as np, fedcore\n"
        "from fedcore import kernels\n"
        "rows = [np.ones(1_000_000, np.float32)] * 4\n"
        "calls = [fedcore.threads, fedcore.build_info, lambda: kernels.squared_norms(rows)]\n"
        "for value in ('nonsense', '0', '-2', '4097', '99999999999999999999', '2.5', '3 ', ' 3', '1e2'):\n"
        "    os.environ['FEDCORE_THREADS'] = value\n"
        "    for call in calls:\n"
        "        try: call()\n"
        "        except RuntimeError as error:\n"
        "            assert str(error) == f'FEDCORE_THREADS: expected 1..4096 threads, got {value}', error\n"
        "        else: raise AssertionError(value)\n"
        "fedcore.set_threads(2)  # settles it\n"
        "for call in calls: call()\n"
    )
    python("-c", code)


def test_a_machine_without_a_free_core():
    """Other processes spin on every core, several times over; each call still gets its result."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * os.cpu_count())]
    try:
        assert [total() for _ in range(20)] == [DUE] * 20
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def test_a_system_that_cannot_create_threads():
    """The caller works without workers, and with workers again as soon as the system allows."""
    code = (
        "import resource, threading\n"
        "from tests.runtime import test_pool\n"
        "import fedcore\n"
        "fedcore.set_threads(3)\n"
        "status = lambda name: int(open('/proc/self/status').read().split(name + ':')[1].split()[0])\n"
        "before = status('Threads')\n"
        "out = test_pool.np.empty(test_pool.N, 'f')\n"
        "limit = 1024 * status('VmSize') + (4 << 20)  # less than one stack\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))\n"
        "try: threading.Thread(target=print).start()\n"
        "except RuntimeError: print('none')\n"
        "for _ in range(50): fedcore.kernels.weighted_sum(test_pool.ROWS, test_pool.WEIGHTS, out=out)\n"
        "print((out == test_pool.DUE).all(), status('Threads') - before)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "fedcore.kernels.weighted_sum(test_pool.ROWS, test_pool.WEIGHTS, out=out)\n"
        "print((out == test_pool.DUE).all(), status('Threads') - before)\n"
    )
    assert python("-c", code).stdout.splitlines() == ["none", "True 0", "True 2"]
