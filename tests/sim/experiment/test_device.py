"""Runs on a GPU: the engine's device, the folder's facts, and resumption."""

import pytest
import torch

from fedcore.errors import ConfigError, DeviceError
from fedcore.sim import sgd
from fedcore.sim.experiment import Sweep, load_preset, run_experiment, run_sweep
from fedcore.sim.experiment.results import read_folder
from fedcore.sim.experiment.runner import processes_for
from fedcore.sim.in_process import InProcess
from tests.cli.command import invoke
from tests.sim.experiment.kit import facts, rounds_in
from tests.sim.simulated_gpu import SimulatedGpu

CHANGES = ["rounds=2", "seeds=[0]", "algorithms=['FedAvg', 'MIFA']"]


def small(*more):
    return load_preset("quickstart", [*CHANGES, *more])


@pytest.fixture
def gpu(monkeypatch):
    """A simulated GPU of torch."""
    monkeypatch.setattr(sgd, "_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"pretended GPU {device.index}")
    with SimulatedGpu() as pretended:
        yield pretended


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(sgd, "_missing", lambda: "no driver")


def test_records_on_a_gpu_differ_only_in_rounding(tmp_path, gpu):
    made = []

    def make_engine(*args, **options):
        made.append(InProcess(*args, **options))
        return made[-1]

    for name, more in (("cpu", ()), ("gpu", ["device='cuda'"])):
        assert run_experiment(small(*more), tmp_path / name, make_engine=make_engine) == []
    assert [engine._device.type for engine in made] == ["cpu", "cpu", "cuda", "cuda"]
    for on_cpu, on_gpu in zip(rounds_in(tmp_path / "cpu"), rounds_in(tmp_path / "gpu"), strict=True):
        assert on_gpu.active == on_cpu.active
        assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-4)
        assert on_gpu.norm == pytest.approx(on_cpu.norm, rel=1e-4)
    assert facts(tmp_path / "cpu", "build.json")["device"] == {"name": "cpu"}
    device = facts(tmp_path / "gpu", "build.json")["device"]
    assert (device["name"], device["is"]) == ("cuda", "pretended GPU 0")


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_run_does_not_resume_on_another_kind_of_device(tmp_path, gpu, first, then):
    begun, other = small(f"device={first!r}"), small(f"device={then!r}")
    assert run_experiment(begun, tmp_path / "run", jobs=0) == []
    message = f"device={then!r}: .* {first!r}"
    with pytest.raises(ConfigError, match=message):
        run_experiment(other, tmp_path / "run", resume=True, jobs=0)
    assert run_sweep(Sweep([begun], tmp_path / "sweep"), jobs=0) == []
    before = rounds_in(tmp_path / "sweep" / "quickstart")
    with pytest.raises(ConfigError, match=message):
        run_sweep(Sweep([other], tmp_path / "sweep"), jobs=0)
    assert rounds_in(tmp_path / "sweep" / "quickstart") == before


def test_run_resumes_on_another_device_of_the_same_kind(tmp_path, gpu):
    for name, first, then in (("gpus", ["device='cuda'"], ["device='cuda:1'"]), ("cpus", [], ["device='cpu'"])):
        assert run_sweep(Sweep([small(*first)], tmp_path / name), jobs=0) == []
        more = small(*then, "seeds=[0, 1]")
        assert run_sweep(Sweep([more], tmp_path / name), jobs=0) == []
        assert {record.header.seed for record in read_folder(tmp_path / name / "quickstart")} == {0, 1}
        assert facts(tmp_path / name / "quickstart", "config.json")["device"] == more.device


def test_server_device_may_change(tmp_path, cuda_device):
    assert run_sweep(Sweep([small()], tmp_path), jobs=0) == []
    assert run_sweep(Sweep([small("server_device='cuda'", "seeds=[0, 1]")], tmp_path), jobs=0) == []
    assert facts(tmp_path / "quickstart", "config.json")["server_device"] == "cuda"


def test_missing_gpu_is_reported_before_anything_is_written(tmp_path, no_gpu):
    for run in (
        lambda: run_experiment(small("device='cuda'"), tmp_path / "run"),
        lambda: run_sweep(Sweep([small("device='cuda'")], tmp_path / "sweep")),
    ):
        with pytest.raises(DeviceError, match=r"device.*GPU"):
            run()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [[], ["--sweep"]])
def test_command_reports_a_missing_gpu_in_one_line(tmp_path, no_gpu, words):
    done = invoke("run", "quickstart", *words, "--device", "cuda", "--out", tmp_path / "out")
    assert done.status == 2
    assert done.errors.startswith("error: device")
    assert done.errors.count("\n") == 1


def test_default_is_one_process_per_gpu():
    cpu, gpu = small(), small("device='cuda'")
    cases = (([cpu], None, None), ([cpu, gpu], None, 1), ([gpu], 4, 4))
    assert all(processes_for(experiments, jobs) == expected for experiments, jobs, expected in cases)
