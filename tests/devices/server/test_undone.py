"""Undo of a transaction of a server on a device, which then continues there or on the CPU."""

import pytest

from fedcore import ClientStore, Compute, Server
from fedcore.server.folder import go_back, transactions
from tests.devices.server.kit import everything, model, n_parameters, run_rounds
from tests.server.rounds import N, made


@pytest.mark.parametrize("there", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    ("method", "accumulator"), [("MIFA", "exact"), ("MimiC, short history", "float32"), ("SCAFFOLD", "float32")]
)
def test_a_round_on_a_device_is_undone(method, accumulator, there, cuda_device, tmp_path):
    rows = ClientStore(N, n_parameters, medium="mmap", path=tmp_path / "run", keep_previous=True)
    with made(method, model(), storage=rows, device="cuda", accumulator=accumulator) as server:
        run_rounds(server, 3)
        before = everything(server)
        run_rounds(server, 1)
        after = everything(server)
    rows = ClientStore.open(tmp_path / "run", keep_previous=True)
    assert transactions(rows) == (4, 3)
    assert go_back(rows, 3)
    with Server.load(rows, compute=Compute(device=there)) as server:
        assert server.device == there
        assert everything(server) == before
        run_rounds(server, 1)
        assert everything(server) == after
    with Server.load(tmp_path / "run") as server:
        assert (server.device, server._backend.store.keep_previous) == (there, True)
