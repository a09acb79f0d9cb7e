"""Runs that are saved, loaded, killed and resumed on the CPU and on a device, with the same bits."""

import subprocess
import sys

import pytest

from fedcore import Compute, Server, Storage
from fedcore.errors import RangeError
from tests.devices import fake_driver
from tests.devices.server.kit import everything, run_rounds, server

PLACES = {"cpu": ["ram", "mmap"], "cuda": ["ram", "mmap", "cuda"]}
METHODS = [("MimiC, short history", "float32"), ("SCAFFOLDMVR", "exact")]


def straight(method, codec, rounds, **options):
    s = server(method, "ram", codec, "cpu", **options)
    run_rounds(s, rounds)
    return everything(s)


@pytest.mark.parametrize(("method", "accumulator"), METHODS)
@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda:1")])
@pytest.mark.parametrize("codec", ["f32", "int8"])
@pytest.mark.sample(1)
def test_a_run_moves_between_devices(cuda_device, tmp_path, method, accumulator, first, second, codec):
    due = straight(method, codec, 5, accumulator=accumulator)
    for i, medium in enumerate(PLACES[first]):
        with server(method, medium, codec, first, tmp_path / f"rows{i}", accumulator=accumulator) as s:
            run_rounds(s, 2)
            s.save(tmp_path / f"saved{i}")
        for onward in PLACES[second[:4]] if i == 0 else [None]:
            copy = tmp_path / f"saved{i}"
            with Server.load(
                copy, storage=Storage(medium="ram" if onward == "mmap" else onward), compute=Compute(device=second)
            ) as s:
                run_rounds(s, 3)
                assert everything(s) == due
    with Server.load(tmp_path / "rows1", compute=Compute(device=second)) as s:  # goes on in the folder itself
        run_rounds(s, 1)
    with Server.load(tmp_path / "rows1", compute=Compute(device="cpu")) as s:
        run_rounds(s, 1)
    with Server.load(tmp_path / "rows1", compute=Compute(device=second)) as s:
        run_rounds(s, 1)
        assert everything(s) == due


def test_a_run_continues_on_its_device_by_default(cuda_device, tmp_path):
    s = server("MIFA", "cuda", "f32", "cuda")
    run_rounds(s, 1)
    s.save(tmp_path / "saved")
    loaded = Server.load(tmp_path / "saved")
    assert (loaded.device, loaded.store.medium) == ("cuda:0", "cuda")
    loaded = Server.load(tmp_path / "saved", compute=Compute(device="cpu"))
    assert (loaded.device, loaded.store.medium) == ("cpu", "ram")
    with pytest.raises(RangeError, match="medium"):
        Server.load(tmp_path / "saved", storage=Storage(medium="cuda"), compute=Compute(device="cpu"))


KILLED = """
import os, sys
from fedcore import Compute, Server
from tests.devices.server.kit import run_rounds, replies
from fedcore.store.files import index
server = Server.load(sys.argv[1], compute=Compute(device="cuda"))
run_rounds(server, 1)
if sys.argv[2] == "in the round":
    opened = server.open_round()
    for update in replies(server):
        opened.add_batch([update])
elif sys.argv[2] == "in the commit":  # the rows are back, and the index does not name them yet
    server._backend.store._folder.publish = lambda *_: os.kill(os.getpid(), 9)
    run_rounds(server, 1)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("when", ["between rounds", "in the round", "in the commit"])
def test_a_process_that_is_killed_leaves_the_last_round(cuda_device, tmp_path, when):
    with server("MimiC", "mmap", "bf16", "cuda", tmp_path / "rows") as s:
        run_rounds(s, 2)
    command = [sys.executable, "-c", KILLED, tmp_path / "rows", when]
    assert subprocess.run(command, env=fake_driver.environment(PYTHONPATH=".")).returncode == -9
    for device in ("cpu", "cuda"):
        with Server.load(tmp_path / "rows", storage=Storage(medium="ram"), compute=Compute(device=device)) as s:
            assert everything(s) == straight("MimiC", "bf16", 3)
    with Server.load(tmp_path / "rows", compute=Compute(device="cuda")) as s:
        run_rounds(s, 1)
        assert everything(s) == straight("MimiC", "bf16", 4)
