"""The power goes after a write of an undoable store: the acknowledged commit is there, or the one under way, and what
was before it can be gone back to."""

import pytest

from fedcore import ClientStore
from tests.store.disk.cuts import cuts
from tests.store.disk.failing import built, failing_disk
from tests.store.disk.undo_scenario import a_round, digest, play
from tests.store.disks import SIZES, mounted

LONG = pytest.mark.endurance
FEW = [("ext4", 30), ("xfs", 60)]
EVERY = [pytest.param(kind, 1, marks=LONG) for kind in SIZES]


def check(place, states, why):
    """The folder is as after one of these steps, goes back to what was before it, and goes on."""
    with ClientStore.open(place / "run", undoable=True) as store:
        found = digest(store)
        assert store.verify() == [], why
        possible = {previous for now, previous in states if now == found}
        assert possible, (why, store.round)
        went_back = store.undo()
        assert (digest(store) if went_back else None) in possible, (why, went_back)
        assert not store.undo(), why
        before = digest(store)
        a_round(store, 99)
        assert store.verify() == [], why
        assert store.undo(), why
        assert digest(store) == before, why


@pytest.mark.parametrize(("kind", "stride"), [*FEW, *EVERY])
def test_the_power_goes_after_any_write(tmp_path, kind, stride):
    program = built(tmp_path)
    log, base, image = tmp_path / "log", tmp_path / f"base.{kind}", tmp_path / f"left.{kind}"
    states = []
    with failing_disk(program, kind, tmp_path / "whole") as disk:
        disk.record(log, base)

        def acknowledged(*state):
            states.append(state)
            disk.tell(f"mark {len(states) - 1}")

        play(disk.folder, acknowledged)
    checked = 0
    for cut, (last, why) in enumerate(cuts(log, base, image, stride, seed=1)):
        with mounted(image, tmp_path / f"cut{cut}") as place:
            if last >= 1:  # before, it was being made
                check(place, states[last : last + 2], why)
                checked += 1
    assert checked > 60 / stride
