"""The contract of stores, for each medium and codec, and what only ``ClientStore`` promises."""

import copy

import numpy as np
import pytest

from fedcore import ClientStore, errors
from fedcore.arrays import to_host
from fedcore.kernels import Codes
from fedcore.testing import StoreContract
from fedcore.testing.stores import arrays
from tests.store.conftest import CODECS, opened, store_of
from tests.store.kit import content, write

N = 131  # two whole blocks of a scale, and a piece


def read(store, client):
    return to_host(store.read(client))


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.address


@pytest.mark.sample(1)
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


def test_bytes_of_a_row_that_are_not_found_are_a_failure(tmp_path):
    class Hidden(TestEveryStore):
        kind = ("mmap", "f32")

        def with_first_row(self, path):
            return []

    for test in (Hidden().test_damage_is_found, Hidden().test_compact_erases):
        with pytest.raises(AssertionError, match="override with_first_row"):
            test(tmp_path / test.__name__)


def test_rows_are_slots_in_the_codecs_form_and_read_only(make, kind):
    store = make(2, N)
    slot = store.stage(0)
    staged = arrays(slot)
    if kind[1] == "f32":
        assert (slot.dtype, slot.shape) == (np.float32, (N,))
    else:
        assert isinstance(slot, Codes)
        assert slot.codec == kind[1]
        assert staged[0].shape == (N,)
        assert kind[1] != "int8" or (staged[1].dtype, staged[1].shape) == (np.float32, (3,))
    assert all(address(array) % 64 == 0 and is_writable(array) for array in staged)
    write(store, 0, content(N, 0))
    store.commit(0)
    rows = arrays(store.row(0))
    assert list(map(address, rows)) == list(map(address, staged))
    assert not any(map(is_writable, rows))


def is_writable(array):
    return array.flags.writeable if isinstance(array, np.ndarray) else array.writeable


def test_two_slots_serve_one_client_for_ever(make):
    store = make(["a"], N)
    places = []
    for round in range(6):
        write(store, "a", content(N, round))
        store.commit(round)
        places.append(address(arrays(store.row("a"))[0]))
    assert len(set(places)) == 2
    assert places[0] == places[2] == places[4]


def test_staging_twice_gives_the_same_slot(make):
    store = make(2, N)
    one, other = store.stage(0), store.stage(np.int64(0))
    assert list(map(address, arrays(one))) == list(map(address, arrays(other)))


@pytest.mark.parametrize("clients", [[0, 2**64 - 1, "x", ""], [np.uint64(2**64 - 1), np.int8(0), "x", np.str_("")]])
def test_ids_are_any_int_of_64_bits_or_text(make, clients):
    store = make(clients, N)
    for i, client in enumerate([0, 2**64 - 1, "x", ""]):
        write(store, client, content(N, i))
    store.commit(0)
    for i, client in enumerate([0, 2**64 - 1, "x", ""]):
        np.testing.assert_array_equal(read(store, client), content(N, i))
    for unknown in ("0", 1, -1, 2**64, 0.0, False, None, b"x"):
        with pytest.raises(errors.UnknownClientError, match=r"^client="):
            store.row(unknown)
        with pytest.raises(KeyError):
            store.stage(unknown)


def test_vectors_change_as_a_whole(make):
    store = make(2, N)
    x, total = content(200, 1), np.arange(200.0)
    store.commit(0, {"x": x, "total": total, "one": np.array(3), "none": np.zeros((0, 2), np.int8)}, {"gamma": 0.5})
    x[:] = 0  # they were copied
    np.testing.assert_array_equal(store.vector("x"), content(200, 1))
    assert store.vector("total").dtype == np.float64
    assert (store.vector("one").shape, store.vector("none").shape) == ((), (0, 2))
    assert store.state == {"gamma": 0.5}
    assert not store.vector("x").flags.writeable
    store.commit(1, {"x": store.vector("x")})
    assert store.vector("total") is None
    store.commit(2, state={})
    assert (store.vector_names(), store.state) == (("x",), {})


def test_a_view_that_is_passed_back_is_not_written_again(make):
    store = make(2, N)
    store.commit(0, {"x": content(200, 1)})
    x = store.vector("x")
    store.commit(1, {"x": x.view(), "before": x})
    assert store.vector("x").ctypes.data == store.vector("before").ctypes.data == x.ctypes.data
    store.commit(2, {"x": x[::-1], "half": x[:100], "bits": x.view(np.int32)})  # not the same vector
    np.testing.assert_array_equal(store.vector("x"), content(200, 1)[::-1])
    np.testing.assert_array_equal(store.vector("half"), content(200, 1)[:100])
    np.testing.assert_array_equal(store.vector("bits"), content(200, 1).view(np.int32))


def test_two_slots_alternate_for_a_vector_without_a_view(make):
    store, places = make(2, N), set()
    for round in range(6):
        store.commit(round, {"x": content(200, round)})
        places.add(store.vector("x").ctypes.data)
    assert len(places) == 2


def test_reading_ahead_changes_nothing(make):
    store = make(range(6), 20_000)
    for client in range(4):
        write(store, client, content(20_000, client))
    store.commit(0)
    store.prefetch(range(6))
    store.prefetch([])
    np.testing.assert_array_equal(read(store, 2), content(20_000, 2))
    if store.medium == "mmap":
        with pytest.raises(errors.UnknownClientError):
            store.prefetch([9])


@pytest.mark.parametrize("codec", CODECS)
def test_a_deep_copy_has_its_own_rows(tmp_path, codec):
    store = ClientStore(2, N, codec=codec)
    for round in range(2):
        for client in range(2):
            write(store, client, content(N, client, round))
        store.commit(round, {"x": content(9, round)})
    assert all(row is not None for row in store.rows_of([0, 1]))
    store.forget(0)
    store.add("new")
    copied = copy.deepcopy(store)
    for one in (copied, store):
        assert 0 not in one.registry
        assert "new" in one.registry
        one.rollback()
    write(copied, 0, content(N, 7))
    for round in (2, 3):
        copied.commit(round, {"x": content(9, round)})
    np.testing.assert_array_equal(store.vector("x"), content(9, 1))
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
