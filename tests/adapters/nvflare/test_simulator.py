"""The example under NVFlare's real simulator: its server killed in the middle, and a second job that resumes.

About two minutes a method: NVFlare starts a process for each of four sites, twice.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedcore import ClientStore, Server, Storage
from fedcore.errors import FedcoreError
from fedcore.sampling import without_replacement
from fedcore.sim.data import divide, load
from fedcore.sim.in_process import InProcess
from fedcore.sim.nets import build
from tests.adapters.wire.deployment import BIN, LOOPBACK, ROOT
from tests.kit import one_by_one

JOB = Path(__file__).parents[3] / "examples" / "nvflare_job.py"
SITES, ROUNDS = 4, 6


def start(method, folder, *accumulate):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(JOB), method, str(ROUNDS), str(folder), *accumulate]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def finished_rounds(rows):
    try:
        with ClientStore.open(rows, readonly=True) as store:
            return store.state["numbers"]["round_number"] if store.state else 0
    except FedcoreError:  # not there yet
        return 0


def kill(process):
    """``kill -9`` for the job and every process that it started, the server among them."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        os.kill(member.pid, signal.SIGKILL)
    psutil.wait_procs(family, timeout=30)
    process.wait()


def killed_and_resumed(method, folder, *accumulate):
    """Kill a job after two rounds, and run its successor to the end."""
    job = start(method, folder, *accumulate)
    try:
        while finished_rounds(folder / "rows") < 2:
            assert job.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(0.1)
    finally:
        kill(job)
    before = finished_rounds(folder / "rows")
    assert 2 <= before < ROUNDS, "killed too late to show anything"
    assert start(method, folder, *accumulate).wait(timeout=500) == 0
    assert f"{method} starts at round {before} of {ROUNDS}" in (folder / "log").read_text()


@pytest.mark.deployment
@pytest.mark.parametrize("method", ["MIFA", "SCAFFOLD"])
def test_exact_sums_have_the_bits_of_an_unbroken_run(tmp_path, method):
    """Sites answer in any order; one of the runs is killed and resumed."""
    killed_and_resumed(method, tmp_path / "killed", "exact")
    assert start(method, tmp_path / "unbroken", "exact").wait(timeout=500) == 0
    one, other = (
        Server.load(tmp_path / name / "rows", storage=Storage(medium="ram")) for name in ("killed", "unbroken")
    )
    assert one.round_number == other.round_number == ROUNDS
    assert one.x.tobytes() == other.x.tobytes()
    for site in one.clients:
        assert one.store.read(site).tobytes() == other.store.read(site).tobytes()


@pytest.mark.deployment
@pytest.mark.parametrize("method", ["MimiC", "SCAFFOLD"])
def test_a_killed_job_s_successor_ends_where_an_unbroken_run_does(tmp_path, method):
    killed_and_resumed(method, tmp_path)
    digits = load("digits")
    parts = divide(digits, "label-k", SITES, seed=0, classes_per_client=4)
    simulated = InProcess(build("mlp", seed=0), digits, parts, batch=32, epochs=1, seed=0)
    straight = Server(build("mlp", seed=0), method, [], lr=0.1)
    for round in range(ROUNDS):
        cohort = sorted(without_replacement(SITES, 3, seed=0, round=round).tolist())
        new = [site for site in cohort if site not in straight.clients]
        updates = simulated.updates(straight.broadcast(cohort, newcomers=new))
        one_by_one(straight, updates, newcomers=new)

    found = Server.load(tmp_path / "rows", storage=Storage(medium="ram"))
    assert found.round_number == ROUNDS
    np.testing.assert_allclose(found.x, straight.x, rtol=1e-5, atol=1e-6)
    for site in range(SITES):
        ours = found.store.read(f"site-{site + 1}")
        np.testing.assert_allclose(ours, straight.store.read(site), rtol=1e-4, atol=1e-5)


@pytest.mark.deployment
def test_a_second_recipe_continues_from_the_folder(tmp_path):
    """The sites' script is without fedcore. A recipe counts its own rounds, so the folder has those of both jobs."""
    for rounds in (2, 1):
        command = [sys.executable, str(JOB.with_name("nvflare_recipe.py")), str(tmp_path), str(rounds)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    server = Server.load(tmp_path / "rows", storage=Storage(medium="ram"))
    assert server.round_number == 3
    assert [len(document["updates"]) for document in server.audit_log()] == [3, 3, 3]


@pytest.mark.deployment
def test_overrides_of_a_job_have_nvflare_s_own_models(tmp_path):
    """Sampling, a changed model, checkpoints, a filter, settings of each site and a ModelLearner; see the job."""
    models = {}
    for side in ("theirs", "aggregator", "controller"):
        (tmp_path / side).mkdir()
        command = [*LOOPBACK, sys.executable, "-m", "tests.adapters.nvflare.override_job", side, str(tmp_path / side)]
        env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
        saved = tmp_path / side / "workspace" / "server" / "simulate_job"
        assert (saved / f"round{ROUNDS // 2 - 1}.npy").exists(), done.stdout[-3000:] + done.stderr[-3000:]
        models[side] = [np.load(saved / f"round{t}.npy") for t in range(ROUNDS // 2)]
    for side in ("aggregator", "controller"):
        np.testing.assert_allclose(models[side], models["theirs"], rtol=1e-6, atol=1e-6)
