"""The benchmarks' options and fixtures, the path of their JSON, and the report header with the machine."""

import gc
import os
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from rich.console import Console
from threadpoolctl import threadpool_limits

import fedcore
from bench import machine
from bench.versus import compare

RESULTS = Path(__file__).parent.parent / "build" / "bench"


def pytest_addoption(parser):
    group = parser.getgroup("fedcore benchmarks")
    group.addoption("--short", action="store_true", help="small arrays, few rounds, no targets, and as --in-turn-only")
    group.addoption("--in-turn-only", action="store_true", help="no processes for rivals alone")
    group.addoption("--cpu", action="store_true", help="CPU time on one thread, for a busy machine")
    group.addoption("--against", action="append", metavar="RIVAL", help="time these rivals only; may be repeated")


def pytest_configure(config):
    config.addinivalue_line("markers", "one_thread: as in the processes of ``fedcore run``, one per core")
    config.addinivalue_line("markers", "cpu: operations that are mostly Python, timed by the CPU time on one thread")
    if "OMP_WAIT_POLICY" in os.environ:
        raise pytest.UsageError("OMP_WAIT_POLICY: expected unset, so that torch's threads wait as they do by default")
    options = config.option
    options.benchmark_quiet = True  # pytest-benchmark's table cannot show rivals
    if options.benchmark_json is None and not options.collectonly:
        RESULTS.mkdir(parents=True, exist_ok=True)
        when = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        options.benchmark_json = str(RESULTS / f"{when}-{fedcore.isa()}{'-short' * options.short}.json")


def pytest_sessionstart(session):
    if not session.config.option.collectonly:
        session.config.get_terminal_writer().line(machine.head(machine.describe()))


def pytest_benchmark_generate_machine_info(config):
    return machine.describe()


@pytest.fixture
def clock(request):
    """Return the clock of the operations: the CPU time with --cpu and for benchmarks marked ``cpu``."""
    is_cpu = request.config.option.cpu or request.node.get_closest_marker("cpu")
    return time.process_time if is_cpu else time.perf_counter


@pytest.fixture(autouse=True)
def same_threads(request, clock):
    """Give torch and BLAS as many threads as fedcore: one for CPU times and benchmarks marked ``one_thread``."""
    before = fedcore.threads(), torch.get_num_threads()
    if clock is time.process_time or request.node.get_closest_marker("one_thread"):
        fedcore.set_threads(1)
    torch.set_num_threads(fedcore.threads())
    with threadpool_limits(fedcore.threads()):  # NumPy's BLAS
        yield
    fedcore.set_threads(before[0])
    torch.set_num_threads(before[1])
    gc.collect()  # some benchmarks hold gigabytes


@pytest.fixture
def size(request):
    """Return the parameter's first number of elements, clients or models, or the second with --short."""
    short = request.config.option.short
    return lambda full, short_form: short_form if short else full


@pytest.fixture
def record(benchmark, request, capsys):
    """Return a function that prints a ``Line`` and stores it in the JSON."""

    def keep(line):
        line.short = request.config.option.short
        benchmark.extra_info["line"] = asdict(line)
        with capsys.disabled():
            Console(width=120, markup=False, highlight=False).print("", line.table(), sep="\n")

    return keep


@pytest.fixture
def versus(benchmark, record, request, clock):
    """Return ``bench.versus.compare`` without its first argument; it also records the line."""
    options = request.config.option
    alone = clock is time.perf_counter and not (options.short or options.in_turn_only)

    def run(title, ours, rivals, *, rounds=11, **how):
        if options.against:
            rivals = {name: rival for name, rival in rivals.items() if name in options.against}
        rounds = min(rounds, 7) if options.short else rounds
        line = compare(benchmark, title, ours, rivals, rounds=rounds, alone=alone, clock=clock, **how)
        record(line)
        return line

    return run
