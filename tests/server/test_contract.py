"""The contract of servers in memory, in folders and in files, with each method and codec."""

from dataclasses import replace

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Server, Storage, arrays
from fedcore.server.folder import folder_problems, go_back, transactions
from fedcore.testing import ServerContract
from tests.server.invariant import contradictions
from tests.server.rounds import METHODS, algorithm_of, everything
from tests.server.test_examples import replies
from tests.server.test_examples import server_of as capped
from tests.server.test_norm_limits import N as MANY
from tests.server.test_norm_limits import honest, lying
from tests.server.test_norm_limits import server_of as limited

SHORT = {"w": (2, 130), "b": (14,)}


class TestInMemory(ServerContract):
    algorithms, shapes = {method: algorithm_of(method) for method in METHODS}, SHORT


class InFolder(ServerContract):
    codec, shapes = "f32", SHORT
    test_copies = None  # only servers in memory

    def make_plain(self, *args, **options):
        return Server(*args, storage=Storage(codec=self.codec), **options)

    def make_server(self, folder, *args, **options):
        return Server(*args, storage=Storage(folder, codec=self.codec, keep_previous=True), **options)

    def reopen(self, server, folder):
        assert contradictions(server) == []
        server.close()
        with ClientStore.open(folder, readonly=True) as rows:
            assert folder_problems(rows) == []
        return Server.load(folder)

    def undo(self, server, folder):
        to = server.transactions - 1
        server.close()
        rows = ClientStore.open(folder, keep_previous=True)
        assert go_back(rows, to)
        assert not go_back(rows, to)
        assert transactions(rows) == (to, None)
        server = Server.load(rows)
        assert contradictions(server) == []
        return server


@pytest.mark.sample(1, 2)
class TestInFolder(InFolder):
    algorithms = TestInMemory.algorithms


@pytest.mark.sample(1)
class TestInFolderAsBf16(InFolder):
    codec = "bf16"


@pytest.mark.sample(1)
class TestInFolderAsInt8(InFolder):
    codec = "int8"


@pytest.mark.sample(1)
class TestInFiles(InFolder):
    """Vectors are in files, and computed in windows."""

    @pytest.fixture(autouse=True)
    def short_vectors_are_in_files(self, monkeypatch):
        monkeypatch.setattr(arrays, "FILES_FROM", 1)

    def make_server(self, folder, *args, **options):
        return Server(*args, storage=Storage(folder, resident=1, keep_previous=True), **options)

    def reopen(self, server, folder):
        server.close()
        return Server.load(folder, storage=Storage(resident=1))


@pytest.mark.sample(1)
class TestOnDevice(ServerContract):
    algorithms, shapes, rows = TestInMemory.algorithms, {"w": (40, 50), "b": (77,)}, {}  # more than a tile, and a tail
    test_copies = None  # only servers in host memory

    @pytest.fixture(autouse=True)
    def device(self, cuda_device):
        pass

    def make_plain(self, *args, **options):
        return Server(*args, storage=Storage(codec=self.rows.get("codec")), **options)

    def make_server(self, folder, *args, **options):
        compute = replace(options.pop("compute", Compute()), device="cuda")
        return Server(*args, storage=Storage(**self.rows), compute=compute, **options)


@pytest.mark.sample(1)
class TestRowsOnDevice(TestOnDevice):
    rows = {"medium": "cuda", "codec": "int8"}


def with_liar(server, t):
    updates = honest(server, range(3), np.random.default_rng(t))
    return [updates[0], lying(server, updates[1], 12), updates[2]]


@pytest.mark.parametrize("is_in_folder", [False, True], ids=["copies", "folder"])
@pytest.mark.parametrize("method", ["FedAvg", "MimiC", "SCAFFOLDMVR"])
def test_remembered_norms(method, is_in_folder, tmp_path):
    """Also while there are fewer norms than a median needs."""
    continues(lambda **options: limited(method, **options), with_liar, MANY, is_in_folder, tmp_path)


@pytest.mark.parametrize("is_in_folder", [False, True], ids=["copies", "folder"])
def test_remembered_claims(is_in_folder, tmp_path):
    continues(capped, lambda server, t: replies(server, [3, 10**6, 4], t), MANY, is_in_folder, tmp_path)


def continues(make, updates, clients, is_in_folder, path):
    """Rounds of 2, 4 and 3, with a resume between them, are 9 rounds."""
    straight, server = make(), make(path=path / "run") if is_in_folder else make()
    for t in range(9):
        if t in (2, 6):
            if is_in_folder:
                server.close()
                server = Server.load(path / "run")
            else:
                server.save(path / f"copy {t}")
                server = Server.load(path / f"copy {t}")
        for one in (straight, server):
            one.round(updates(one, t))
    assert everything(server, range(clients)) == everything(straight, range(clients))
    server.close()
