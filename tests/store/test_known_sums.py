"""A commit takes the checksums that the exchange made, and never those of what a row held before."""

import numpy as np
import pytest

from fedcore import ClientStore, errors, kernels
from fedcore.store import checksums
from tests.store.contents import content, write

N = 40_001  # two whole blocks under a checksum, and a piece
BLOCK = 65_536


@pytest.fixture
def store(tmp_path):
    with ClientStore(["a", "b"], N, medium="mmap", path=tmp_path / "store") as store:
        yield store


def reopened(store):
    """The damage in the store's folder, and the rows that have none, as another process finds them."""
    store.close()
    with ClientStore.open(store.path, readonly=True) as other:
        problems = other.verify()
        return problems, {} if problems else {client: other.read(client) for client in other.registry}


def assert_sound(store, **keys):
    """No row is damaged, and those of some clients have the contents of these keys."""
    problems, rows = reopened(store)
    assert problems == []
    for client, key in keys.items():
        np.testing.assert_array_equal(rows[client], content(N, key))


def note(store, client, values):
    store.note_checksums([client], np.array([checksums(values, BLOCK)]))


def test_a_commit_reads_no_row_whose_checksums_are_known(store):
    write(store, "a", content(N, 1))
    note(store, "a", content(N, 2))  # of something else, which only a reader finds out
    store.commit(round=0)
    problems, _ = reopened(store)
    assert len(problems) == 1
    assert "client 'a'" in problems[0]


def test_known_checksums_are_what_a_commit_would_find(store):
    for client, key in (("a", 1), ("b", 2)):
        write(store, client, content(N, key))
    note(store, "b", content(N, 2))
    store.commit(round=0)
    problems, rows = reopened(store)
    assert problems == []
    np.testing.assert_array_equal(rows["b"], content(N, 2))


@pytest.mark.parametrize("forget", ["stage", "unstage", "discard", "rollback", "commit"])
def test_who_stages_a_row_anew_is_believed_nothing_of_before(store, forget):
    write(store, "a", content(N, 1))
    note(store, "a", content(N, 1))
    if forget == "unstage":
        store.unstage("a")
    elif forget == "commit":
        store.commit(round=0)
    elif forget != "stage":
        getattr(store, forget)()
    write(store, "a", content(N, 2))
    store.commit(round=1)
    problems, rows = reopened(store)
    assert problems == []
    np.testing.assert_array_equal(rows["a"], content(N, 2))


def test_checksums_of_a_row_that_is_staged_no_more_are_of_nothing(store):
    write(store, "a", content(N, 1))
    store.unstage("a")
    note(store, "a", content(N, 1))
    write(store, "a", content(N, 2))
    store.commit(round=0)
    assert reopened(store)[0] == []


@pytest.mark.parametrize(("medium", "codec"), [("ram", "f32"), ("mmap", "bf16"), ("mmap", "int8")])
def test_nobody_sums_rows_that_are_sealed_otherwise(tmp_path, medium, codec):
    path = tmp_path / "store" if medium == "mmap" else None
    with ClientStore(2, N, medium=medium, codec=codec, path=path) as store:
        assert store.room_for_checksums(2) is None


def test_a_row_that_is_written_anew_after_a_commit_that_failed_is_summed_anew(store):
    for client, key in (("a", 1), ("b", 2)):
        write(store, client, content(N, key))
        note(store, client, content(N, key))
    with pytest.raises(errors.DtypeError):
        store.commit(round=0, vectors={"v": np.array(["no number"])})
    write(store, "b", content(N, 3))
    store.commit(round=0)
    assert_sound(store, a=1, b=3)


def test_a_slot_and_a_number_that_somebody_else_gets_bring_no_checksums_along(store):
    write(store, "a", content(N, 1))
    note(store, "a", content(N, 1))
    store.unstage("a")
    write(store, "b", content(N, 2))  # into the slot that "a" had
    store.commit(round=0)
    write(store, "a", content(N, 3))
    note(store, "a", content(N, 3))
    store.forget("a")
    store.commit(round=1)
    store.add("c")  # with the number that "a" had
    write(store, "c", content(N, 4))
    store.commit(round=2)
    assert_sound(store, b=2, c=4)


def test_noted_checksums_are_a_copy(store):
    write(store, "a", content(N, 1))
    sums = np.array([checksums(content(N, 1), BLOCK)])
    store.note_checksums(["a"], sums)
    sums[:] = 0
    store.commit(round=0)
    assert reopened(store)[0] == []


@pytest.mark.parametrize(
    ("sums", "got"),
    [
        (np.zeros((1, 2), np.uint64), r"uint64\[1, 2\]"),
        (np.zeros((2, 3), np.uint64), r"uint64\[2, 3\]"),
        (np.zeros(3, np.uint64), r"uint64\[3\]"),
        (np.zeros((1, 3), np.int64), r"int64\[1, 3\]"),
    ],
)
def test_checksums_of_another_shape_are_refused(store, sums, got):
    write(store, "a", content(N, 1))
    with pytest.raises(errors.ShapeError, match=rf"checksums: expected uint64\[1, 3\], got {got}"):
        store.note_checksums(["a"], sums)
    store.commit(round=0)
    assert reopened(store)[0] == []


def test_nothing_is_noted_where_one_client_is_unknown(store):
    write(store, "a", content(N, 1))
    wrong = np.zeros((2, 3), np.uint64)
    with pytest.raises(errors.UnknownClientError):
        store.note_checksums(["a", "nobody"], wrong)
    store.commit(round=0)
    assert reopened(store)[0] == []


@pytest.mark.parametrize("n", [1, 15, 16, 17, 16_383, 16_384, 16_385, 32_768])
def test_an_exchange_gives_what_a_commit_would_find_at_each_end_of_a_block(tmp_path, n):
    """Twice into one slot, of which the second counts; the first is of other numbers."""
    rng, ones = np.random.default_rng(n), np.ones(2)
    with ClientStore(2, n, medium="mmap", path=tmp_path / "store") as store:
        for round in range(3):
            ys = rng.normal(size=(2, 2, n)).astype(np.float32)
            for some in ys:
                old, new, sums = store.rows_of([0, 1]), store.stage_all([0, 1]), store.room_for_checksums(2)
                total = np.zeros(n)
                kernels.exchange(total, [None] * 2, list(some), ones, ones, old, [None] * 2, new, out=total, sums=sums)
                store.note_checksums([0, 1], sums)
            store.commit(round)
        problems, rows = reopened(store)
        assert problems == []
        np.testing.assert_array_equal(list(rows.values()), -ys[1])
