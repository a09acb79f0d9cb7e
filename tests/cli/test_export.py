"""``fedcore store export``, ``replace`` and ``remove-client``."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcore import Server, Storage, Update
from fedcore.errors import StoreError
from fedcore.model import write_model
from fedcore.server.folder import read_model
from tests.cli.command import assert_rejected, invoke
from tests.server.invariant import contradictions


def net(dtype=torch.float32):
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4, bias=False))
    made.to(dtype)
    made[2].weight = torch.nn.Parameter(made[0].weight.detach().T.contiguous())
    return made


def rounds(server, count=2):
    for _ in range(count):
        server.round([Update(i, server.x + 1 + i, 1) for i in range(2)])


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_export_beside_a_writer(tmp_path, ending, dtype):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    file = tmp_path / f"model.{ending}"
    with Server(net(dtype), "MimiC", 3, lr=0.1, storage=tmp_path / "state") as server:
        for count in (2, 1):  # the second replaces the first
            rounds(server, count)
            done = invoke("store", "export", tmp_path / "state", file)
            assert done.status == 0, done.errors
            read = safetensors.load_file(file) if ending == "safetensors" else torch.load(file, weights_only=True)
            assert_equal(read, server.tensors())
        assert "after 3 rounds, 8 tensors" in done.output
    net(dtype).load_state_dict(read)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_model_replaces_x(tmp_path, dtype):
    state, file = tmp_path / "state", tmp_path / "m.safetensors"
    with Server(net(dtype), "MimiC", 3, lr=0.1, storage=Storage(state, keep_previous=True)) as server:
        rounds(server)
        before, first = server.x, server.tensors()
    changed = {name: tensor * 2 for name, tensor in first.items()}
    write_model(changed, file)
    done = invoke("store", "replace", state, file)
    assert done.status == 0, done.errors
    assert "after round 2" in done.output
    assert_equal(read_model(state).tensors(), changed)
    assert invoke("store", "undo", state).status == 0
    assert read_model(state).x.tobytes() == before.tobytes()
    write_model({"w": np.ones(3, np.float32)}, file)
    assert_rejected(invoke("store", "replace", state, file), "model")
    torch.save({"model": first, "epoch": 3}, tmp_path / "c.pt")
    assert_rejected(invoke("store", "replace", state, tmp_path / "c.pt"), "--key model")
    assert invoke("store", "replace", state, tmp_path / "c.pt", "--key", "model").status == 0
    for file in (tmp_path / "m.pt", *([tmp_path / "m.npz"] if dtype == torch.float32 else [])):
        assert invoke("store", "export", state, file).status == 0
        done = invoke("store", "replace", state, file)
        assert done.status == 0, done.errors
        assert_equal(read_model(state).tensors(), first)


def test_npz_needs_only_numpy(tmp_path):
    server = Server({"w": np.zeros((2, 3), np.float32), "seen": np.int64(4)}, "FedAvg", 2, lr=0.1)
    rounds_ = [Update(0, {"w": np.ones((2, 3), np.float32), "seen": np.int64(5)}, 1)]
    server.round(rounds_)
    server.save(tmp_path / "state")
    assert invoke("store", "export", tmp_path / "state", tmp_path / "m.npz").status == 0
    read = np.load(tmp_path / "m.npz")
    assert {name: read[name].tolist() for name in read} == {"w": [[1, 1, 1], [1, 1, 1]], "seen": 5}
    assert read["seen"].dtype == np.int64


def test_tied_weights_are_written_under_each_name(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    tied = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    server = Server(tied, "FedAvg", 2, lr=0.1)
    rounds(server)
    write_model(server.tensors(), tmp_path / "m.safetensors")
    assert_equal(safetensors.load_file(tmp_path / "m.safetensors"), server.tensors())


def test_unknown_suffix(tmp_path):
    done = invoke("store", "export", tmp_path, tmp_path / "model.onnx")
    assert_rejected(done, "'.onnx' is unknown")
    assert "known: .npz, .pt, .pth, .safetensors" in done.errors


def test_missing_folder(tmp_path):
    with pytest.raises(StoreError, match="cannot write the model"):
        write_model({"w": np.zeros(2)}, tmp_path / "nowhere" / "m.npz")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the mask of permissions can only be set there")
def test_file_has_the_permissions_of_the_umask(tmp_path, monkeypatch):
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", None)
            write_model({"w": np.zeros(2)}, tmp_path / "m.npz")
    finally:
        os.umask(before)
    assert (tmp_path / "m.npz").stat().st_mode & 0o777 == 0o640


def test_custom_method(tmp_path):
    """Export does not need the class of the method."""
    from fedcore.algorithms import FedVARP

    class Mine(FedVARP):
        pass

    with Server(np.zeros(3, np.float32), Mine(), 2, lr=0.1, storage=tmp_path / "s") as server:
        rounds(server)
        model = read_model(tmp_path / "s")
        assert model.x.tobytes() == server.x.tobytes()
        assert model.round_number == 2


def test_folder_with_another_x_is_rejected(tmp_path):
    from fedcore import ClientStore

    Server(np.zeros(3, np.float32), "FedAvg", 2, lr=0.1).save(tmp_path / "s")
    with ClientStore.open(tmp_path / "s") as store:
        vectors = {name: store.vector(name) for name in store.vector_names()}
        store.commit(1, vectors | {"x": np.zeros(4, np.float32)}, store.state)
    done = invoke("store", "export", tmp_path / "s", tmp_path / "m.npz")
    assert done.status == 2
    assert "x: expected float32[3], got float32[4]" in done.errors
    assert not (tmp_path / "m.npz").exists()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "state"
    ids = [7, "007", "site a"]
    with Server(np.zeros(5, np.float32), "MIFA", ids, lr=0.1, storage=Storage(path=path, keep_previous=True)) as server:
        for k in range(2):
            server.round([Update(i, server.x + j + k, 1) for j, i in enumerate(ids)])
    return path


@pytest.mark.parametrize(("id", "client"), [("7", 7), ("007", "007"), ("site a", "site a")])
def test_remove_client(folder, id, client):
    done = invoke("store", "remove-client", folder, id)
    assert done.status == 0, done.errors
    assert done.output.startswith(f"{client!r} removed after round 2; 2 clients remain\n")
    with Server.load(folder) as server:
        assert client not in server.clients
        assert not contradictions(server)
    assert invoke("store", "verify", folder).status == 0
    assert invoke("store", "remove-client", folder, "unknown").status == 2
    assert "client=9: not" in invoke("store", "remove-client", folder, "9").errors


def test_an_id_that_means_two_clients_is_refused(tmp_path):
    storage = Storage(tmp_path, audit=True)
    with Server(np.zeros(5, np.float32), "MIFA", [7, "7", "8"], lr=0.1, storage=storage) as server:
        server.round([Update(i, server.x + 1, 1) for i in (7, "7")])
    assert_rejected(invoke("store", "remove-client", tmp_path, "7"), "call remove_client(7) or remove_client('7')")
    assert invoke("store", "remove-client", tmp_path, "8").output.startswith("'8' removed")
    invoke("store", "audit", tmp_path, "--export", tmp_path / "log")
    found = invoke("audit", "check", tmp_path / "log", "--client", "7").output
    assert [line.partition(": weight")[0] for line in found.splitlines()[:2]] == [
        "round 0: client 7",
        "round 0: client '7'",
    ]


def test_undo_of_a_removal(folder):
    assert invoke("store", "remove-client", folder, "7").status == 0
    assert "departure" in invoke("store", "undo", folder).output
    with Server.load(folder) as server:
        assert 7 in server.clients


def test_remove_client_needs_the_only_writer(folder):
    with Server.load(folder):
        done = invoke("store", "remove-client", folder, "7")
    assert done.status == 2
    assert "open for writing" in done.errors
