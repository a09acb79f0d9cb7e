"""Repeated runs of tests, each with one mutant, in forked processes.

A process that has collected the tests forks one for each mutant, which puts the changed function's code in the place of
the one that is there. What is done at import, tables and defaults among them, is changed in a process that was forked
before fedcore was imported. So torch, SciPy and pytest are imported once.
"""

import contextlib
import gc
import importlib.machinery
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from functools import _lru_cache_wrapper, cached_property
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item

ROOT = Path(__file__).parents[2]
PLUGINS = [f"no:{name}" for name in ("cacheprovider", "xdist", "unraisableexception", "threadexception")]
OPTIONS = ["-s", "-q", *(f"-p{name}" for name in PLUGINS), "--assert=plain", "--rootdir", str(ROOT)]
KILLED, SURVIVED = 1, 0
FACTOR, LEAST_SECONDS, LEAST_WALL_SECONDS = 10, 5, 60
"""A test beside a mutant is stopped after FACTOR times the processor's seconds that it takes without one, and
LEAST_SECONDS more; and, if it waits without end, after LEAST_WALL_SECONDS more by the clock."""
STOPPED = (-signal.SIGPROF, -signal.SIGALRM)


class TooLong(BaseException):
    """A test takes too long to run for each mutant."""


class Loop:
    """A pytest plugin that passes on the collected tests, and runs none."""

    def __init__(self, work):
        self.work = work

    def pytest_runtestloop(self, session):
        """Replace pytest's own run."""
        self.work(session)
        return True


