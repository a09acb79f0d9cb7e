import numpy as np
import pytest

from fedcore import ClientStore, errors
from fedcore.store import History


def write(store, round, **rows):
    for client, values in rows.items():
        store.stage(client)[:] = values
    store.commit(round)


def test_a_row_never_written_is_zero_and_nothing():
    store = ClientStore(10**6, 4)  # as quick as a small one
    assert len(store) == 0
    assert store.row(999_999) is None
    assert store.round_of(5) is None
    np.testing.assert_array_equal(store.read(5), np.zeros(4, np.float32))


def test_staged_rows_are_seen_by_nobody_until_commit():
    store = ClientStore(["a", "b"], 2)
    store.stage("a")[:] = [1, 2]
    assert store.row("a") is None
    store.commit(round=7)
    np.testing.assert_array_equal(store.row("a"), [1, 2])
    assert (len(store), store.round_of("a"), store.round_of("b")) == (1, 7, None)


def test_discard_and_unstage_leave_rows_as_they_were():
    store = ClientStore(["a", "b"], 2)
    write(store, 0, a=[1, 2], b=[3, 4])
    store.stage("a")[:] = 9
    store.stage("b")[:] = 9
    store.unstage("a")
    store.discard()
    store.commit(round=1)
    np.testing.assert_array_equal(store.read("a"), [1, 2])
    np.testing.assert_array_equal(store.read("b"), [3, 4])
    assert store.round_of("a") == 0


def test_slots_are_used_again():
    store = ClientStore(["a"], 2)
    write(store, 0, a=[1, 2])
    first = store.row("a")
    write(store, 1, a=[3, 4])
    write(store, 2, a=[5, 6])
    assert store.row("a") is first  # two slots in turn, for ever


def test_staging_twice_gives_the_same_slot():
    store = ClientStore(2, 2)
    assert store.stage(0) is store.stage(np.int64(0))


@pytest.mark.parametrize("clients", [[0, 2**64 - 1, "x", ""], [np.uint64(2**64 - 1), np.int8(0), "x", np.str_("")]])
def test_ids_are_any_int_of_64_bits_or_text(clients):
    store = ClientStore(clients, 1)
    for i, client in enumerate([0, 2**64 - 1, "x", ""]):
        store.stage(client)[:] = i
    store.commit(0)
    assert [store.read(client)[0] for client in [0, 2**64 - 1, "x", ""]] == [0, 1, 2, 3]
    for unknown in ("0", 1, -1, 2**64, 0.0, False, None, b"x"):
        with pytest.raises(errors.UnknownClientError, match="client: expected"):
            store.row(unknown)
        with pytest.raises(KeyError):
            store.stage(unknown)


def test_what_a_store_cannot_be():
    with pytest.raises(errors.UnknownNameError, match="medium: 'disc' is unknown"):
        ClientStore(2, 2, medium="disc")
    with pytest.raises(errors.RangeError, match="n: expected a row of at least 1 element, got 0"):
        ClientStore(2, 0)


def test_history_keeps_a_direction_while_a_row_refers_to_it():
    history, v = History(), np.ones(2, np.float32)
    history.keep(3, v, references=2)
    history.release(3)
    assert history[3] is v
    history.release(3)
    assert len(history) == 0
    with pytest.raises(KeyError):
        history[3]
