"""Each framework's real processes, once with its own aggregation and once with fedcore's: the last models are equal.

It takes minutes and only runs with ``pytest -m deployment tests/conformance``. pfl has no processes: its simulation
with either sum is in ``tests/adapters/pfl``.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.adapters.wire.deployment import BIN, LOOPBACK, ROOT, free_port
from tests.conformance.clients import SIZES, STEPS, averaged
from tests.conformance.processes import KEEP
from tests.conformance.rows import EPSILON, numpy_of
from tests.conformance.table import START, declared

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def run(name, side, folder, processes):
    """Start a run's processes, wait for their end, and read the last model."""
    folder.mkdir()
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"HOME": str(folder), "NVFLARE_POC_WORKSPACE": str(folder / "poc")}
    # One process starts the others, with only loopback, where NVFlare's ports are free too.
    words = [*(LOOPBACK if processes == 1 else []), sys.executable, "-c", START, "tests.conformance.processes"]
    words += [name, side, folder, free_port()]
    started = []
    try:
        for number in range(processes):
            with (folder / f"log{number}").open("w") as log:
                how = {"env": env, "cwd": ROOT, "stdout": log, "stderr": log, "start_new_session": True}
                started.append(subprocess.Popen([*map(str, words), str(number)], **how))
        codes = [process.wait(timeout=400) for process in started]
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert not any(codes), (codes, (folder / "log0").read_text()[-3000:])
    return {name: numpy_of(tensor) for name, tensor in torch.load(folder / KEEP).items()}


@pytest.mark.deployment
@pytest.mark.parametrize(
    ("name", "strategy", "processes", "dtype", "weights"),
    [
        ("flower", "", 1, F32, SIZES),
        ("flower", ":FedAdam", 1, F32, None),
        ("nvflare", "", 1, BF16, STEPS),
        ("appfl", "", 3, F32, SIZES),
        ("fedlab", "", 3, F32, (1, 1)),
    ],
)
def test_the_last_models_are_equal(name, strategy, processes, dtype, weights, tmp_path):
    """And for FedAvg they are those of its definition with the clients' weights."""
    pytest.importorskip(declared(name)["package"], reason="`make test-appfl` runs it" if name == "appfl" else None)
    theirs, ours = (run(name, side + strategy, tmp_path / side, processes) for side in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    bound = 4 * EPSILON.get(str(dtype), 2.0**-23)
    for each in theirs:
        assert theirs[each].dtype == ours[each].dtype == dtype
        first, second = (model[each].astype(np.float64) for model in (theirs, ours))
        print(f"{each}: largest difference {np.abs(first - second).max():.2g}")
        np.testing.assert_allclose(first, second, rtol=bound, atol=bound)
        if weights:
            np.testing.assert_allclose(second, averaged(weights)[each], rtol=max(bound, 1e-5), atol=max(bound, 1e-5))
