"""Kills of any process at any time: all shards are then at one transaction, undamaged, and the run continues."""

import json
from pathlib import Path

import pytest

from tests.kit import python

PROGRAM = Path(__file__).with_name("killed.py")
METHODS = ["MIFA", "MimiC", "SCAFFOLD", "MIFA in groups"]


def killed(folder, method, stride):
    return json.loads(python(PROGRAM, folder, method, stride, timeout=2000).stdout)


@pytest.mark.parametrize(("method", "stride"), [("MIFA", 59), ("MIFA in groups", 151)])
def test_killed_at_some_places(folder_in_memory, method, stride):
    seen = killed(folder_in_memory, method, stride)
    assert seen["scenarios"] >= 18
    assert seen["killed"] >= 5
    assert seen["happened"] >= 2


@pytest.mark.endurance
@pytest.mark.parametrize("method", METHODS)
def test_killed_at_every_place(folder_in_memory, method):
    seen = killed(folder_in_memory, method, 1)
    print(method, seen)
    assert seen["scenarios"] > 1000
    assert seen["killed"] > 700
    assert seen["taken back"] > 100
    assert min(seen[f"shard in {what}"] for what in ("round", "arrive", "depart", "replace")) == (
        66 * (3 if "groups" in method else 1)
    )
    assert seen["copies read"] > 10
