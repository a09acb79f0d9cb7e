"""Loggers, whose files are read back by their own readers, and progress bars."""

import io
import json
import logging
import re
import struct
import sys
import urllib.request
from importlib import util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from fedcore import Compute, Report, Server, Update, callbacks
from fedcore.callbacks import Progress, of_record, of_report
from fedcore.errors import MissingDataError, MissingDependencyError
from fedcore.sim.experiment import Event, load_preset, run_experiment
from fedcore.sim.experiment.executor import Job
from fedcore.sim.experiment.results import RoundRecord, read_folder
from fedcore.sim.experiment.schema import trials

CHANGES = ["rounds=3", "seeds=[0]", "local.epochs=1", "evaluate.every=2", 'algorithms=["FedAvg", "MimiC"]']


def run_server(*listeners):
    """Run three rounds with a rejected update each; return the reports."""
    reports = []
    server = Server(np.zeros(6, np.float32), "MimiC", 3, lr=0.1, compute=Compute(diagnostics=True))
    server.callbacks = (reports.append, *listeners)
    for k in range(3):
        server.round([Update(i, server.x + i + k, 2) for i in range(2)] + [Update(2, server.x + np.nan, 1)])
    assert len(reports) == 3
    return reports


def by_figure(rounds):
    """The values of each figure by round."""
    found = {}
    for round, figures in rounds.items():
        for name, value in figures.items():
            found.setdefault(name, {})[round] = value
    return found


def figures_of_reports(reports):
    return by_figure({report.round: of_report(report) for report in reports})


def figures_of_records(record):
    return by_figure({line.round: of_record(line) for line in record.rounds})


def test_figures_of_a_report():
    report = run_server()[-1]
    figures = of_report(report)
    assert (figures["accepted"], figures["rejected"], figures["steps"]) == (2, 1, 4)
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


def test_figures_of_a_record(run):
    record = read_folder(run)[0]
    first, second = (of_record(line) for line in record.rounds[:2])
    assert "accuracy" not in first
    assert second["accuracy"] == record.rounds[1].accuracy
    assert second["active"] == len(record.rounds[1].active)
    assert second["seconds_local"] == record.rounds[1].seconds["local"]


def scalars(folder):
    """The scalars of a folder by tag and step, read by TensorBoard; float32."""
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


