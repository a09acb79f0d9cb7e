import numpy as np
import pytest

from fedcore import ClientStore, errors
from fedcore.adapters.opening import open_server

X0 = {"w": np.arange(4, dtype=np.float32)}


def test_a_job_killed_before_its_server_began_is_begun_anew(tmp_path):
    ClientStore(["a"], 4, medium="mmap", path=tmp_path / "rows").close()
    server = open_server("MIFA", X0, ["a", "b"], store=f"mmap:{tmp_path / 'rows'}", lr=0.1)
    with server.open_round() as opened:
        for client in ("a", "b"):
            opened.add(client, {"w": X0["w"] - 1}, steps=1)
    server.close()
    again = open_server("MIFA", X0, ["c"], store=f"mmap:{tmp_path / 'rows'}", lr=0.1)
    assert again.round_number == 1
    assert list(again.store.registry) == ["a", "b", "c"]
    again.close()


def test_nobody_to_serve():
    with pytest.raises(errors.RangeError, match="at least one"):
        open_server("FedAvg", X0, [], lr=0.1)
