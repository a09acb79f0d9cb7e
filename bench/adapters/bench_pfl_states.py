"""Storage of pfl's user states: fedcore's against pfl's dict and pfl's files, with one load and one save per user."""

import itertools
import shutil
from contextlib import suppress

import pytest
import torch

pytest.importorskip("pfl")

from pfl.data.user_state import DiskUserStateStorage, InMemoryUserStateStorage
from pfl.exception import UserNotFoundError
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.stats import MappedVectorStatistics

from fedcore.adapters.pfl import ClientStoreUserState

USERS = 50
set_framework_module(pytorch_ops)


class Copying(InMemoryUserStateStorage):
    """pfl's dict with copies; without them users share the buffer of SCAFFOLD's option I."""

    def save_state(self, state, user_id, key=None):
        super().save_state(state.apply_elementwise(torch.clone), user_id, key)


def visits(storage, states):
    """Return a function that loads each user's state and saves a new one, as SCAFFOLD does."""
    numbers = itertools.cycle(range(len(states)))

    def run():
        for user in range(USERS):
            name = str(user)
            with suppress(UserNotFoundError):
                storage.load_state(name, "local_c")
            storage.save_state(states[next(numbers)], name, "local_c")

    return run


@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("elements", [44_426, 1_199_882])
def bench_states(versus, size, tmp_path, medium, elements):
    """Time states of LeNet's and the EMNIST network's size in ten tensors; bytes count one load and save per user."""
    elements = size(elements, 44_426)
    states = [MappedVectorStatistics({f"t{i}": torch.randn(elements // 10) for i in range(10)}) for _ in range(4)]
    ours = ClientStoreUserState(None if medium == "ram" else tmp_path / "ours")
    rivals = {"pfl's dict, copying": visits(Copying(), states)}
    if medium == "mmap":
        rivals = {"pfl's file a user": visits(DiskUserStateStorage(str(tmp_path / "theirs")), states)}
    with torch.serialization.safe_globals([MappedVectorStatistics]):  # since torch 2.6, pfl's files need this
        line = versus(
            f"{USERS} users' states of {elements:,} elements, {medium}",
            visits(ours, states),
            rivals,
            targets={"pfl's dict, copying": 0.5} if medium == "ram" else {"pfl's file a user": 2.0},
            bytes=2 * 4 * elements * USERS,
        )
    ours.close()
    rows = USERS / line.seconds["fedcore"]
    print(
        f"{rows:,.0f} users a second; on the disk {bytes_under(tmp_path / 'ours'):,} bytes, "
        f"pfl's {bytes_under(tmp_path / 'theirs'):,}"
    )
    shutil.rmtree(tmp_path)


def bytes_under(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
