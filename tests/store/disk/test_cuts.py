"""The power goes, or the disk fails, at any write."""

import os
import traceback
from functools import partial

import numpy as np
import pytest

from fedcore import Server, Storage, Update, errors
from fedcore.store.files import disk as calls
from tests.server.invariant import contradictions
from tests.store.disk import scenario
from tests.store.disk.cuts import cuts
from tests.store.disk.failing import built, failing_disk
from tests.store.disks import SIZES, mounted

LONG = pytest.mark.endurance
FEW = [("ext4", "MIFA", 45), ("xfs", "MimiC", 45), ("btrfs", "MIFA", 110)]
EVERY = [pytest.param(kind, method, 1, marks=LONG) for kind in SIZES for method in ("MIFA", "MimiC")]


class Acknowledged:
    """A server and its copy after each step."""

    def __init__(self, say):
        self.states, self._say = [], say

    def __call__(self, server, copy):
        self.states.append((server, copy))
        self._say(len(self.states) - 1)

    def check(self, place, last, why):
        """The folder and the copy are as after this step, or as after the next; and the server goes on."""
        servers, copies = zip(*self.states[last : last + 2], strict=True)
        with Server.load(place / "run") as server:
            assert scenario.digest(server) in servers, (why, last, server.round_number)
            assert server.store.verify() + contradictions(server) == [], why
            scenario.a_round(server)
            server.add_clients("one more")
            scenario.a_round(server)
            assert contradictions(server) == [], why
            if (place / "copy").exists():
                assert scenario.digest(Server.load(place / "copy", storage=Storage(medium="ram"))) in copies, why
            else:
                assert None in copies, why
            server.save(place / "copy")
        assert sorted(entry.name for entry in place.iterdir() if entry.name != "lost+found") == ["copy", "run"], why


@pytest.mark.parametrize(("kind", "method", "stride"), [*FEW, *EVERY])
def test_the_power_fails_after_any_write(tmp_path, kind, method, stride):
    program = built(tmp_path)
    log, base, image = tmp_path / "log", tmp_path / f"base.{kind}", tmp_path / f"left.{kind}"
    with failing_disk(program, kind, tmp_path / "whole") as disk:
        disk.record(log, base)
        acknowledged = Acknowledged(lambda number: disk.tell(f"mark {number}"))
        scenario.play(disk.folder, method, acknowledged)
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
    scenario.play(tmp_path / "sound", method, expected)
    while refused:
        place = tmp_path / f"disk{at}"
        output = place / "acknowledged"
        with failing_disk(program, kind, place) as disk:
            writes = disk.writes(place / "writes")
            disk.tell(f"refuse {at}")
            ended = died(partial(plays, disk.folder, method, output))
            assert ended in (0, 1), f"write {at}: ended by signal {-ended}"
            last = output.stat().st_size - 1
            refused = disk.writes(place / "writes") - writes >= at
            left = disk.dump(place / f"left.{kind}")
        if last >= 0:
            with mounted(left, place / "left") as folder:
                expected.check(folder, last, f"write {at} was refused")
        left.unlink()
        at += stride


def plays(folder, method, output):
    """0 if it finished, 1 after an error of fedcore."""
    with open(output, "wb", buffering=0) as file:
        try:
            scenario.play(folder, method, lambda *_: file.write(b"."))
        except errors.FedcoreError:
            return 1
        except BaseException:
            traceback.print_exc()
            os._exit(98)
    return 0


N = 2000


def died(work):
    """Work in a process that closes nothing; the result is its exit status."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def play_rounds(server, rounds):
    for _ in range(rounds):
        server.round([Update(i, server.x + 1 + i + server.round_number, 1) for i in range(4)])
    return server.round_number


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_rounds_after_a_failed_sync_survive_a_loss_of_power(tmp_path, kind):
    program = built(tmp_path)
    with failing_disk(program, kind, tmp_path / "first") as disk:
        folder = disk.folder / "run"

        def begins():
            return play_rounds(Server(np.zeros(N, np.float32), "MIFA", 4, lr=0.1, storage=folder), 5)

        def fails():
            server, commit = Server.load(folder), calls.commit

            def failing(connection):
                disk.tell("fail 1")  # the slots are durable: only the log fails
                commit(connection)

            calls.commit = failing
            try:
                play_rounds(server, 1)
            except errors.StoreError:
                return server.round_number
            return 98

        assert died(begins) == 5
        assert died(fails) == 5
        disk.tell("fail 0")
        last = died(lambda: play_rounds(Server.load(folder), 3))
        assert last in (8, 9)  # the failed round may count, as its error says
        left = disk.dump(tmp_path / "left")
    with (
        failing_disk(program, kind, tmp_path / "second", image=left) as disk,
        Server.load(disk.folder / "run") as again,
    ):
        assert again.round_number == last
        assert again.store.verify() == []
        assert contradictions(again) == []
        play_rounds(again, 1)
