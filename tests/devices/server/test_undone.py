"""A transaction of a server on a device is taken back in its folder, and the server goes on there or on the CPU."""

import pytest

from fedcore import ClientStore, Compute, Server
from fedcore.server.folder import go_back, transactions
from tests.devices.server.twins import everything, go_on, model, n_parameters
from tests.server.rounds import N, made


@pytest.mark.parametrize("there", ["cpu", "cuda:0"])
@pytest.mark.parametrize("method", ["MIFA", "MimiC, short history", "SCAFFOLD"])
def test_a_round_on_a_device_taken_back_has_never_been(method, there, cuda_device, tmp_path):
    rows = ClientStore(N, n_parameters, medium="mmap", path=tmp_path / "run", undoable=True)
    with made(method, model(), storage=rows, device="cuda") as server:
        go_on(server, 3)
        before = everything(server)
        go_on(server, 1)
        after = everything(server)
    rows = ClientStore.open(tmp_path / "run", undoable=True)
    assert transactions(rows) == (4, 3)
    assert go_back(rows, 3)
    with Server.load(rows, compute=Compute(device=there)) as server:
        assert server.device == there
        assert everything(server) == before
        go_on(server, 1)
        assert everything(server) == after
    with Server.load(tmp_path / "run") as server:
        assert (server.device, server._backend.store.undoable) == (there, True)
