"""Giving back what is free."""

import os

import numpy as np
import pytest

from fedcore import ClientStore
from fedcore.store.files import system_calls as disk
from tests.store.contents import content, write

N = 3_000_000  # five rows of a chunk each


@pytest.mark.parametrize("punches", [True, False])
def test_a_file_is_never_shorter_than_what_is_mapped(tmp_path, monkeypatch, punches):
    """Where the system can give back a range of a file without shortening it: another thread may read behind it."""
    with ClientStore(12, N, medium="mmap", path=tmp_path / "store", durability="none") as store:
        for client in range(12):
            write(store, client, content(N, client))
        store.commit(0)
        before = os.stat(tmp_path / "store" / "rows.slots")
        for client in range(3, 12):
            store.forget(client)
        store.commit(1)
        sizes, resize = [], disk.resize
        monkeypatch.setattr(disk, "resize", lambda fd, size: (sizes.append(size), resize(fd, size)))
        if not punches:
            monkeypatch.setattr(disk, "free", lambda *_: False)
        store.compact()
        file = store._content.rows.slots
        mapped = file._end(len(file._maps) * file._per_chunk)
        assert len(file._maps) == 1
        assert min(sizes) == (mapped if punches else file._end(3))
        after = os.stat(tmp_path / "store" / "rows.slots")
        assert after.st_blocks < before.st_blocks / 3
        assert after.st_size == mapped
        for client in range(3):
            np.testing.assert_array_equal(store.read(client), content(N, client))
        write(store, 2, content(N, 5))
        store.commit(2)
        assert store.verify() == []
