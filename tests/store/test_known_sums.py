"""A commit takes the checksums that the exchange made, and never those of what a row held before."""

import numpy as np
import pytest

import fedcore
from fedcore import ClientStore, memory
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


def note(store, client, values):
    store.summed([client], np.array([checksums(values, BLOCK)]))


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
        assert store.sums_of(2) is None


@pytest.mark.parametrize("codec", ["f32", "int8"])
@pytest.mark.parametrize("apart", [False, True], ids=["vectors", "tensors"])
@pytest.mark.parametrize("method", ["MIFA", "MimiC", "SCAFFOLD", "SCAFFOLDM"])
def test_every_row_of_rounds_is_sealed_as_it_lies(tmp_path, method, apart, codec):
    """Some replies are left out by the judge, so that the others are folded twice."""
    sizes, rng = (30_000, N - 30_000), np.random.default_rng(0)
    with ClientStore(8, N, medium="mmap", codec=codec, path=tmp_path / "store") as store:
        tensors = {"a": np.zeros(sizes[0], np.float32), "b": np.zeros(sizes[1], np.float32)}
        x = tensors if apart else memory.zeros(N)
        server = fedcore.Server(method, x, store=store, lr=0.1)
        for _ in range(3):
            with server.open_round() as round:
                for client in range(8):
                    y = rng.normal(size=N).astype(np.float32)
                    y[7] = np.nan if client == 5 else y[7]
                    sent = dict(zip(tensors, np.split(y, sizes[:1]), strict=True)) if apart else y
                    round.add(client, sent, steps=3)
            assert [client for client, _ in round.report.refused] == [5]
            assert store.verify() == []
            assert len(store) == 7
