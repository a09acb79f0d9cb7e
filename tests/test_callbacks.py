"""Loggers' files, read back by their own readers, and the progress of a run."""

import io
import json
import re
import struct
import urllib.request
from importlib import util
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedcore import Compute, Report, Server, Update, callbacks
from fedcore.callbacks import Progress, of_record, of_report
from fedcore.errors import MissingDataError, MissingDependencyError
from fedcore.experiment import Event, load_preset, run_experiment
from fedcore.experiment.executor import Job
from fedcore.experiment.results import RoundRecord, read_folder
from fedcore.experiment.schema import trials

# What loggers wrote is read back by their own readers, and is what the rounds said.


CHANGES = ["rounds=3", "seeds=[0]", "local.epochs=1", "evaluate.every=2", 'algorithms=["FedAvg", "MimiC"]']


def serve(*listeners):
    """A server's rounds, one of them with a refusal, told to these; its reports."""
    reports = []
    server = Server(np.zeros(6, np.float32), "MimiC", 3, lr=0.1, compute=Compute(diagnostics=True))
    server.callbacks = (reports.append, *listeners)
    for k in range(3):
        server.round([Update(i, server.x + i + k, 2) for i in range(2)] + [Update(2, server.x + np.nan, 1)])
    assert len(reports) == 3
    return reports


def due_of_server(reports):
    found = {}
    for report in reports:
        for name, value in of_report(report).items():
            found.setdefault(name, {})[report.round] = value
    return found


def due_of_records(record):
    found = {}
    for line in record.rounds:
        for name, value in of_record(line).items():
            found.setdefault(name, {})[line.round] = value
    return found


def test_the_figures_of_a_report():
    report = serve()[-1]
    figures = of_report(report)
    assert (figures["heard"], figures["refused"], figures["steps"]) == (2, 1, 4)
    assert figures["norm"] == report.norms.mean()
    assert figures["largest_norm"] == report.norms.max()
    assert figures["correction_norm"] == report.correction_norm
    assert "diversity" not in of_report(Report(0))
    assert "gamma" not in of_report(Report(0, gamma=float("inf")))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    run_experiment(load_preset("quickstart", CHANGES), folder, jobs=0)
    return folder


def test_the_figures_of_a_record(run):
    record = read_folder(run)[0]
    first, second = (of_record(line) for line in record.rounds[:2])
    assert "accuracy" not in first
    assert second["accuracy"] == record.rounds[1].accuracy
    assert second["active"] == len(record.rounds[1].active)
    assert second["seconds_local"] == record.rounds[1].seconds["local"]


