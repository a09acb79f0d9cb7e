"""``fedcore run --log``: logged rounds are read back by the readers of each logger."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedcore.callbacks import Callback
from fedcore.cli import log
from fedcore.cli.log import Loggers
from fedcore.sim.experiment import Event, load_preset
from fedcore.sim.experiment.executor import Job
from fedcore.sim.experiment.results import read_folder
from fedcore.sim.experiment.schema import trials
from tests import test_callbacks as callbacks
from tests.cli.command import SMALL, invoke
from tests.test_callbacks import figures_of_records, in_float32, line, scalars

LOGGED = [*SMALL, "--rounds", "2"]


class FakeLogger(Callback):
    """A logger that stores the calls of write, or fails."""

    def __init__(self, fails=False):
        self.found, self.fails, self.closed = [], fails, False

    def write(self, run, round, figures, about):
        if self.fails:
            raise OSError("the server is gone")
        self.found.append((run, round))

    def close(self):
        self.closed = True


@pytest.fixture
def fakes(monkeypatch):
    loggers = {"tensorboard": FakeLogger(fails=True), "mlflow": FakeLogger()}
    monkeypatch.setattr(Loggers, "_make", lambda self, kind, where: (loggers[kind], f"look at {kind}"))
    return loggers


def test_failing_logger_does_not_stop_the_run(fakes, tmp_path):
    done = invoke("run", "quickstart", *LOGGED, "--out", tmp_path / "run", "--log", "tensorboard", "--log", "mlflow")
    assert done.status == 0, done.errors
    assert fakes["mlflow"].found == [("quickstart/MIFA-seed0", 0), ("quickstart/MIFA-seed0", 1)]
    assert fakes["mlflow"].closed
    assert done.output.count("tensorboard failed and is no longer used (OSError: the server is gone)") == 1
    assert "logged to mlflow: look at mlflow" in done.output
    assert "logged to tensorboard" not in done.output
    assert len(read_folder(tmp_path / "run")[0].rounds) == 2


def test_only_new_rounds_are_logged(fakes, tmp_path):
    command = ["run", "quickstart", "--sweep", *LOGGED, "--out", tmp_path / "sweep", "--log", "mlflow"]
    first, second = "quickstart/MIFA-seed0", "quickstart/MIFA-seed1"
    for more, expected in (
        ([], [(first, 0), (first, 1)]),
        ([], []),
        (["--seeds", "2"], [(second, 0), (second, 1)]),
        (["--seeds", "2", "--rounds", "3"], [(first, 2), (second, 2)]),
    ):
        fakes["mlflow"].found.clear()
        assert invoke(*command, *more).status == 0
        assert fakes["mlflow"].found == expected, more


def test_resumed_trial_is_logged_from_the_end_of_its_record(fakes, tmp_path):
    assert invoke("run", "quickstart", *LOGGED, "--out", tmp_path / "run").status == 0
    (record,) = (tmp_path / "run" / "records").glob("*.jsonl")
    header, line, _ = record.read_text().splitlines(keepends=True)
    record.write_text(header + line)
    assert invoke("run", tmp_path / "run", "--resume", "--workers", 0, "--log", "mlflow").status == 0
    assert fakes["mlflow"].found == [("quickstart/MIFA-seed0", 1)]


@pytest.mark.parametrize(
    ("kinds", "message"),
    [(["prometheus"], "--log 'prometheus': must be KIND or KIND=WHERE"), (["mlflow", "mlflow=x"], "--log mlflow: ")],
)
def test_invalid_logger_is_rejected_before_anything_is_written(fakes, tmp_path, kinds, message):
    words = [word for one in kinds for word in ("--log", one)]
    done = invoke("run", "quickstart", *LOGGED, "--out", tmp_path / "run", *words)
    assert done.status == 2
    assert message in done.errors.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_error_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr("fedcore.callbacks.find_spec", lambda name: None)
    done = invoke("run", "quickstart", *LOGGED, "--out", tmp_path / "run", "--log", "tensorboard")
    assert done.status == 2
    assert "pip install 'fedcore-fl[tensorboard]'" in done.errors
    assert not (tmp_path / "run").exists()


def test_help_has_an_example():
    text = " ".join(invoke("run", "--help").output.split())
    assert "--log KIND[=WHERE]" in text
    assert "tensorboard[=DIR]" in text
    assert "--log tensorboard" in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_with_a_run(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    done = invoke("run", "quickstart", *LOGGED, "--out", tmp_path / "run", "--log", "tensorboard")
    assert f"logged to tensorboard: tensorboard --logdir {tmp_path / 'run' / 'tensorboard'}" in done.output
    (record,) = read_folder(tmp_path / "run")
    found = scalars(tmp_path / "run" / "tensorboard" / "quickstart" / "MIFA-seed0")
    assert found == in_float32(figures_of_records(record))
    assert invoke("report", tmp_path / "run").status == 0


@pytest.mark.filterwarnings("ignore")
def test_mlflow_with_a_sweep(tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed")
    from mlflow import MlflowClient

    address = f"sqlite:///{tmp_path}/mlflow.db"
    done = invoke("run", "quickstart", "--sweep", *LOGGED, "--out", tmp_path / "sweep", "--log", f"mlflow={address}")
    assert f"logged to mlflow: {address}" in done.output
    client = MlflowClient(address)
    (run,) = client.search_runs([client.get_experiment_by_name("fedcore").experiment_id])
    (record,) = read_folder(tmp_path / "sweep" / "quickstart")
    for figure, steps in figures_of_records(record).items():
        history = client.get_metric_history(run.info.run_id, figure)
        assert {metric.step: metric.value for metric in history} == pytest.approx(steps), figure


@pytest.mark.filterwarnings("ignore")
def test_wandb_with_a_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    done = invoke("run", "quickstart", *LOGGED, "--out", tmp_path / "run", "--log", "wandb=mine")
    assert f"logged to wandb: wandb sync {tmp_path / 'run' / 'wandb' / 'offline-run-*'}" in done.output
    wandb.teardown()  # flushes the files
    (file,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    (record,) = read_folder(tmp_path / "run")
    assert callbacks.TestWandB().read(file) == ("quickstart/MIFA-seed0", figures_of_records(record))


def test_logger_that_cannot_be_closed_is_reported(fakes, tmp_path):
    out = io.StringIO()
    experiment = load_preset("quickstart", ["rounds=1", "seeds=[0]"])
    fakes["mlflow"].close = lambda: 1 / 0
    with log.Loggers(["mlflow"], tmp_path, Console(file=out, width=300)) as loggers:
        loggers.show(Event(Job(trials(experiment)[0], Path("runs")), round=line(0, 0.5)))
    assert "mlflow failed and is no longer used (ZeroDivisionError" in out.getvalue()
