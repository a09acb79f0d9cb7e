"""A folder whose total is not the sum of its rows is detected, and no other is."""

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Server, Update, errors
from fedcore.algorithms import named
from fedcore.algorithms.memory import MIFA
from fedcore.kernels import ExactSum
from fedcore.server.folder import checkpoint_errors, exact_total_problems, folder_problems, server_state

N, n = 5, 8


class Halved(MIFA):
    """A custom method, whose T may be any sum."""


def folder_of(path, method, accumulator="float32", spoil=lambda snapshot: snapshot):
    """The problems of a folder after rounds, with one client without a row."""
    algorithm = method if isinstance(method, MIFA) else named(method)
    server = Server(np.zeros(n, np.float32), algorithm, N, lr=0.1, compute=Compute(accumulator=accumulator))
    for t in range(3):
        server.round([Update(i, server.x + np.float32(1 + i + t), 1) for i in range(N - 1) if i != t])
    server._backend.snapshot = spoil(server._backend.snapshot)
    server.save(path)
    with ClientStore.open(path, readonly=True) as rows:
        assert rows.verify() == []
        return folder_problems(rows)


def longer(by):
    def spoil(now):
        total = now.total.copy()
        total[3] += by
        return now._replace(total=total)

    return spoil


def by_one_unit(word):
    def spoil(now):
        words = now.exact_total._asdict()
        words[word] = words[word].copy()
        words[word][3] += 1
        return now._replace(exact_total=ExactSum(**words))

    return spoil


METHODS = ["MIFA", "MimiC", "SCAFFOLD", "FedVARP"]


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_float_total_is_detected(method, tmp_path):
    assert folder_of(tmp_path / "sound", method) == []
    assert folder_of(tmp_path / "nearly", method, spoil=longer(1e-5)) == []  # as rounding may make it
    for name, by in (("more", 0.01), ("less", -0.01)):
        [line] = folder_of(tmp_path / name, method, spoil=longer(by))
        assert line.startswith(f"{tmp_path / name}: T: expected the sum of all rows, ")
        assert " in element 3, got " in line


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_bit_of_an_exact_total_is_detected(method, tmp_path):
    assert folder_of(tmp_path / "sound", method, "exact") == []
    [line] = folder_of(tmp_path / "low", method, "exact", by_one_unit("low"))
    assert line.startswith(f"{tmp_path / 'low'}: T: expected the words (")
    assert " in element 3, the sum of all rows, got (" in line
    [line] = folder_of(tmp_path / "high", method, "exact", by_one_unit("high"))  # so far off that floats tell too
    assert line.startswith(f"{tmp_path / 'high'}: T: expected the ")


def test_rows_too_long_for_an_exact_sum_are_detected():
    with ClientStore(3, n) as rows:
        for client, length in ((0, 1.0), (1, 2.0**60), (2, 1.0)):
            rows.stage(client)[:] = length
        rows.commit(0)
        [problem] = exact_total_problems(rows, ExactSum.zeros(n), None)
        assert problem.startswith("T: ")
        assert "range" in problem


def test_custom_methods_and_methods_without_rows_are_not_checked(tmp_path):
    assert folder_of(tmp_path / "own", Halved(wait=False), spoil=longer(1)) == []
    assert folder_of(tmp_path / "none", "FedAvg") == []


@pytest.mark.parametrize("state", [None, {}, {"what": "something else"}])
def test_a_store_without_a_server_is_not_checked(state, tmp_path):
    with ClientStore(N, n, medium="mmap", path=tmp_path / "rows") as rows:
        rows.commit(0, {}, state)
        assert folder_problems(rows) == []
    with pytest.raises(errors.CheckpointError, match="ClientStore") as rejected:
        Server.load(tmp_path / "rows")
    assert ("load it again" in str(rejected.value)) == (state is None)


def test_a_shard_is_not_a_whole_server():
    whole = {"what": "a fedcore server", "medium": "ram"}
    shard = whole | {"place": [0, 2]}
    for state, asked in ((whole, False), (whole, None), (shard, True), (shard, None)):
        assert server_state("run", state, shard=asked) is state
    with pytest.raises(errors.CheckpointError, match=r"^run\b"):
        server_state("run", shard)
    with pytest.raises(errors.CheckpointError, match=r"^run\b"):
        server_state("run", whole, shard=True)


@pytest.mark.parametrize(("said", "due"), [("9 bytes too many", "9 bytes too many"), ("", "no details")])
def test_a_server_too_large_for_memory_is_an_error_of_its_folder(said, due):
    expected = rf"^run\b.*memory.*{due}$"
    with pytest.raises(errors.CheckpointError, match=expected), checkpoint_errors("run"):
        raise MemoryError(said)
