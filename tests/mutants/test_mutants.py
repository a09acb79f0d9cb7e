"""The mutants of a source, and the detection of survivors."""

import os
import signal
import time
from types import CodeType

import pytest

from tests.mutants import run
from tests.mutants.__main__ import argued, chosen
from tests.mutants.rooms import ROOMS, files
from tests.mutants.sites import mutants

SOURCE = '''"""A docstring with 1."""
from os import path
__all__ = ["half"]
MOST: int = 3


def half(n: "int | None", least=0):
    """Half of 2."""
    if n is None or not least < n <= MOST:
        raise ValueError(f"n: expected at most {MOST + 1}, got {n}")
    total = 0
    total += n // 2
    return max(total, -least)


class Rows:
    @property
    def rows(self):
        return [row for row in self.all if row] if self.kept else None

    def close(self):
        self.all.clear()
        self.kept = open(self.path, mode="rb", text="two words")
'''


def changes(source=SOURCE):
    return [(each.line, each.where, each.change) for each in mutants("some.py", source)]


def test_the_mutants_of_a_source_by_hand():
    assert changes() == [
        (4, "", "3 -> 4"),
        (7, "", "0 -> 1"),
        (9, "half", "is -> is not"),
        (9, "half", "or -> and"),
        (9, "half", "not -> "),
        (9, "half", "< -> <="),
        (9, "half", "<= -> <"),
        (10, "half", 'raise ValueError(f"n: expected at most {MOST + 1}, got {n}") -> pass'),
        (11, "half", "0 -> 1"),
        (12, "half", "total += n // 2 -> pass"),
        (12, "half", "+= -> -="),
        (12, "half", "// -> /"),
        (12, "half", "2 -> 3"),
        (13, "half", "max -> min"),
        (13, "half", "max(total, -least) -> None"),
        (13, "half", "- -> "),
        (19, "Rows.rows", "[row for row in self.all if row] if self.kept else None -> None"),
        (19, "Rows.rows", "row -> not (row)"),
        (19, "Rows.rows", "self.kept -> not (self.kept)"),
        (22, "Rows.close", "self.all.clear() -> pass"),
        (23, "Rows.close", 'self.kept = open(self.path, mode="rb", text="two words") -> pass'),
        (23, "Rows.close", 'mode="rb", -> '),
        (23, "Rows.close", "\"rb\" -> 'xrb'"),
        (23, "Rows.close", 'text="two words" -> '),
    ]


@pytest.fixture(scope="module")
def everywhere():
    """The mutants of each room."""
    return {
        room: [mutant for file in files(room) for mutant in mutants(str(file.relative_to(run.ROOT)), file.read_text())]
        for room in ROOMS
    }


def test_mutants_have_unique_names_and_every_room_has_tests(everywhere):
    for room, found in everywhere.items():
        assert len({mutant.name for mutant in found}) == len(found) > 90
        paths = [path.removeprefix("--deselect=").partition("::")[0] for path in ROOMS[room]]
        assert all((run.ROOT / path).exists() for path in paths)


def test_nearly_all_mutants_are_valid_python(everywhere):
    found = everywhere["fedcore/sim/network/topology.py"]
    assert sum(mutant.compiles((run.ROOT / mutant.file).read_text()) for mutant in found) > 0.98 * len(found)


def test_argued_mutants_exist(everywhere):
    """A changed line invalidates its accepted survivors."""
    assert argued().keys() <= {mutant.name for found in everywhere.values() for mutant in found}


def test_the_code_of_a_changed_function_is_found_among_its_neighbours(monkeypatch, tmp_path):
    (mutant,) = (each for each in mutants("some.py", SOURCE) if each.change == "// -> /")
    code = run.code_of(mutant, SOURCE)
    assert isinstance(code, CodeType)
    namespace = {}
    exec(compile(SOURCE, "some.py", "exec"), namespace)
    half = namespace["half"]
    assert half(3) == 1
    half.__code__ = code
    assert half(3) == 1.5


@pytest.mark.parametrize(
    ("work", "status"),
    [
        (lambda: run.SURVIVED, run.SURVIVED),
        (lambda: run.KILLED, run.KILLED),
        (lambda: 1 / 0, run.KILLED),
        (lambda: signal.alarm(1) or time.sleep(60), -signal.SIGALRM),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
    ],
)
def test_the_status_of_a_child_process(tmp_path, work, status):
    assert run.forked(work, tmp_path) == status
    assert not list(tmp_path.iterdir())


def test_a_mutants_tests_call_its_function_fastest_first():
    held = {
        "a": {"seconds": 2.0, "calls": [["some.py", "half"]]},
        "b": {"seconds": 1.0, "calls": [["some.py", "half"], ["some.py", "Rows.rows"]]},
        "c": {"seconds": 3.0, "calls": [["other.py", ""]]},
    }
    found = {each.change: chosen(each, held) for each in mutants("some.py", SOURCE)}
    assert found["// -> /"] == ["b", "a"]
    assert found["row -> not (row)"] == ["b"]
    assert found["self.all.clear() -> pass"] == []
    assert found["3 -> 4"] == ["b", "a"]  # at import: all tests that use the file
    assert chosen(mutants("third.py", "N = 1")[0], held) == ["b", "a", "c"]
