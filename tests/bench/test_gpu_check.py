"""`make gpu-check` without a GPU: its checks, failing steps, and a rehearsal."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.gpu import day
from fedcore import Server, Update

ROOT = Path(day.__file__).parents[2]


@pytest.fixture
def gpu(cuda_device):
    """The modules that need a device, with an emulated one."""
    from bench.gpu import kernel_problems, problems

    return SimpleNamespace(
        problems=problems.Problems(largest=2000, seed=7), all=kernel_problems.ALL, kinds=problems.KINDS
    )


def test_every_kernel_has_the_same_bits_on_the_device(gpu):
    for kind in gpu.kinds:
        for solve in gpu.all:
            solve(gpu.problems, kind)
    assert len(gpu.problems.done) == len(gpu.all)
    assert {*gpu.problems.done.values()} == {len(gpu.kinds)}


@pytest.mark.parametrize("way", ["torch, operation by operation", "torch foreach"])
def test_the_rivals_round_equals_mifa(way):
    torch = pytest.importorskip("torch")
    from bench.gpu.rivals import Round

    clients, n, rate, steps = 3, 50, 0.1, 5
    rng = np.random.default_rng(0)
    zeros = [torch.zeros(n) for _ in range(2 + clients)]
    theirs = Round(zeros[0], zeros[1], zeros[2:], None, 1 / (rate * steps), rate * steps, clients)
    server = Server(np.zeros(n, np.float32), "MIFA", clients, lr=rate)
    for _ in range(3):
        sent = [rng.normal(size=n).astype(np.float32) for _ in range(clients)]
        server.round([Update(client, y, steps=steps) for client, y in enumerate(sent)])
        theirs.ways([torch.from_numpy(y) for y in sent])[way]()
        np.testing.assert_allclose(theirs.x.numpy(), server.x, rtol=1e-4, atol=1e-4)


@pytest.mark.endurance
def test_a_rehearsal_of_all_steps(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "FEDCORE_CUDA_DRIVER"}
    env |= {"GPU_CHECK_REHEARSAL": "1", "OUT": str(tmp_path)}
    command = [sys.executable, "-m", "bench.gpu.day"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["well"]
    assert found["rehearsal"]
    assert len(found["steps"]["bandwidth"]["found"]["lines"]) > 25
    assert len(found["steps"]["rounds"]["found"]["lines"]) >= 5
    assert found["steps"]["clients"]["found"]["ways that are wrong"] == 0
    assert len(found["steps"]["clients"]["found"]["lines"]) == 2
    assert found["steps"]["repeats"]["found"]["different results"] == 1
    assert "no figure" in (tmp_path / "gpu-check.md").read_text()
