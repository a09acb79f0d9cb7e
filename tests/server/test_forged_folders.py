"""Whatever a folder from a stranger says, loading it ends in an error that names it; nothing hangs, nothing runs."""

import shutil
from contextlib import suppress

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors
from fedcore.store import recovery
from tests.server.forgeries import FORGERIES, forge

N = 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "run"
    with Server("MimiC", np.zeros(8, np.float32), N, lr=0.1, store=f"mmap:{folder}", late_rounds=1) as server:
        for _ in range(3):
            server.round([Update(i, server.x + 1 + i, 1) for i in range(N)])
    del server  # whose views keep the files from ending behind what they hold, which copies of them would be full of
    ClientStore.open(folder).close()
    return folder


@pytest.fixture(params=FORGERIES)
def forged(request, sound, tmp_path):
    folder = tmp_path / "forged"
    shutil.copytree(sound, folder)
    forge(folder, **FORGERIES[request.param])
    return folder


@pytest.mark.parametrize("medium", ["ram", "mmap", None])
def test_a_forged_folder_is_refused(forged, medium):
    with pytest.raises(errors.CheckpointError) as refused:
        Server.load(forged, medium=medium)
    assert str(forged) in str(refused.value)


@pytest.mark.parametrize(
    "look",
    [
        lambda path: ClientStore.open(path, readonly=True).close(),
        lambda path: ClientStore.open(path, medium="ram").verify(),
        recovery.look,
    ],
    ids=["reading", "loading", "recovering"],
)
def test_who_only_looks_gets_an_error_of_fedcore_if_any(forged, look):
    """What is wrong for a server may be right for a store, whose state is the caller's own."""
    with suppress(errors.FedcoreError):
        look(forged)


def test_the_folder_that_was_forged_was_sound(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "run")
    forge(tmp_path / "run")
    with Server.load(tmp_path / "run") as server:
        assert server.round_number == 3
