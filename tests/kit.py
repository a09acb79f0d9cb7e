"""Shared helpers: ``Server`` arguments from flat options for parametrized tests, and processes."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest

from fedcore import Compute, Limits, RoundPolicy, Storage
from fedcore.algorithms import MimiC
from fedcore.rules import CapExamples, CapSteps, ClipToMedian, Mean, RejectLong
from fedcore.store import ClientStore

ROOT = Path(__file__).parents[1]
RULES = {"cap_steps": CapSteps, "cap_examples": CapExamples, "reject_long": RejectLong}


def in_threads(work, *arguments):
    """Call a function with each tuple of arguments, as ``map`` does, in one thread each; wait for all."""
    calls = enumerate(zip(*arguments, strict=True))
    threads = [threading.Thread(target=work, args=each, name=f"{work.__name__} {i}") for i, each in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def one_by_one(server, updates, **options):
    """Run a round with a batch for each update, and return its report."""
    with server.open_round(**options) as opened:
        for update in updates:
            opened.add_batch([update])
    return opened.report


@contextmanager
def in_time(seconds=60):
    """Stop a block, or a function with this decorator, that waits for longer."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def place(spec, **options):
    """Return the storage for a test's parameter: "ram", "cuda", "mmap:PATH", or a ClientStore."""
    if isinstance(spec, ClientStore):
        return spec
    spec = str(spec)
    if spec.startswith("mmap:"):
        return Storage(spec.removeprefix("mmap:"), **options)
    return Storage(medium=spec, **options)


def flat(**options):
    """Return ``Server`` arguments: group the fields of the option objects, and pass other options unchanged.

    ``cap_steps=2, cap_examples=2, reject_long=10, clip=True, weights=...`` become ``aggregation``; the numbers are
    ratios.
    """
    rules = [kind(options.pop(name)) for name, kind in RULES.items() if options.get(name) is not None]
    for name in RULES:
        options.pop(name, None)
    if options.pop("clip", False):
        rules.append(ClipToMedian())
    if (weights := options.pop("weights", None)) is not None:
        rules.append(Mean(weights))
    made = {"aggregation": rules} if rules else {}
    for argument, kind in (("limits", Limits), ("storage", Storage), ("compute", Compute), ("policy", RoundPolicy)):
        own = {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        if own:
            made[argument] = kind(**own)
    return made | options


def with_history(method, rounds):
    """Return the method; MimiC gets a history of this many rounds."""
    named = method in ("MimiC", MimiC()) if isinstance(method, str | MimiC) else False
    return MimiC(history=rounds) if named else method


def python(*arguments, status=0, cwd=ROOT, timeout=300, **environment):
    """Run a Python process with the tests on its path; it must end with this status."""
    command, env = [sys.executable, *map(str, arguments)], os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def compiled(source, target, *options):
    """Compile a program or library in C; skip the test where there is no compiler."""
    if (compiler := shutil.which(os.environ.get("CC", "cc"))) is None:
        pytest.skip("there is no C compiler")
    done = subprocess.run([compiler, source, "-o", target, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target