def scalars(folder):
    """A folder's scalars by tag and step, as TensorBoard reads them; float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    read = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    read.Reload()
    return {
        tag.removeprefix("fedcore/"): {
            event.step: float(tensor_util.make_ndarray(event.tensor_proto)) for event in read.Tensors(tag)
        }
        for tag in read.Tags()["tensors"]
    }


def in_float32(due):
    return {name: {step: float(np.float32(value)) for step, value in steps.items()} for name, steps in due.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def _there(self):
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")

    def test_of_a_server(self, tmp_path):
        with callbacks.TensorBoard(tmp_path) as board:
            reports = serve(board)
        assert scalars(tmp_path) == in_float32(due_of_server(reports))

    def test_of_an_experiment_as_it_runs_and_from_its_records(self, run, tmp_path):
        with callbacks.TensorBoard(tmp_path / "live") as board:
            run_experiment(load_preset("quickstart", CHANGES), tmp_path / "again", jobs=0, on_event=board.event)
        with callbacks.TensorBoard(tmp_path / "later") as board:
            board.replay(run)
        for record in read_folder(run):
            name = f"quickstart/{record.header.algorithm}-seed0"
            assert scalars(tmp_path / "later" / name) == in_float32(due_of_records(record))
            live = scalars(tmp_path / "live" / name)
            assert live["accuracy"] == in_float32(due_of_records(record))["accuracy"]
            assert live["uploads"] == due_of_records(record)["uploads"]


class TestMLflow:
    @pytest.fixture(autouse=True)
    def _there(self):
        pytest.importorskip("mlflow", reason="mlflow is not installed")
        pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed")

    @pytest.mark.filterwarnings("ignore")
    def test_of_a_server_and_of_records(self, run, tmp_path):
        from mlflow import MlflowClient

        address = f"sqlite:///{tmp_path}/mlflow.db"
        with callbacks.MLflow(address, run="mine") as logger:
            reports = serve(logger)
            logger.replay(run)
        client = MlflowClient(address)
        experiment = client.get_experiment_by_name("fedcore")
        runs = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
        records = {f"quickstart/{one.header.algorithm}-seed0": one for one in read_folder(run)}
        assert runs.keys() == {"mine", *records}
        assert {one.info.status for one in runs.values()} == {"FINISHED"}
        due = {"mine": due_of_server(reports)} | {name: due_of_records(record) for name, record in records.items()}
        for name, figures in due.items():
            for figure, steps in figures.items():
                history = client.get_metric_history(runs[name].info.run_id, figure)
                assert {metric.step: metric.value for metric in history} == pytest.approx(steps), figure
        told = {"preset": "quickstart", "algorithm": "MimiC", "seed": "0"}
        assert runs["quickstart/MimiC-seed0"].data.params == told


class TestWandB:
    @pytest.mark.filterwarnings("ignore")
    def test_offline(self, run, tmp_path, monkeypatch):
        wandb = pytest.importorskip("wandb", reason="wandb is not installed")
        monkeypatch.setenv("WANDB_SILENT", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
        with callbacks.WandB(folder=str(tmp_path)) as logger:
            logger.replay(run)
        wandb.teardown()  # its own process writes the files, some after a run's end, and all before this returns
        files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        found = dict(map(self.read, files))
        assert found == {
            f"quickstart/{record.header.algorithm}-seed0": due_of_records(record) for record in read_folder(run)
        }

    def read(self, file):
        """A run's name and its history, by wandb's own messages; it has no reader of its files for Python."""
        from wandb.proto import wandb_internal_pb2

        name, history = None, {}
        for message in logged(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            if record.WhichOneof("record_type") == "run":
                name = record.run.display_name
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                line = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
                for key, value in line.items():
                    if not key.startswith("_"):
                        history.setdefault(key, {})[line["_step"]] = value
        return name, history


def logged(raw):
    """The messages of a log in LevelDB's form, blocks of 32 KiB, behind wandb's seven bytes."""
    assert raw[:4] == b":W&B"
    place, whole = 7, b""
    while place + 7 <= len(raw):
        if 2**15 - place % 2**15 < 7:  # the rest of a block that holds no header
            place += 2**15 - place % 2**15
            continue
        length, kind = struct.unpack_from("<HB", raw, place + 4)
        whole += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


class TestPrometheus:
    @pytest.fixture(autouse=True)
    def _there(self):
        pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

    def test_the_text_of_a_running_server(self):
        """Over HTTP, as Prometheus reads it."""
        import prometheus_client as client
        from prometheus_client.parser import text_string_to_metric_families

        registry = client.CollectorRegistry()
        serving, thread = client.start_http_server(0, addr="127.0.0.1", registry=registry)
        try:
            reports = serve(callbacks.Prometheus("a", registry=registry))
            callbacks.Prometheus("b", registry=registry)(Report(7))
            with urllib.request.urlopen(f"http://127.0.0.1:{serving.server_port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        finally:
            serving.shutdown()
            serving.server_close()
            thread.join()
        found = {
            (sample.name, sample.labels["server"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert found["fedcore_rounds_total", "a"] == 3
        assert found["fedcore_last_round", "a"] == 2
        assert found["fedcore_clients_heard_total", "a"] == 6
        assert found["fedcore_clients_refused_total", "a"] == 3
        assert found["fedcore_local_steps_total", "a"] == sum(report.steps for report in reports)
        assert found["fedcore_received_bytes_total", "a"] == sum(report.bytes for report in reports)
        assert found["fedcore_update_norm", "a"] == pytest.approx(reports[-1].norms.mean())
        assert found["fedcore_gamma", "a"] == reports[-1].gamma
        assert np.isnan(found["fedcore_update_norm", "b"])
        assert found["fedcore_last_round", "b"] == 7

    def test_no_client_is_named(self):
        import prometheus_client as client

        registry = client.CollectorRegistry()
        listen = callbacks.Prometheus(registry=registry)
        before = len(client.generate_latest(registry).splitlines())
        listen(Report(0, rejected=tuple((f"liar{i}", "no") for i in range(100))))
        text = client.generate_latest(registry).decode()
        assert len(text.splitlines()) == before
        assert "liar" not in text


@pytest.mark.parametrize(
    ("made", "package", "extra"),
    [
        (callbacks.TensorBoard, "tensorboard", "tensorboard"),
        (callbacks.MLflow, "mlflow", "mlflow"),
        (callbacks.WandB, "wandb", "wandb"),
        (callbacks.Prometheus, "prometheus_client", "prometheus"),
    ],
)
def test_without_its_package_it_says_what_to_install(monkeypatch, tmp_path, made, package, extra):
    find = util.find_spec
    monkeypatch.setattr("fedcore.callbacks.find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(MissingDependencyError, match=re.escape(f"pip install 'fedcore-fl[{extra}]'")):
        made(str(tmp_path))


class Names(callbacks.Callback):
    """A callback of somebody else's, which holds nothing open."""

    def __init__(self):
        self.found = set()

    def write(self, run, round, figures, about):
        self.found.add(run)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(MissingDataError, match="found no records"):
        Names().replay(tmp_path)