def forked(work, folder, into=os.devnull):
    """Return the status of a process that runs ``work`` in its own folder; a signal's number is negative."""
    own = tempfile.mkdtemp(dir=folder)
    child = os.fork()
    if not child:
        status = 3
        try:
            os.setsid()
            for each in (signal.SIGPROF, signal.SIGALRM, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
            out = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = own
            tempfile.tempdir = own
            status = work()
        except BaseException:  # a mutant may break pytest itself
            traceback.print_exc()
            status = KILLED
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with its children
    shutil.rmtree(own, ignore_errors=True)
    return os.waitstatus_to_exitcode(status)


def run_one(item, following):
    """The test's verdict: "failed", "skipped" or "passed"."""
    with catch_warnings_for_item(item.config, item.ihook, "runtest", item):  # with the test's own filters
        reports = runtestprotocol(item, nextitem=following, log=False)
    for verdict in ("failed", "skipped"):
        if any(getattr(report, verdict) for report in reports):
            return verdict
    return "passed"


def first_failure(items, seconds, told):
    """Return KILLED with the first failing test, which is written to ``told``; else SURVIVED."""
    for at, item in enumerate(items):
        Path(told).write_text(item.nodeid)
        following = items[at + 1] if at + 1 < len(items) else None
        most = LEAST_SECONDS + FACTOR * seconds[item.nodeid]
        signal.setitimer(signal.ITIMER_PROF, most)
        signal.alarm(int(LEAST_WALL_SECONDS + most))
        if run_one(item, following) == "failed":
            return KILLED
    return SURVIVED


class Calls:
    """The functions of some files that a test calls, and the modules of its objects' classes."""

    def __init__(self, room):
        self.prefix = str(ROOT / room)
        self.seen = set()

    def __call__(self, frame, event, argument):
        """The function for ``sys.settrace``, for calls only."""
        code = frame.f_code
        ours = code.co_filename.startswith(self.prefix)
        if ours:
            file = os.path.relpath(code.co_filename, ROOT)
            self.seen.add((file, code.co_qualname.partition(".<locals>")[0]))
        if ours or (code.co_filename == "<string>" and code.co_name == "__init__"):
            self.seen.update((name, "") for name in _modules_of(frame.f_locals.get("self")))
        return None

    def during(self, work):
        """Return the result of ``work``, and the functions that it called."""
        self.seen = set()
        threading.settrace(self)
        sys.settrace(self)
        try:
            return work(), self.seen
        finally:
            sys.settrace(None)
            threading.settrace(None)


_KNOWN: dict[type, tuple[str, ...]] = {}


def _modules_of(value):
    kind = type(value)
    if kind not in _KNOWN:
        names = {each.__module__ for each in kind.__mro__ if each.__module__.startswith("fedcore.")}
        _KNOWN[kind] = tuple(name.replace(".", "/") + ".py" for name in names)
    return _KNOWN[kind]


def held(room, items, most, into):
    """Run the tests, each with a limit of CPU seconds, and write each test's time and calls.

    A JSON file: {"id": {"seconds": s, "calls": [[file, function]]}}.
    """

    def stop(*_):
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    calls, found = Calls(room), {}
    for at, item in enumerate(items):
        start = time.process_time()
        following = items[at + 1] if at + 1 < len(items) else None
        signal.setitimer(signal.ITIMER_PROF, most)
        verdict, seen = calls.during(lambda item=item, following=following: run_one(item, following))
        signal.setitimer(signal.ITIMER_PROF, 0)
        if verdict == "passed":
            found[item.nodeid] = {"seconds": time.process_time() - start, "calls": sorted(seen)}
        else:
            print(f"left out, since it {verdict} without any mutant: {item.nodeid}", flush=True)
    Path(into).write_text(json.dumps(found))
    return 0


def functions():
    """All functions, by file, qualified name and first line."""
    there: dict[tuple[str, str, int], list[FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(str(ROOT / "fedcore")):
            code = each.__code__
            there.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(each)
    return there


def remembering():
    """Caches of earlier calls: fedcore's caches, and the objects' dictionaries with their cached names."""
    caches, kept = [], []
    of_class: dict[type, list[str]] = {}
    for each in gc.get_objects():
        kind = type(each)
        if kind is _lru_cache_wrapper:
            caches += [each] * (each.__module__ or "").startswith("fedcore")
            continue
        if kind not in of_class:
            ours = any(str(base.__module__).startswith("fedcore") for base in kind.__mro__)
            of_class[kind] = [name for name in dir(kind) if ours and _is_kept(kind, name)]
        if of_class[kind]:
            kept.append((vars(each), of_class[kind]))
    return caches, kept


def _is_kept(kind, name):
    return any(isinstance(vars(base).get(name), cached_property) for base in kind.__mro__)


def forget(caches, kept):
    """Clear the caches, so that the changed function is used."""
    for cache in caches:
        cache.cache_clear()
    for attributes, names in kept:
        for name in names:
            attributes.pop(name, None)


def code_of(mutant, source):
    """The changed function's code."""
    pending = [compile(mutant.applied(source), str(ROOT / mutant.file), "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        if (code.co_qualname, code.co_firstlineno) == (mutant.where, mutant.first_line):
            return code
        pending += [const for const in code.co_consts if isinstance(const, CodeType)]
    raise LookupError(mutant)


COMPILED: dict[str, CodeType] = {}


def compile_all(folders=("fedcore", "tests", "bench")):
    """Compile every source once, for all later forked processes."""
    for folder in folders:
        for file in (ROOT / folder).rglob("*.py"):
            COMPILED[str(file)] = compile(file.read_text(), str(file), "exec", dont_inherit=True)
    gc.collect()
    gc.freeze()  # else each of them would look through torch once more


def import_changed(mutant, source):
    """Make later imports use the mutant."""
    COMPILED[str(ROOT / mutant.file)] = compile(
        mutant.applied(source), str(ROOT / mutant.file), "exec", dont_inherit=True
    )
    loader = importlib.machinery.SourceFileLoader
    read = loader.get_code
    loader.get_code = lambda self, fullname: COMPILED.get(os.path.realpath(self.path)) or read(self, fullname)


def run_fresh(mutant, source, chosen, seconds, told):
    """The status of tests that are collected with the mutant."""
    assert "fedcore" not in sys.modules
    import_changed(mutant, source)
    status = [KILLED]  # of a collection that fails

    def work(session):
        there = {item.nodeid: item for item in session.items}
        if not session.testsfailed and there.keys() >= set(chosen):
            status[0] = first_failure([there[name] for name in chosen], seconds, told)

    Path(told).write_text("the tests' import")
    signal.alarm(120)
    pytest.main([*OPTIONS, *sorted({name.partition("::")[0] for name in chosen})], plugins=[Loop(work)])
    return status[0]
