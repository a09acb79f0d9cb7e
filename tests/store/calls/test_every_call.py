"""Every call into the system that a server makes fails once, with each error; memory and folder never part."""

import json

import pytest

from tests.kit import python
from tests.store.calls.failing import ERRORS, built

LONG = pytest.mark.endurance
CASES = [("MIFA", "mmap", "EIO", 29), ("MimiC", "mmap", "ENOSPC", 61), ("MimiC", "ram", "EIO", 41)]
CASES += [("SCAFFOLD", "mmap", "EMFILE", 79)]
CASES += [
    pytest.param(method, medium, error, 1, marks=LONG)
    for method in ("MIFA", "MimiC", "SCAFFOLD")
    for medium in ("mmap", "ram")
    for error in ERRORS
]


@pytest.mark.parametrize(("method", "medium", "error", "stride"), CASES)
def test_every_call_fails_once(tmp_path, method, medium, error, stride):
    output = run("every_call", tmp_path, method, medium, error, str(stride))
    assert output["wrong"] == []
    tried = output["tried"]
    assert sum(tried.values()) * stride > (400 if medium == "ram" else 1500)
    assert tried["save"] > 0
    assert (tried["a_round"] > 0) == (medium == "mmap")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("stride", [41, pytest.param(1, marks=LONG)])
def test_every_call_of_an_undo_history_fails_once(tmp_path, error, stride):
    tried = run("undo_calls", tmp_path, error, str(stride))
    assert min(tried.values()) * stride > 10


def run(program, tmp_path, *arguments):
    """The output of a program in its own process, with the library preloaded."""
    library = built(tmp_path)
    (tmp_path / "folder").mkdir()
    named = f"tests.store.calls.{program}"
    return json.loads(
        python("-m", named, tmp_path / "folder", *arguments, timeout=None, LD_PRELOAD=f"{library}").stdout
    )
