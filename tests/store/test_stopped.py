"""A commit that an exception from outside stops can be repeated, wherever in the making of a file it was stopped."""

from contextlib import suppress

import numpy as np
import pytest

from fedcore import ClientStore
from tests.server.stopping import Stopped, each_line


@pytest.mark.parametrize("room", ["slot_file.py", "store_folder.py"])
def test_a_file_of_vectors_is_made_again(tmp_path, room):
    def stop():
        raise Stopped

    vectors = {"x": np.arange(5, dtype=np.float32)}
    at, goes_on = 1, True
    while goes_on:
        with ClientStore(3, 2, medium="mmap", path=tmp_path / str(at)) as store:
            with suppress(Stopped):
                goes_on = each_line(lambda store: store.commit(0, vectors), store, at, stop, f"files/{room}")
            store.commit(0, vectors)
            np.testing.assert_array_equal(store.vector("x"), vectors["x"])
        at += 1
    assert at > 20
