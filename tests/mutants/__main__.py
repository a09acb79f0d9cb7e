"""Mutation testing: ``python -m tests.mutants [fedcore/ROOM | FILE ...]``, of the rooms in ``rooms.py``.

Each mutant (``sites.py``) is killed by a test that fails, or by time; one that survives is argued in ``argued.toml``,
or listed, and fails this in a room that is settled. What was found is written into build/mutants, a line a mutant.
"""

import argparse
import json
import os
import random
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

from tests.mutants import run
from tests.mutants.rooms import ROOMS, SETTLED, SLOWEST
from tests.mutants.rooms import files as files_of
from tests.mutants.sites import Mutant, mutants
from tests.native.build import fake_cuda

HERE = Path(__file__).parent
PRELOADED = ("torch", "numpy.testing", "hypothesis", "networkx", "scipy.stats", "pandas", "pydantic")
FRAMEWORKS = ("flwr", "nvflare", "pfl")


def preload():
    """Import slow foreign packages, on one thread, as needed before a fork."""
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[threads] = "1"
    for name in PRELOADED + FRAMEWORKS:
        try:
            __import__(name)
        except ImportError:
            print(f"without {name}")
    run.compile_all()


def build_driver(tests):
    """Build the emulated device's driver once, if a test needs it, and not in each forked process."""
    if any(test.startswith("tests/devices") for test in tests) and "FEDCORE_CUDA_DRIVER" not in os.environ:
        fake_cuda()


def chosen(mutant, held):
    """The tests that a mutant may affect, fastest first."""
    found = {name for name, test in held.items() if [mutant.file, mutant.where] in test["calls"]}
    if not mutant.where:
        found |= {name for name, test in held.items() if any(file == mutant.file for file, _ in test["calls"])}
        found = found or set(held)
    return sorted(found, key=lambda name: held[name]["seconds"])


UNCHANGED = Mutant("", "", 0, 0, "", "", 0, 0, "")


class Room:
    """The mutants of a room, or of some of its files, and the room's tests."""

    def __init__(self, room, found, tests, folder):
        self.room, self.mutants, self.tests, self.folder = room, found, tests, folder
        self.sources = {mutant.file: (run.ROOT / mutant.file).read_text() for mutant in found}
        self.told = folder / "told"
        self.killers: dict[tuple[str, str], list[str]] = {}
        self.results = folder / "results.jsonl"
        self.results.unlink(missing_ok=True)

    def test(self):
        """Run the tests for each mutant; the results are lines of a file."""
        status = run.forked(self._collected, self.folder, self.folder / "log")
        if status:
            sys.exit(f"{self.room}: the tests did not run: {self.folder / 'log'}")
        held = self._held()
        first = sorted(held, key=lambda name: held[name]["seconds"])[:8]
        self._expect_none_fails(self._status_fresh(UNCHANGED, "", first, held))
        swapped = {line["name"] for line in self._lines()}
        for mutant in self.mutants:
            if mutant.name not in swapped:
                self._fresh(mutant, chosen(mutant, held), held)
        return {line["name"]: line for line in self._lines()}

    def _held(self):
        return json.loads((self.folder / "held.json").read_text())

    def _lines(self):
        return [json.loads(line) for line in self.results.read_text().splitlines()]

    def _collected(self):
        """Collect the tests, run them once, then for each mutant of a function."""

        def work(session):
            if session.testsfailed:
                return
            items = {item.nodeid: item for item in session.items}
            into = self.folder / "held.json"
            if run.forked(lambda: run.held(self.room, session.items, SLOWEST, into), self.folder, self.folder / "log"):
                return
            held = self._held()
            self.results.touch()
            names = sorted(held, key=lambda name: held[name]["seconds"])
            seconds = {name: test["seconds"] for name, test in held.items()}
            tests = [items[name] for name in names]
            self._expect_none_fails(
                run.forked(lambda: run.first_failure(tests, seconds, self.told), self.folder, self.folder / "log")
            )
            functions, remembering = run.functions(), run.remembering()
            run.gc.freeze()
            for mutant in self.mutants:
                self._swapped(mutant, items, held, functions, remembering)
            done.append(True)

        done = []
        run.pytest.main([*run.OPTIONS, *self.tests], plugins=[run.Loop(work)])
        return 0 if done else 1

    def _swapped(self, mutant, items, held, functions, remembering):
        there = functions.get((str(run.ROOT / mutant.file), mutant.where, mutant.first_line))
        code = run.code_of(mutant, self.sources[mutant.file]) if mutant.where else None
        if not there or code.co_freevars != there[0].__code__.co_freevars:
            return
        names = self._killers_first(mutant, chosen(mutant, held))
        if not names:
            self._tell(mutant, "survived", "no test calls it")
            return
        seconds = {name: held[name]["seconds"] for name in names}

        def work():
            for function in there:
                function.__code__ = code
            run.forget(*remembering)
            return run.first_failure([items[name] for name in names], seconds, self.told)

        self._judge(mutant, run.forked(work, self.folder), len(names))

    def _fresh(self, mutant, names, held):
        """In parts, because a few tests are collected faster than all."""
        names = self._killers_first(mutant, names)
        source, status = self.sources[mutant.file], 0
        for part in (names[:8], names[8:]):
            if part and not status:
                status = self._status_fresh(mutant, source, part, held)
        self._judge(mutant, status, len(names))

    def _status_fresh(self, mutant, source, names, held):
        seconds = {name: held[name]["seconds"] for name in names}
        return run.forked(lambda: run.run_fresh(mutant, source, names, seconds, self.told), self.folder)

    def _expect_none_fails(self, status):
        """A test that fails without a mutant, or in another order, would seem to kill all mutants."""
        if status != run.SURVIVED:
            sys.exit(f"{self.room}: without a mutant, in the order of their seconds: {self.told.read_text()} fails")

    def _killers_first(self, mutant, names):
        """The tests that killed the last mutants of a function run first."""
        first = [name for name in self.killers.get((mutant.file, mutant.where), []) if name in names]
        return first + [name for name in names if name not in first]

    def _judge(self, mutant, status, asked):
        by = self.told.read_text() if self.told.exists() else ""
        if status == run.SURVIVED:
            self._tell(mutant, "survived", f"{asked} tests")
        else:
            self._tell(mutant, "timeout" if status in run.STOPPED else "killed", by)
            last = self.killers.setdefault((mutant.file, mutant.where), [])
            self.killers[mutant.file, mutant.where] = [by, *(name for name in last if name != by)][:5]

    def _tell(self, mutant, status, by):
        line = {"name": mutant.name, "line": mutant.line, "where": mutant.where, "status": status, "by": by}
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")