def in_float32(figures):
    return {name: {step: float(np.float32(value)) for step, value in steps.items()} for name, steps in figures.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def _needs_package(self):
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")

    def test_server(self, tmp_path):
        with callbacks.TensorBoard(tmp_path) as board:
            reports = run_server(board)
        assert scalars(tmp_path) == in_float32(figures_of_reports(reports))

    def test_experiment_live_and_replayed(self, run, tmp_path):
        with callbacks.TensorBoard(tmp_path / "live") as board:
            run_experiment(load_preset("quickstart", CHANGES), tmp_path / "again", jobs=0, on_event=board.event)
        with callbacks.TensorBoard(tmp_path / "later") as board:
            board.replay(run)
        for record in read_folder(run):
            name = f"quickstart/{record.header.algorithm}-seed0"
            assert scalars(tmp_path / "later" / name) == in_float32(figures_of_records(record))
            live = scalars(tmp_path / "live" / name)
            assert live["accuracy"] == in_float32(figures_of_records(record))["accuracy"]
            assert live["uploads"] == figures_of_records(record)["uploads"]


class TestMLflow:
    @pytest.fixture(autouse=True)
    def _needs_package(self):
        pytest.importorskip("mlflow", reason="mlflow is not installed")
        pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed")

    @pytest.mark.filterwarnings("ignore")
    def test_server_and_records(self, run, tmp_path):
        from mlflow import MlflowClient

        address = f"sqlite:///{tmp_path}/mlflow.db"
        with callbacks.MLflow(address, run="mine") as logger:
            reports = run_server(logger)
            logger.replay(run)
        client = MlflowClient(address)
        experiment = client.get_experiment_by_name("fedcore")
        runs = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
        records = {f"quickstart/{one.header.algorithm}-seed0": one for one in read_folder(run)}
        assert runs.keys() == {"mine", *records}
        assert {one.info.status for one in runs.values()} == {"FINISHED"}
        expected = {"mine": figures_of_reports(reports)} | {
            name: figures_of_records(record) for name, record in records.items()
        }
        for name, figures in expected.items():
            for figure, steps in figures.items():
                history = client.get_metric_history(runs[name].info.run_id, figure)
                assert {metric.step: metric.value for metric in history} == pytest.approx(steps), figure
        parameters = {"preset": "quickstart", "algorithm": "MimiC", "seed": "0"}
        assert runs["quickstart/MimiC-seed0"].data.params == parameters


class TestWandB:
    @pytest.mark.filterwarnings("ignore")
    def test_offline(self, run, tmp_path, monkeypatch):
        wandb = pytest.importorskip("wandb", reason="wandb is not installed")
        monkeypatch.setenv("WANDB_SILENT", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
        with callbacks.WandB(folder=str(tmp_path)) as logger:
            logger.replay(run)
        wandb.teardown()  # its process writes all files before this returns
        files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        found = dict(map(self.read, files))
        assert found == {
            f"quickstart/{record.header.algorithm}-seed0": figures_of_records(record) for record in read_folder(run)
        }

    def read(self, file):
        """The name and history of a run; wandb has no reader of its files for Python."""
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
    """The messages of a log in the format of LevelDB (blocks of 32 KiB), after seven bytes of wandb."""
    assert raw[:4] == b":W&B"
    position, message = 7, b""
    while position + 7 <= len(raw):
        if 2**15 - position % 2**15 < 7:  # the rest of a block is too short for a header
            position += 2**15 - position % 2**15
            continue
        length, kind = struct.unpack_from("<HB", raw, position + 4)
        message += raw[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a complete message, or its last part
            yield message
            message = b""


class TestPrometheus:
    @pytest.fixture(autouse=True)
    def _needs_package(self):
        pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

    def test_metrics_over_http(self):
        import prometheus_client as client
        from prometheus_client.parser import text_string_to_metric_families

        registry = client.CollectorRegistry()
        serving, thread = client.start_http_server(0, addr="127.0.0.1", registry=registry)
        try:
            reports = run_server(callbacks.Prometheus("a", registry=registry))
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
        assert found["fedcore_clients_accepted_total", "a"] == 6
        assert found["fedcore_clients_rejected_total", "a"] == 3
        assert found["fedcore_local_steps_total", "a"] == sum(report.steps for report in reports)
        assert found["fedcore_received_bytes_total", "a"] == sum(report.bytes for report in reports)
        assert found["fedcore_update_norm", "a"] == pytest.approx(reports[-1].norms.mean())
        assert found["fedcore_gamma", "a"] == reports[-1].gamma
        assert np.isnan(found["fedcore_update_norm", "b"])
        assert found["fedcore_last_round", "b"] == 7

    def test_no_client_ids(self):
        import prometheus_client as client

        registry = client.CollectorRegistry()
        listen = callbacks.Prometheus(registry=registry)
        before = len(client.generate_latest(registry).splitlines())
        listen(Report(0, rejected=tuple((f"node{i}", "no") for i in range(100))))
        text = client.generate_latest(registry).decode()
        assert len(text.splitlines()) == before
        assert "node" not in text


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [
        (callbacks.TensorBoard, "tensorboard", "tensorboard"),
        (callbacks.MLflow, "mlflow", "mlflow"),
        (callbacks.WandB, "wandb", "wandb"),
        (callbacks.Prometheus, "prometheus_client", "prometheus"),
    ],
)
def test_error_without_the_package(monkeypatch, tmp_path, kind, package, extra):
    find = util.find_spec
    monkeypatch.setattr("fedcore.callbacks.find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(MissingDependencyError, match=re.escape(f"pip install 'fedcore-fl[{extra}]'")):
        kind(str(tmp_path))


class Names(callbacks.Callback):
    """A custom callback that stores the names of runs."""

    def __init__(self):
        self.found = set()

    def write(self, run, round, figures, about):
        self.found.add(run)


def test_replay_without_records_is_rejected(tmp_path):
    with pytest.raises(MissingDataError, match="no records found"):
        Names().replay(tmp_path)


def test_each_point_of_a_sweep_is_a_run(run, tmp_path):
    import shutil

    for point in ("rate.lr=0.1", "rate.lr=0.2"):
        shutil.copytree(run, tmp_path / "quickstart" / point)

    names = Names()
    names.replay(tmp_path)
    assert names.found == {
        f"quickstart/rate.lr={lr}/{method}-seed0" for lr in (0.1, 0.2) for method in ("FedAvg", "MimiC")
    }


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


def lines_of(jobs, steps, *, terminal=False):
    """The lines in a log of trials that take turns; each step is the time in seconds and the accuracy."""
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=300, force_terminal=terminal)
    with Progress(100 * len(jobs), console=console, clock=clock) as progress:
        for job in jobs:
            progress.event(Event(job))
        for number, (now, accuracy) in enumerate(steps):
            clock.now = now
            progress.event(Event(jobs[number % len(jobs)], round=line(number // len(jobs), accuracy)))
    return out.getvalue().splitlines()


def test_line_every_half_minute(jobs):
    lines = lines_of(jobs[:2], [(10, None), (29, 0.5), (31, None), (35, None), (59, None), (62, 0.625)])
    assert lines == [
        "3 of 200 rounds, about 0:32:50 left: FedAvg, seed 0: 2; MIFA, seed 0: 1, 50.0 %",
        "6 of 200 rounds, about 0:32:20 left: FedAvg, seed 0: 3; MIFA, seed 0: 3, 62.5 %",
    ]


def test_line_names_four_trials(jobs):
    (only,) = lines_of(jobs, [(40, 0.1)])
    assert only.endswith("; FedAvg, seed 1: 0; 2 more")


def test_quick_run_has_no_lines(jobs):
    assert lines_of(jobs, [(k / 100, 0.5) for k in range(50)]) == []


def test_estimate_of_a_resumed_run(jobs):
    """Recorded rounds come as events at once; their recorded seconds count."""
    lines = lines_of(jobs[:1], [*((0.1, None) for _ in range(90)), (40, 0.9)])
    assert lines == ["91 of 100 rounds, about 0:03:00 left: FedAvg, seed 0: 91, 90.0 %"]


def test_default_total_is_that_of_the_experiment(jobs):
    out, clock = io.StringIO(), Clock()
    with Progress(console=Console(file=out, width=300), clock=clock) as progress:
        progress.event(Event(jobs[0]))
        clock.now = 40
        progress.event(Event(jobs[0], round=line(0, None)))
    assert out.getvalue().startswith(f"1 of {100 * len(jobs)} rounds, about ")


@pytest.mark.parametrize("has_widgets", [True, False])
def test_notebook_has_bars(jobs, monkeypatch, has_widgets):
    shown, made, clock = [], Path if has_widgets else None, Clock()
    output = SimpleNamespace(update=shown.append)
    ipython = ModuleType("IPython.display")
    ipython.HTML, ipython.display = str, lambda html, display_id: shown.append(html) or output
    monkeypatch.setitem(sys.modules, "IPython.display", ipython)
    monkeypatch.setattr("fedcore.callbacks.find_spec", lambda name: made if name == "ipywidgets" else Path)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: None)
    progress = Progress(console=Console(force_jupyter=True, width=300), clock=clock)
    for now, event in (
        (0, Event(jobs[0])),
        (40, Event(jobs[0], round=line(0, 0.5))),
        (40.1, Event(jobs[0], line(1, 0.9))),
    ):
        clock.now = now
        progress.event(event)
    progress.__exit__()
    if has_widgets:
        assert shown == []  # rich shows the bars
        return
    _, bars, end = shown  # the last event came too early for an update
    assert "FedAvg, seed 0" in bars
    assert f"1/{len(jobs) * 100}" in bars
    assert "50.0 %" in bars
    assert end == ""


def test_error_without_rich(monkeypatch):
    monkeypatch.setattr("fedcore.callbacks.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fedcore-fl\[sim\]'"):
        Progress()


def test_terminal_has_only_bars(jobs):
    assert not any("rounds, about" in one for one in lines_of(jobs, [(40, 0.1), (80, 0.1)], terminal=True))


def test_label_with_markup():
    experiment = load_preset("quickstart", ["algorithms=[{name='FedAvg', label='a[/x]'}]"])
    assert any(
        "a[/x]" in one for one in lines_of([Job(trials(experiment)[0], Path("runs"))], [(1, 0.1)], terminal=True)
    )


def test_estimate_without_failed_trials(jobs):
    out, clock = io.StringIO(), Clock()
    with Progress(200, console=Console(file=out, width=300), clock=clock) as progress:
        for job in jobs[:2]:
            progress.event(Event(job))
            progress.event(Event(job, round=line(0, None)))
        progress.event(Event(jobs[0], over=True, error="made up"))
        clock.now = 40
        progress.event(Event(jobs[1], round=line(1, None)))
    # 98 rounds of 20 s each, one at a time
    assert "3 of 200 rounds, about 0:32:40 left: MIFA, seed 0: 2" in out.getvalue()


def test_estimates_of_the_bars(jobs):
    """The estimate uses the recorded 20 s per round, not the clock."""
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


def test_log_records_as_json():
    def line(message, *arguments, **more):
        record = logging.LogRecord("fedcore.server", logging.WARNING, "", 0, message, arguments, more.get("exc_info"))
        record.created = 1.5
        return callbacks.JsonFormatter().format(record)

    assert json.loads(line("rejected %d:\n%s", 2, "\u2028")) == {
        "time": "1970-01-01T00:00:01.500+00:00",
        "level": "WARNING",
        "logger": "fedcore.server",
        "message": "rejected 2:\n\u2028",
    }
    try:
        raise ValueError("x")
    except ValueError:
        found = line("failed", exc_info=sys.exc_info())
    assert found.isascii()
    assert len(found.splitlines()) == 1
    assert json.loads(found)["exception"].endswith("ValueError: x")


def test_rejections_in_a_file(tmp_path):
    path = tmp_path / "rejected.jsonl"
    server = Server(np.zeros(3, np.float32), "FedAvg", ["a", 7], lr=0.1, callbacks=[callbacks.RejectionLog(path)])
    x = server.x.copy()
    for wrong in ([], ["a", 7]):
        with server.open_round() as round:
            for client in ("a", 7):
                round.add(client, x * np.nan if client in wrong else x, steps=1)
    assert [
        (line["round"], line["client"], "NaN" in line["reason"], line["time"][-6:])
        for line in map(json.loads, path.read_text().splitlines())
    ] == [(1, "a", True, "+00:00"), (1, 7, True, "+00:00")]
    path.rename(tmp_path / "old")  # as logrotate does
    with server.open_round() as round:
        round.add(7, x[:2], steps=1)
    assert len(path.read_text().splitlines()) == 1


def test_the_dashboard_has_existing_metrics():
    text = (Path(__file__).parents[1] / "docs" / "grafana.json").read_text()
    found = set(re.findall(r"fedcore_\w+", text))
    totals = {f"{name}_total" for name, _ in callbacks.TOTALS.values()} | {"rounds_total"}
    latest = {name for name, _ in callbacks.LATEST.values()} | {"last_round_timestamp_seconds"}
    assert len(found) > 8
    assert found <= {f"fedcore_{name}" for name in totals | latest}
    assert len(json.loads(text)["panels"]) == 6
