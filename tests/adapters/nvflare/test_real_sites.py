"""NVFlare's real processes, a server and three sites: one site is killed, or sleeps while buffers close without it.

Each start takes about a minute.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedcore import RoundPolicy, Server, Storage
from fedcore.sim.data import divide, load
from fedcore.sim.in_process import InProcess
from fedcore.sim.nets import build
from tests.adapters.nvflare.test_simulator import finished_rounds
from tests.adapters.wire.deployment import BIN, LOOPBACK, ROOT, wait_for

SITES, KILLED = [f"site-{number}" for number in (1, 2, 3)], "site-2"
EXAMPLE = ROOT / "examples" / "nvflare_client.py"
BUFFER = {"buffer": 2, "max_staleness": 6, "discount": 0.5}
LATE, HELD = "hold-site-3-0", ("hold-site-1-4", "hold-site-2-4")


def play(folder, rounds, event):
    """Run the job to its end. "kill": kill a site after the first round.

    "late": a site sleeps in its first task during rounds 0 to 3. The others sleep in round 4 until this round closes.
    """
    from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.script_runner import ScriptRunner
    from nvflare.recipe.poc_env import PocEnv

    from fedcore.adapters.nvflare import Controller

    job, rows = FedJob("digits", len(SITES)), folder / "rows"
    model = {"class_path": "fedcore.sim.nets.build", "args": {"name": "mlp", "seed": 0}}
    persistor = job.to_server(PTFileModelPersistor(model=model), id="persistor")
    method, policy = ("FedAvg", BUFFER) if event == "late" else ("MimiC", {"min_share": 0.6, "grace": 10.0})
    storage = {"path": str(rows), "audit": True}
    job.to_server(Controller(method, lr=0.1, num_rounds=rounds, storage=storage, policy=policy, persistor_id=persistor))
    script = ROOT / "tests" / "adapters" / "nvflare" / "held_site.py"
    job.to_clients(ScriptRunner(str(script), f"{len(SITES)} {folder} {EXAMPLE}"))
    for name in (LATE, *HELD) if event == "late" else ():
        (folder / name).touch()
    env = PocEnv(num_clients=len(SITES))
    try:
        env.deploy(job)
        if event == "late":
            for finished, names in ((4, [LATE]), (5, HELD)):
                wait_for(lambda finished=finished: finished_rounds(rows) >= finished, 150, f"{finished} rounds")
                for name in names:
                    (folder / name).unlink()
        if event == "kill":
            wait_for(lambda: finished_rounds(rows) >= 1, 150, "the first round")
            mine = [process for process in psutil.process_iter(["cmdline"]) if is_of(process, folder)]
            assert mine, "no process of the site"
            for process in mine:
                os.kill(process.pid, signal.SIGKILL)
            (folder / "killed").write_text(str(finished_rounds(rows)))
        # NVFlare lists the job as running until it gives the killed site up, after ten minutes.
        wait_for(lambda: finished_rounds(rows) == rounds, 250, "the last round")
    finally:
        env.stop()


def is_of(process, folder):
    """Whether a process is one of the killed site's; its command has the site's folder."""
    command = " ".join(process.info["cmdline"] or ())
    return str(folder) in command and f"/{KILLED}" in command


def start(folder, rounds, event=""):
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"HOME": str(folder), "NVFLARE_POC_WORKSPACE": str(folder / f"poc{rounds}")}
    words = [*LOOPBACK, sys.executable, "-m", "tests.adapters.nvflare.test_real_sites", str(folder), str(rounds), event]
    with (folder / "log").open("a") as log:
        subprocess.run(words, env=env, cwd=ROOT, stdout=log, stderr=log, check=True, timeout=450)


@pytest.mark.deployment
def test_a_job_ends_without_a_killed_site_and_a_second_start_includes_it(tmp_path):
    start(tmp_path, 4, "kill")
    before = int((tmp_path / "killed").read_text())
    assert 1 <= before < 3, "killed too late to show anything"
    rounds, others, killed = last_rounds(tmp_path)
    assert (rounds, others) == (4, {3})
    assert killed <= before
    start(tmp_path, 6)
    assert last_rounds(tmp_path) == (6, {5}, 5)


@pytest.mark.deployment
def test_a_late_result_counts_in_a_buffer_with_its_age(tmp_path):
    """Two sites finish rounds 0 to 3 while the third works on its first task; ``Server.push`` gives the same model."""
    start(tmp_path, 7, "late")
    found = Server.load(tmp_path / "rows", storage=Storage(medium="ram"))
    documents = found.audit_log()
    assert not any(document["rejected"] for document in documents)
    log = [[(one["client"], one["start"]) for one in document["updates"]] for document in documents]
    assert [len(updates) for updates in log] == [2] * 7
    early = [site for updates in log[:4] for site, _ in updates]
    assert set(early) == {"site-1", "site-2"}
    assert ("site-3", 0) in log[4]

    digits = load("digits")
    parts = divide(digits, "label-k", len(SITES), seed=0, classes_per_client=4)
    simulated = InProcess(build("mlp", seed=0), digits, parts, batch=32, epochs=1, seed=0)
    server, sent = Server(build("mlp", seed=0), "FedAvg", len(SITES), lr=0.1, policy=RoundPolicy(**BUFFER)), {}
    for round, updates in enumerate(log):
        for update in simulated.updates(server.broadcast(range(len(SITES)))):
            sent[SITES[update.client], round] = update._replace(value=update.value.copy(), round=round)
        [report] = server.push([sent[one] for one in updates])
        assert report.ages.tolist() == [round - start for _, start in updates]
    np.testing.assert_allclose(found.x, server.x, rtol=0, atol=1e-6)


def last_rounds(folder):
    """The finished rounds, and the last rounds of the other sites and of the killed site."""
    server = Server.load(folder / "rows", storage=Storage(medium="ram"))
    rounds = {site: server.store.round_of(site) for site in SITES}
    killed = rounds.pop(KILLED)
    return server.round_number, set(rounds.values()), killed


if __name__ == "__main__":
    play(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
