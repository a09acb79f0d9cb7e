"""Random signals, and lack of descriptors and memory, during a server's changes: do memory and store differ afterwards?

Run ``python -m tests.server.storms SIGNALS STARVATIONS [SEED]``; the result must be 0.
"""

import ctypes
import os
import queue
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from fedcore import Server, Update, algorithms
from fedcore.errors import LockedError
from tests.server.invariant import contradictions

METHODS = {"MIFA": algorithms.MIFA(wait=False), "MimiC": "MimiC", "SCAFFOLD": "SCAFFOLD"}
MEDIA = ["ram", "mmap"]
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGALRM": signal.SIGALRM, "SIGUSR1": signal.SIGUSR1}
FROM_OUTSIDE = "an exception of another thread"
KINDS = [*SIGNALS, FROM_OUTSIDE]
STARVATIONS = ["EMFILE", "ENOMEM"]
FEWEST, MOST = 4, 10


class Stopped(BaseException):
    """Raised by handlers and by the other thread."""


def stop(number, frame):
    raise Stopped(number)


class Thrower:
    """Another thread, which interrupts the main one after some time."""

    def __init__(self):
        self._orders, self._done = queue.SimpleQueue(), threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def throw(self, kind, seconds):
        self._done.clear()
        self._orders.put((kind, seconds))

    def settle(self):
        """Wait until the interruption has come."""
        while True:
            try:
                self._done.wait()
                for _ in range(10):  # lines at which it can come
                    pass
                return
            except Stopped:
                pass

    def _work(self):
        main = threading.main_thread().ident
        while True:
            kind, seconds = self._orders.get()
            time.sleep(seconds)
            if kind == FROM_OUTSIDE:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Stopped))
            else:
                signal.pthread_kill(main, SIGNALS[kind])
            self._done.set()


@contextmanager
def few_descriptors(generator):
    """So few file descriptors that one of the next opens fails."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(generator.randrange(0, 7)):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


@contextmanager
def little_memory(generator, n):
    """So little memory that one of the next large allocations or mappings fails."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + generator.randrange(0, 6 * 4 * n), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


class Course:
    """One server of a method and a medium, and its random changes."""

    def __init__(self, folder, method, medium, n, seed):
        self._folder, self._method, self._medium, self._n = Path(folder), method, medium, n
        self._random, self._made, self.copies = random.Random(seed), 0, 0
        self._ys = np.random.default_rng(seed).normal(size=(MOST, n)).astype(np.float32)
        self._begin()

    def _begin(self):
        self._made, self._next = self._made + 1, FEWEST + 2
        path = self._folder / f"{self._method} {self._made}" if self._medium == "mmap" else None
        self.server = Server(np.zeros(self._n, np.float32), METHODS[self._method], self._next, lr=0.1, storage=path)
        for _ in range(2):
            self.round()

    def step(self):
        """Make a random change."""
        there = len(self.server.clients)
        draw = self._random.random()
        if draw < 0.15 and there > FEWEST:
            self.server.remove_client(self._random.choice(list(self.server.clients)))
        elif draw < 0.3 and there < MOST:
            self._next += 1
            self.server.add_clients(self._next)
        elif draw < 0.4:
            self.server.save(self._folder / f"{self._method} {self._medium} copy {self.copies}")
        else:
            self.round()

    def round(self):
        clients = list(self.server.clients)
        accepted = self._random.sample(clients, self._random.randrange(1, len(clients) + 1))
        new = [self._next + 1] if len(clients) < MOST and self._random.random() < 0.3 else []
        self._next += len(new)
        with self.server.open_round(newcomers=new) as opened:
            for i, client in enumerate([*accepted, *new]):
                opened.add_batch([Update(client, self._ys[i], 1)])

    def verdict(self):
        """The state of the server after an interruption; a new server replaces one that cannot continue."""
        try:
            if self.server._backend.store._session.broken:
                verdict = "says: open it again"
            elif contradictions(self.server):
                verdict = "DIFFERS"
            else:
                self.round()
                verdict = "DIFFERS" if contradictions(self.server) else "agrees"
        except Exception as error:
            verdict = f"CANNOT GO ON: {type(error).__name__}: {str(error)[:80]}"
        if verdict != "agrees":
            with suppress(Exception):
                self.server.close()
            self._begin()
        return verdict


def courses(folder, n, seed):
    """One for each method and medium, in turn, endlessly."""
    made = [Course(folder, method, medium, n, seed) for method in METHODS for medium in MEDIA]
    while True:
        yield from made


def signals(many, seed=0, n=3000):
    """Interrupt changes by signals of five kinds; return a Counter of (kind, time, verdict)."""
    counted, generator, thrower, hit, tried = Counter(), random.Random(seed), Thrower(), 0, 0
    before = {kind: signal.signal(number, stop) for kind, number in SIGNALS.items()}
    try:
        with tempfile.TemporaryDirectory() as folder:
            each = courses(folder, n, seed)
            while hit < many:
                course, kind, came = next(each), KINDS[tried % len(KINDS)], "after it"
                tried += 1
                try:
                    # A change takes 1 to 30 ms.
                    thrower.throw(kind, generator.random() ** 2 * (0.005 if course._medium == "ram" else 0.04))
                    course.step()
                except Stopped:
                    came, hit = "over a change", hit + 1
                except LockedError:  # of a copy, whose lock an exception took from its owner
                    came = "long before, over a save to the same copy"
                    course.copies += 1
                finally:
                    thrower.settle()
                counted[kind, came, course.verdict()] += 1
    finally:
        for kind, handler in before.items():
            signal.signal(SIGNALS[kind], handler)
    return counted


def starvations(many, seed=0, n=100_000):
    """Run changes without descriptors or memory; return a Counter of (kind, result, verdict)."""
    counted, generator, hit, tried = Counter(), random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        each = courses(folder, n, seed)
        while hit < many:
            course, kind = next(each), STARVATIONS[tried % 2]
            tried += 1
            try:
                with few_descriptors(generator) if kind == "EMFILE" else little_memory(generator, n):
                    course.step()
                ended = "enough"
            except Exception as error:
                ended, hit = type(error).__name__, hit + 1
            counted[kind, ended, course.verdict()] += 1
    return counted


def results(counted):
    """Lines of a table, and the number of servers that differ."""
    lines = [f"{number:6d}  {', '.join(key)}" for key, number in sorted(counted.items())]
    wrong = sum(number for (_, _, verdict), number in counted.items() if verdict.isupper() or "CANNOT" in verdict)
    return "\n".join([*lines, f"{sum(counted.values()):6d}  in all; memory and store differ in {wrong}"])


if __name__ == "__main__":
    chosen = [int(word) for word in sys.argv[1:]]
    for storm, many in ((signals, chosen[0]), (starvations, chosen[1])):
        sys.stdout.write(f"{storm.__name__}\n{results(storm(many, *chosen[2:]))}\n")
        sys.stdout.flush()
