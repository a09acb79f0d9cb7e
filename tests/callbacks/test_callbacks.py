"""What loggers wrote is read back by their own readers, and is what the rounds said."""

import json
import re
import struct
import urllib.request
from importlib import util

import numpy as np
import pytest

from fedcore import RoundReport, Server, Update, callbacks
from fedcore.callbacks.figures import of_record, of_report
from fedcore.errors import MissingDataError, MissingDependencyError
from fedcore.experiment import load_preset, run_experiment
from fedcore.experiment.records import read_folder

CHANGES = ["rounds=3", "seeds=[0]", "local.epochs=1", "evaluate.every=2", 'algorithms=["FedAvg", "MimiC"]']


def serve(*listeners):
    """A server's rounds, one of them with a refusal, told to these; its reports."""
    reports = []
    server = Server("MimiC", np.zeros(6, np.float32), 3, lr=0.1, diagnostics=True)
    server.on_report = lambda report: [listen(report) for listen in (reports.append, *listeners)]
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
    assert "diversity" not in of_report(RoundReport(0))
    assert "gamma" not in of_report(RoundReport(0, gamma=float("inf")))


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
            callbacks.Prometheus("b", registry=registry)(RoundReport(7))
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
        listen(RoundReport(0, refused=tuple((f"liar{i}", "no") for i in range(100))))
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
    module = "prometheus" if package == "prometheus_client" else package
    monkeypatch.setattr(f"fedcore.callbacks.{module}.find_spec", lambda name: None if name == package else find(name))
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