def argued():
    """The accepted survivors, each with a reason."""
    entries = tomllib.loads((HERE / "argued.toml").read_text()).get("argued", [])
    return {name: entry["why"] for entry in entries for name in entry["mutants"]}


def wanted(room, paths, among, sample, seed):
    """The requested mutants of a room, and their number."""
    files = [str(file.relative_to(run.ROOT)) for file in files_of(room)]
    if room not in paths:
        files = [file for file in files if file in paths]
    sources = {file: (run.ROOT / file).read_text() for file in files}
    found = [mutant for file, source in sources.items() for mutant in mutants(file, source) if mutant.compiles(source)]
    if among is not None:
        found = [mutant for mutant in found if mutant.name in among]
    if sample is not None and sample < len(found):
        picked = set(random.Random(seed).sample(range(len(found)), sample))
        return [mutant for at, mutant in enumerate(found) if at in picked], len(found)
    return found, len(found)


def main():
    """Run the tests for the requested mutants, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=list(ROOMS), help="rooms, or files of them")
    parser.add_argument("--tests", nargs="+", help="other tests than those in rooms.py")
    parser.add_argument("--among", type=Path, help="only the survivors of an earlier results.jsonl")
    parser.add_argument("--sample", type=int, help="no more than so many mutants a room, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    asked = parser.parse_args()
    among = None
    if asked.among:
        lines = {line["name"]: line for line in map(json.loads, asked.among.read_text().splitlines())}
        among = {name for name, line in lines.items() if line["status"] == "survived"}
    preload()
    known, bad = argued(), []
    print("| room | mutants | asked about | killed | by time | survived | of these argued | minutes |\n|" + "---|" * 8)
    for room, tests in ROOMS.items():
        found, total = wanted(room, asked.paths, among, asked.sample, asked.seed)
        if not found:
            continue
        build_driver(asked.tests or tests)
        folder = run.ROOT / "build" / "mutants" / room.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        results = Room(room, found, asked.tests or tests, folder).test()
        count = Counter(line["status"] for line in results.values())
        survivors = [line for line in results.values() if line["status"] == "survived"]
        bad += [line for line in survivors if line["name"] not in known]
        print(
            f"| `{room}` | {total} | {len(found)} | {count['killed']} | {count['timeout']} | {count['survived']} | "
            f"{sum(line['name'] in known for line in survivors)} | {(time.monotonic() - start) / 60:.0f} |",
            flush=True,
        )
    for line in bad:
        print(f"{line['where'] or 'at import'}, line {line['line']}, asked {line['by']}: {line['name']}")
    return int(any(line["name"].startswith(f"{room}/") for line in bad for room in SETTLED))


if __name__ == "__main__":
    sys.exit(main())