def test_a_point_of_a_sweep_has_a_run_of_its_own(run, tmp_path):
    import shutil

    for point in ("rate.lr=0.1", "rate.lr=0.2"):
        shutil.copytree(run, tmp_path / "quickstart" / point)

    names = Names()
    names.replay(tmp_path)
    assert names.found == {
        f"quickstart/rate.lr={lr}/{method}-seed0" for lr in (0.1, 0.2) for method in ("FedAvg", "MimiC")
    }


# What a run says of itself in a log, where there are no bars.


def line(round, accuracy):
    return RoundRecord(round, [0], 1, 0, accuracy, None, 0.1, 0.1, 5, 1, 1.0, 8, {"local": 18.0, "evaluate": 2.0})


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def jobs():
    experiment = load_preset("quickstart", ["rounds=100", "seeds=[0, 1]"])
    return [Job(trial, Path("runs")) for trial in trials(experiment)]


def told(jobs, steps, *, terminal=False):
    """The lines of a run whose trials take turns, each round at its moment in seconds."""
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=300, force_terminal=terminal)
    with Progress(100 * len(jobs), console=console, clock=clock) as progress:
        for job in jobs:
            progress.event(Event(job))
        for number, (now, accuracy) in enumerate(steps):
            clock.now = now
            progress.event(Event(jobs[number % len(jobs)], round=line(number // len(jobs), accuracy)))
    return out.getvalue().splitlines()


def test_a_line_now_and_then(jobs):
    lines = told(jobs[:2], [(10, None), (29, 0.5), (31, None), (35, None), (59, None), (62, 0.625)])
    assert lines == [
        "3 of 200 rounds, about 0:32:50 left: FedAvg, seed 0: 2; MIFA, seed 0: 1, 50.0 %",
        "6 of 200 rounds, about 0:32:20 left: FedAvg, seed 0: 3; MIFA, seed 0: 3, 62.5 %",
    ]


def test_many_trials_are_counted(jobs):
    (only,) = told(jobs, [(40, 0.1)])
    assert only.endswith("; FedAvg, seed 1: 0; 2 more")


def test_quick_runs_say_nothing_between(jobs):
    assert told(jobs, [(k / 100, 0.5) for k in range(50)]) == []


def test_what_a_run_goes_on_with_tells_how_long_a_round_takes(jobs):
    """Rounds of before come as events too, all at once; what is left will take what they took when they were run."""
    lines = told(jobs[:1], [*((0.1, None) for _ in range(90)), (40, 0.9)])
    assert lines == ["91 of 100 rounds, about 0:03:00 left: FedAvg, seed 0: 91, 90.0 %"]


def test_the_rounds_in_all_are_those_of_the_experiment(jobs):
    out, clock = io.StringIO(), Clock()
    with Progress(console=Console(file=out, width=300), clock=clock) as progress:
        progress.event(Event(jobs[0]))
        clock.now = 40
        progress.event(Event(jobs[0], round=line(0, None)))
    assert out.getvalue().startswith(f"1 of {100 * len(jobs)} rounds, about ")


@pytest.mark.parametrize("has_widgets", [True, False])
def test_in_a_notebook_there_are_bars_or_lines(jobs, monkeypatch, has_widgets):
    shown, made, clock = [], Path if has_widgets else None, Clock()
    monkeypatch.setattr("fedcore.callbacks.find_spec", lambda name: made if name == "ipywidgets" else Path)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: shown.append(text))
    progress = Progress(console=Console(force_jupyter=True, width=300), clock=clock)
    progress.event(Event(jobs[0]))
    clock.now = 40
    progress.event(Event(jobs[0], round=line(0, None)))
    assert any("rounds, about" in text for text in shown) is not has_widgets


def test_without_rich_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("fedcore.callbacks.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fedcore-fl\[sim\]'"):
        Progress()


def test_on_a_terminal_there_are_bars_alone(jobs):
    assert not any("rounds, about" in one for one in told(jobs, [(40, 0.1), (80, 0.1)], terminal=True))


def test_a_label_that_looks_like_richs_signs_is_shown_as_it_is():
    experiment = load_preset("quickstart", ["algorithms=[{name='FedAvg', label='a[/x]'}]"])
    assert any("a[/x]" in one for one in told([Job(trials(experiment)[0], Path("runs"))], [(1, 0.1)], terminal=True))


def test_rounds_of_a_trial_that_failed_are_not_waited_for(jobs):
    out, clock = io.StringIO(), Clock()
    with Progress(200, console=Console(file=out, width=300), clock=clock) as progress:
        for job in jobs[:2]:
            progress.event(Event(job))
            progress.event(Event(job, round=line(0, None)))
        progress.event(Event(jobs[0], over=True, error="made up"))
        clock.now = 40
        progress.event(Event(jobs[1], round=line(1, None)))
    assert "3 of 200 rounds, about 0:32:40 left: MIFA, seed 0: 2" in out.getvalue()  # 98 rounds of 20 s, one at a time


def test_the_bars_say_what_is_left_of_long_rounds(jobs):
    """One is done beside those that were there, more than a minute later: 20 s each, by the records."""
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=300, force_terminal=True, color_system=None)
    with Progress(200, console=console, clock=clock) as progress:
        progress.event(Event(jobs[0]))
        progress.event(Event(jobs[1]))
        for number in range(70):
            progress.event(Event(jobs[0], round=line(number, None)))
        clock.now = 90
        progress.event(Event(jobs[0], round=line(70, None)))
        progress._progress.refresh()
    assert re.search(r"all trials.* 71/200 0:21:30", out.getvalue())  # 129 rounds of 20 s, two at a time
    assert re.search(r"FedAvg, seed 0.* 71/100 0:09:40", out.getvalue())
    assert re.search(r"MIFA, seed 0.* 0/100 +-:--:--", out.getvalue())
