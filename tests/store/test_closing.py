"""A close that fails keeps what only this process has, and nothing else."""

import numpy as np
import pytest

from fedcore import ClientStore, errors
from fedcore.store.files import system_calls as disk
from tests.store.contents import content, write
from tests.store.test_disk_full import full

N = 40


@pytest.fixture
def written(tmp_path):
    """Stores of that durability, three clients and one commit, each in a folder of its own."""

    def store(durability):
        made = ClientStore(3, N, medium="mmap", path=tmp_path / durability, durability=durability)
        for client in range(3):
            write(made, client, content(N, client))
        made.commit(0, {"x": content(100, 0)})
        return made

    return store


def assert_close_fails(store, monkeypatch, name, said):
    """One call into the system of that name finds a full disk."""

    def failing(*_):
        raise full(name)

    with monkeypatch.context() as patched, pytest.raises(errors.StoreError, match=said):
        patched.setattr(disk, name, failing)
        store.close()


def test_a_store_whose_files_cannot_shrink_is_closed_all_the_same(written, monkeypatch):
    store = written("round")
    assert_close_fails(store, monkeypatch, "resize", "shrinking failed")
    with ClientStore.open(store.path) as again:  # which its lock would refuse, while somebody has the first one
        assert (again.round, again.verify()) == (0, [])
    store.close()  # a second time does nothing


def test_a_store_that_cannot_make_its_commits_safe_can_be_closed_once_there_is_room(written, monkeypatch):
    store = written("checkpoint")
    assert_close_fails(store, monkeypatch, "commit", "the disk is full")
    np.testing.assert_array_equal(store.read(1), content(N, 1))
    store.close()
    with ClientStore.open(store.path) as again:
        assert again.round == 0
        np.testing.assert_array_equal(again.read(1), content(N, 1))
