"""An interrupted command keeps the records, and prints how to resume."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fedcore.cli.run import _advice
from fedcore.sim.experiment.results import read_folder
from fedcore.sim.reports import write_report
from tests.cli.command import invoke, output_of
from tests.sim.experiment.kit import wait_until


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is POSIX")
@pytest.mark.parametrize(("sent", "workers"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_interrupted_run_keeps_its_records(tmp_path, interruptible, sent, workers):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "fedcore", "run", "quickstart", "--rounds", "100000", "--workers", str(workers)]
    with subprocess.Popen(
        [*command, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as in a terminal, where Ctrl-C goes to the process group
    ) as process:
        try:
            records = folder / "records"
            wait_until(lambda: [f.read_bytes().count(b"\n") > 4 for f in records.glob("*.jsonl")] == [True] * workers)
            if sent == signal.SIGINT:
                os.killpg(process.pid, sent)
            else:
                process.send_signal(sent)  # as a scheduler does
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert f"fedcore report {folder}" in output.replace("\n", "")
    assert "Traceback" not in output + errors
    wait_for_the_end_of_group(process.pid)
    records = read_folder(folder)
    assert len(records) == workers
    assert all(len(record.rounds) > 2 for record in records)
    assert sent == signal.SIGTERM or len(write_report(folder).summary.notes) >= 2


def wait_for_the_end_of_group(group, seconds=120):
    """The resource tracker of multiprocessing ends shortly after the process."""
    deadline = time.monotonic() + seconds
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)


def interrupted(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", [("run", "quickstart"), ("run", "quickstart", "--sweep")], ids=["run", "sweep"])
@pytest.mark.parametrize("at", ["before the folder", "within it", "before a round"])
def test_advice_fits_the_contents_of_the_folder(tmp_path, monkeypatch, words, at):
    folder = tmp_path / "run"

    where = {
        "before the folder": "fedcore.sim.experiment.runner.data.find",
        "within it": "fedcore.sim.experiment.runner.write_config",
        "before a round": "fedcore.sim.experiment.runner.run_jobs",
    }
    monkeypatch.setattr(where[at], interrupted)
    command = [*words, "--rounds", 1, "--seeds", 1, "--workers", 0, "--set", "local.epochs=1", "--out", folder]
    stopped = invoke(*command)
    assert stopped.status == 130
    assert "fedcore report" not in stopped.output
    assert ("--resume" in stopped.output) == (at == "before a round" and "--sweep" not in words)
    monkeypatch.undo()
    again = ["run", folder, "--resume", "--workers", 0] if "--resume" in stopped.output else command
    output_of(*again)


def test_advice_quotes_the_folder(tmp_path):
    folder = tmp_path / "my run"
    output_of("run", "quickstart", "--rounds", 1, "--seeds", 1, "--workers", 0, "--out", folder)
    for advice in (_advice((), False, folder), _advice((), True, folder), invoke("run", folder).errors):
        assert f"fedcore report '{folder}'" in advice


def test_logger_without_rounds_prints_no_hint(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")

    monkeypatch.setattr("fedcore.sim.experiment.runner.run_jobs", interrupted)
    stopped = invoke("run", "quickstart", "--out", tmp_path / "run", "--log", "tensorboard")
    assert stopped.status == 130
    assert "logged to" not in stopped.output
