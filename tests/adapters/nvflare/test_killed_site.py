"""One site of NVFlare's real processes killed: the job ends without it, and a second start includes it again.

About two minutes: NVFlare starts a server and three sites, twice.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedcore import Server, Storage
from tests.adapters.nvflare.test_simulator import finished_rounds
from tests.adapters.wire.deployment import BIN, LOOPBACK, ROOT, wait_for

SITES, KILLED = [f"site-{number}" for number in (1, 2, 3)], "site-2"


def play(folder, rounds, kill):
    """Run the job to its end, and kill a site after the first round."""
    from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.script_runner import ScriptRunner
    from nvflare.recipe.poc_env import PocEnv

    from fedcore.adapters.nvflare import Controller

    job, rows = FedJob("digits", len(SITES)), folder / "rows"
    model = {"class_path": "fedcore.simulation.nets.build", "args": {"name": "mlp", "seed": 0}}
    persistor = job.to_server(PTFileModelPersistor(model=model), id="persistor")
    policy = {"min_share": 0.6, "grace": 10.0}
    how = {"num_rounds": rounds, "storage": str(rows), "policy": policy, "persistor_id": persistor}
    job.to_server(Controller("MimiC", lr=0.1, **how))
    job.to_clients(ScriptRunner(str(ROOT / "examples" / "nvflare_client.py"), str(len(SITES))))
    env = PocEnv(num_clients=len(SITES))
    try:
        env.deploy(job)
        if kill:
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


def start(folder, rounds, *kill):
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"HOME": str(folder), "NVFLARE_POC_WORKSPACE": str(folder / f"poc{rounds}")}
    words = [
        *LOOPBACK,
        sys.executable,
        "-m",
        "tests.adapters.nvflare.test_killed_site",
        str(folder),
        str(rounds),
        *kill,
    ]
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


def last_rounds(folder):
    """The finished rounds, and the last rounds of the other sites and of the killed site."""
    server = Server.load(folder / "rows", storage=Storage(medium="ram"))
    rounds = {site: server.store.round_of(site) for site in SITES}
    killed = rounds.pop(KILLED)
    return server.round_number, set(rounds.values()), killed


if __name__ == "__main__":
    play(Path(sys.argv[1]), int(sys.argv[2]), kill="kill" in sys.argv)
