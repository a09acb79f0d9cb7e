"""A sync of the log that failed once, a process that died, and a loss of power later: no acknowledged round is lost."""

import os
import traceback

import numpy as np
import pytest

from fedcore import Server, Update, errors
from fedcore.store.files import system_calls as calls
from tests.server.invariant import contradictions
from tests.store.disk.failing import built, failing_disk

N = 2000


def died(work):
    """Work in a process that never closes anything; what it returns is its exit status."""
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


def play(server, rounds):
    for _ in range(rounds):
        server.round([Update(i, server.x + 1 + i + server.round_number, 1) for i in range(4)])
    return server.round_number


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_rounds_after_a_failed_sync_survive_a_loss_of_power(tmp_path, kind):
    program = built(tmp_path)
    with failing_disk(program, kind, tmp_path / "first") as disk:
        folder = disk.folder / "run"

        def begins():
            return play(Server("MIFA", np.zeros(N, np.float32), 4, lr=0.1, store=f"mmap:{folder}"), 5)

        def fails():
            server, commit = Server.load(folder), calls.commit

            def failing(connection):
                disk.tell("fail 1")  # the slots are durable by now: the log alone is refused
                commit(connection)

            calls.commit = failing
            try:
                play(server, 1)
            except errors.StoreError:
                return server.round_number
            return 98

        assert died(begins) == 5
        assert died(fails) == 5
        disk.tell("fail 0")
        last = died(lambda: play(Server.load(folder), 3))
        assert last in (8, 9)  # the round that failed may count, as it was said
        left = disk.dump(tmp_path / "left")
    with (
        failing_disk(program, kind, tmp_path / "second", image=left) as disk,
        Server.load(disk.folder / "run") as again,
    ):
        assert again.round_number == last
        assert again.store.verify() == []
        assert contradictions(again) == []
        play(again, 1)
