"""The contract of stores, for each medium and codec, and what only ``ClientStore`` promises."""

import copy

import numpy as np
import pytest

from fedcore import ClientStore, errors
from fedcore.testing import StoreContract
from tests.store.conftest import CODECS, opened, store_of
from tests.store.kit import content, write

N = 131  # two whole blocks of a scale, and a piece


class TestEveryStore(StoreContract):
    @pytest.fixture(autouse=True)
    def set_kind(self, kind):
        self.kind = kind

    def make_store(self, folder, clients, n, **options):
        return store_of(self.kind, folder, clients, n, **options)

    def reopen(self, folder, **options):
        if self.kind[0] in ("ram", "cuda"):
            return super().reopen(folder)
        return opened(self.kind, ClientStore.open(folder, **options))


@pytest.mark.parametrize("codec", CODECS)
def test_a_deep_copy_has_its_own_rows(tmp_path, codec):
    store = ClientStore(2, N, codec=codec)
    for round in range(2):
        for client in range(2):
            write(store, client, content(N, client, round))
        store.commit(round)
    assert all(row is not None for row in store.rows_of([0, 1]))
    copied = copy.deepcopy(store)
    write(copied, 0, content(N, 7))
    copied.commit(2)
    copied.save(tmp_path / "copy")
    with ClientStore.open(tmp_path / "copy") as saved:
        for client, values in enumerate([content(N, 7), content(N, 1, 1)]):
            np.testing.assert_array_equal(saved.read(client), values)
            np.testing.assert_array_equal(copied.read(client), values)
    np.testing.assert_array_equal(store.read(0), content(N, 0, 1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(medium="disc"), errors.UnknownNameError, "medium: 'disc' is unknown"),
        (dict(codec="int4"), errors.UnknownNameError, "codec: 'int4' is unknown; did you mean 'int8'"),
        (dict(durability="always"), errors.UnknownNameError, "durability: 'always' is unknown"),
        (dict(medium="mmap"), errors.RangeError, "path: give a folder"),
        (dict(path="somewhere"), errors.RangeError, "path=.*in memory"),
    ],
)
def test_constructor_errors(options, error, message):
    with pytest.raises(error, match=message):
        ClientStore(2, 2, **options)
    with pytest.raises(errors.RangeError, match="n=0: must be an integer >= 1"):
        ClientStore(2, 0)
