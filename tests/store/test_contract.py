"""The contract of every store, for each medium and codec.

To run it for another implementation, override the fixture ``make``: a function of clients, n and options that returns
a store, with the methods of ``ClientStore``.
"""

import copy

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedcore import ClientStore, errors
from fedcore.kernels import Codes
from tests.store.conftest import CODECS, opened, store_of
from tests.store.kit import address, arrays, content, read, write

N = 131  # two whole blocks of a scale, and a piece


def test_a_row_never_written_is_zero_and_nothing(make):
    store = make(10**6, N)  # as fast as a small one
    assert len(store) == 0
    assert store.row(999_999) is None
    assert store.round_of(5) is None
    assert store.round is None
    np.testing.assert_array_equal(read(store, 5), np.zeros(N, np.float32))


def test_staged_rows_are_invisible_until_commit(make):
    store = make(["a", "b"], N)
    write(store, "a", content(N, 1))
    assert store.row("a") is None
    store.commit(round=7)
    np.testing.assert_array_equal(read(store, "a"), content(N, 1))
    assert (len(store), store.round_of("a"), store.round_of("b"), store.round) == (1, 7, None, 7)


def test_discard_and_unstage_leave_rows_as_they_were(make):
    store = make(["a", "b"], N)
    for client in "ab":
        write(store, client, content(N, client))
    store.commit(0)
    for client in "ab":
        write(store, client, content(N, 9))
    store.unstage("a")
    store.discard()
    store.commit(round=1)
    for client in "ab":
        np.testing.assert_array_equal(read(store, client), content(N, client))
        assert store.round_of(client) == 0


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
    assert store.vector_names() == ("x",)
    assert store.vector("total") is None
    assert store.state == {"gamma": 0.5}
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


def test_a_view_stays_as_it_is_while_it_is_held(make):
    store = make(2, N)
    store.commit(0, {"x": content(200, 0)})
    held = store.vector("x")[10:]
    for round in range(1, 6):
        store.commit(round, {"x": content(200, round)})
    np.testing.assert_array_equal(held, content(200, 0)[10:])
    places = set()
    for round in range(6, 12):  # without a view two slots alternate
        store.commit(round, {"x": content(200, round)})
        places.add(store.vector("x").ctypes.data)
    assert len(places) == 2


def test_a_rejected_commit_changes_nothing(make):
    store = make(2, N)
    write(store, 0, content(N, 0))
    store.commit(0, {"x": content(9, 0)}, {"a": 1})
    write(store, 0, content(N, 1))
    for arguments, error, message in [
        ((-1,), errors.RangeError, "round="),
        ((1.0,), errors.RangeError, "round="),
        ((1, {"x": content(9, 1), "y": np.array(["text"])}), errors.DtypeError, r"^vectors\['y'\]"),
        ((1, {"x": content(9, 1)}, {"a": object()}), errors.RangeError, "state: JSON"),
    ]:
        with pytest.raises(error, match=message):
            store.commit(*arguments)
        assert (store.round, store.state) == (0, {"a": 1})
        np.testing.assert_array_equal(read(store, 0), content(N, 0))
        np.testing.assert_array_equal(store.vector("x"), content(9, 0))
    store.commit(1)
    np.testing.assert_array_equal(read(store, 0), content(N, 1))


def test_clients_arrive_and_depart(make):
    store = make(3, N)
    for client in range(3):
        write(store, client, content(N, client))
    store.commit(0)
    store.forget(1)
    assert (len(store), len(store.registry), 1 in store.registry) == (2, 2, False)
    with pytest.raises(errors.UnknownClientError):
        read(store, 1)
    store.add("new")  # it gets the number of a removed client, but not its row
    assert store.row("new") is None
    write(store, "new", content(N, 9))
    store.commit(1)
    np.testing.assert_array_equal(read(store, "new"), content(N, 9))
    np.testing.assert_array_equal(read(store, 2), content(N, 2))
    store.add(1)
    assert store.row(1) is None
    with pytest.raises(errors.RangeError, match=r"^client=1: already"):
        store.add(1)


def test_a_client_that_leaves_takes_its_staged_row_along(make):
    store = make(2, N)
    write(store, 0, content(N, 0))
    store.forget(0)
    store.commit(0)
    assert len(store) == 0
    store.add(0)
    assert store.row(0) is None


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


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("stage"), st.integers(0, 4), st.integers(0, 99)),
        st.tuples(st.just("unstage"), st.integers(0, 4)),
        st.tuples(st.just("toggle"), st.integers(0, 4)),
        st.tuples(st.sampled_from(["commit", "discard", "checkpoint", "compact"])),
        st.tuples(st.just("vector"), st.sampled_from("xyz"), st.integers(0, 99)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("durability", ["round", "checkpoint", "none"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_it_behaves_like_a_dictionary(kind, tmp_path_factory, durability, actions):
    store = store_of(kind, tmp_path_factory.mktemp("contract") / "store", 5, N, durability=durability)
    path = store.path
    rows, staged, clients, vectors, coming, round = {}, {}, set(range(5)), {}, {}, 0
    for action, *arguments in actions:
        match action, arguments:
            case "stage", (client, key) if client in clients:
                write(store, client, content(N, key))
                staged[client] = key
            case "unstage", (client,) if client in clients:
                store.unstage(client)
                staged.pop(client, None)
            case "toggle", (client,):
                (store.forget if client in clients else store.add)(client)
                clients ^= {client}
                rows.pop(client, None)
                staged.pop(client, None)
            case "vector", (name, key):
                coming[name] = content(70, key)
            case "commit", ():
                store.commit(round, vectors | coming)
                rows |= {client: (key, round) for client, key in staged.items()}
                vectors, staged, coming, round = vectors | coming, {}, {}, round + 1
            case "discard", ():
                store.discard()
                staged.clear()
            case "checkpoint", ():
                store.checkpoint()
            case "compact", () if not staged:
                store.compact()
        assert set(store.registry) == clients
        assert len(store) == len(rows)
    if path is not None:
        store.discard()
        store.commit(round)
        store.close()
        store = opened(kind, ClientStore.open(path))
    for client in clients:
        key, written = rows.get(client, (None, None))
        expected = np.zeros(N, np.float32) if key is None else content(N, key)
        np.testing.assert_array_equal(read(store, client), expected)
        assert store.round_of(client) == written
    assert set(store.vector_names()) == set(vectors)
    for name in vectors:
        np.testing.assert_array_equal(store.vector(name), vectors[name])
    store.close()


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
