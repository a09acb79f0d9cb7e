"""The power goes after a write, or the disk refuses one: the acknowledged round is there, or the one under way."""

import os
import traceback
from functools import partial

import pytest

from fedcore import Server, errors
from tests.server.invariant import contradictions
from tests.store.disk.cuts import cuts
from tests.store.disk.failing import built, failing_disk
from tests.store.disk.scenario import a_round, digest, play
from tests.store.disk.test_failed_sync import died
from tests.store.disks import SIZES, mounted

LONG = pytest.mark.endurance
FEW = [("ext4", "MIFA", 45), ("xfs", "MimiC", 45), ("btrfs", "MIFA", 110)]
EVERY = [pytest.param(kind, method, 1, marks=LONG) for kind in SIZES for method in ("MIFA", "MimiC")]


class Acknowledged:
    """What a server and its copy were after each step."""

    def __init__(self, say):
        self.states, self._say = [], say

    def __call__(self, server, copy):
        self.states.append((server, copy))
        self._say(len(self.states) - 1)

    def check(self, place, last, why):
        """The folder and the copy are as after this step, or as after the next; and the server goes on."""
        servers, copies = zip(*self.states[last : last + 2], strict=True)
        with Server.load(place / "run") as server:
            assert digest(server) in servers, (why, last, server.round_number)
            assert server.store.verify() + contradictions(server) == [], why
            a_round(server)
            server.arrive("one more")
            a_round(server)
            assert contradictions(server) == [], why
            if (place / "copy").exists():
                assert digest(Server.load(place / "copy", medium="ram")) in copies, why
            else:
                assert None in copies, why
            server.save(place / "copy")
        assert sorted(entry.name for entry in place.iterdir() if entry.name != "lost+found") == ["copy", "run"], why


@pytest.mark.parametrize(("kind", "method", "stride"), [*FEW, *EVERY])
def test_the_power_goes_after_any_write(tmp_path, kind, method, stride):
    program = built(tmp_path)
    log, base, image = tmp_path / "log", tmp_path / f"base.{kind}", tmp_path / f"left.{kind}"
    with failing_disk(program, kind, tmp_path / "whole") as disk:
        disk.record(log, base)
        acknowledged = Acknowledged(lambda number: disk.tell(f"mark {number}"))
        play(disk.folder, method, acknowledged)
    checked = 0
    for cut, (last, why) in enumerate(cuts(log, base, image, stride, seed=1)):
        with mounted(image, tmp_path / f"cut{cut}") as place:
            if last >= 0:  # before, it was being made
                acknowledged.check(place, last, why)
                checked += 1
    assert checked > 100 / stride


@pytest.mark.parametrize(("kind", "method", "stride"), [("ext4", "MimiC", 97), ("xfs", "MIFA", 97), *EVERY])
def test_the_disk_refuses_any_one_write(tmp_path, kind, method, stride):
    """The server stops at the first error, is killed, and then the power goes."""
    program = built(tmp_path)
    at, refused = 1 + stride // 2, True
    expected = Acknowledged(lambda number: None)
    (tmp_path / "sound").mkdir()
    play(tmp_path / "sound", method, expected)
    while refused:
        place = tmp_path / f"disk{at}"
        said = place / "acknowledged"
        with failing_disk(program, kind, place) as disk:
            writes = disk.writes(place / "writes")
            disk.tell(f"refuse {at}")
            ended = died(partial(plays, disk.folder, method, said))
            assert ended in (0, 1), f"write {at}: ended by signal {-ended}"
            last = said.stat().st_size - 1
            refused = disk.writes(place / "writes") - writes >= at
            left = disk.dump(place / f"left.{kind}")
        if last >= 0:
            with mounted(left, place / "left") as folder:
                expected.check(folder, last, f"write {at} was refused")
        left.unlink()
        at += stride


def plays(folder, method, said):
    """0 if it came to the end, 1 if there was an error of fedcore's."""
    with open(said, "wb", buffering=0) as file:
        try:
            play(folder, method, lambda *_: file.write(b"."))
        except errors.FedcoreError:
            return 1
        except BaseException:
            traceback.print_exc()
            os._exit(98)
    return 0
