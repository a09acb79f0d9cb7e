"""A run on a device: what is asked of the engine, what its folder says, and who may go on with it."""

import json
from dataclasses import replace

import pytest
import torch

from fedcore.errors import ConfigError, DeviceError
from fedcore.experiment import Sweep, load_preset, run_experiment, run_sweep
from fedcore.experiment.results import read_folder
from fedcore.experiment.runner import processes_for
from fedcore.simulation import torch_device
from fedcore.simulation.in_process import InProcess
from tests.cli.command import invoke
from tests.simulation.pretended import Pretended

CHANGES = ["rounds=2", "seeds=[0]", "algorithms=['FedAvg', 'MIFA']"]


def small(*more):
    return load_preset("quickstart", [*CHANGES, *more])


def said(folder, name):
    return json.loads((folder / name).read_text())


def rounds(folder):
    return [replace(line, seconds={}) for record in read_folder(folder) for line in record.rounds]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that torch is pretended to have."""
    monkeypatch.setattr(torch_device, "_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"pretended GPU {device.index}")
    with Pretended() as pretended:
        yield pretended


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch_device, "_missing", lambda: "there is none")


def test_a_run_on_a_gpu_has_the_cpus_records_but_for_rounding(tmp_path, gpu):
    made = []

    def make_engine(*args, **options):
        made.append(InProcess(*args, **options))
        return made[-1]

    for name, more in (("here", ()), ("there", ["device='cuda'"])):
        assert run_experiment(small(*more), tmp_path / name, make_engine=make_engine) == []
    assert [engine._device.type for engine in made] == ["cpu", "cpu", "cuda", "cuda"]
    for here, there in zip(rounds(tmp_path / "here"), rounds(tmp_path / "there"), strict=True):
        assert there.active == here.active
        assert there.loss == pytest.approx(here.loss, rel=1e-4)
        assert there.norm == pytest.approx(here.norm, rel=1e-4)
    assert said(tmp_path / "here", "build.json")["device"] == {"name": "cpu"}
    there = said(tmp_path / "there", "build.json")["device"]
    assert (there["name"], there["is"]) == ("cuda", "pretended GPU 0")


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_what_was_begun_on_one_kind_of_device_does_not_go_on_on_another(tmp_path, gpu, first, then):
    begun, other = small(f"device={first!r}"), small(f"device={then!r}")
    assert run_experiment(begun, tmp_path / "run", jobs=0) == []
    due = f"device={then!r}: the trials in .* were begun on {first!r}, which rounds otherwise"
    with pytest.raises(ConfigError, match=due):
        run_experiment(other, tmp_path / "run", resume=True, jobs=0)
    assert run_sweep(Sweep([begun], tmp_path / "sweep"), jobs=0) == []
    before = rounds(tmp_path / "sweep" / "quickstart")
    with pytest.raises(ConfigError, match=due):
        run_sweep(Sweep([other], tmp_path / "sweep"), jobs=0)
    assert rounds(tmp_path / "sweep" / "quickstart") == before


def test_another_gpu_is_the_same_kind_and_the_cpu_needs_no_name(tmp_path, gpu):
    for name, first, then in (("gpus", ["device='cuda'"], ["device='cuda:1'"]), ("cpus", [], ["device='cpu'"])):
        assert run_sweep(Sweep([small(*first)], tmp_path / name), jobs=0) == []
        more = small(*then, "seeds=[0, 1]")
        assert run_sweep(Sweep([more], tmp_path / name), jobs=0) == []
        assert {record.header.seed for record in read_folder(tmp_path / name / "quickstart")} == {0, 1}
        assert said(tmp_path / name / "quickstart", "config.json")["device"] == more.device


def test_the_servers_device_is_no_matter_of_the_figures(tmp_path, cuda_device):
    assert run_sweep(Sweep([small()], tmp_path), jobs=0) == []
    assert run_sweep(Sweep([small("server_device='cuda'", "seeds=[0, 1]")], tmp_path), jobs=0) == []
    assert said(tmp_path / "quickstart", "config.json")["server_device"] == "cuda"


def test_without_a_gpu_nothing_is_made(tmp_path, no_gpu):
    for run in (
        lambda: run_experiment(small("device='cuda'"), tmp_path / "run"),
        lambda: run_sweep(Sweep([small("device='cuda'")], tmp_path / "sweep")),
    ):
        with pytest.raises(DeviceError, match="device: expected a GPU for 'cuda' that torch can use, got none: there"):
            run()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [[], ["--sweep"]])
def test_the_command_line_says_it_in_one_line(tmp_path, no_gpu, words):
    done = invoke("run", "quickstart", *words, "--device", "cuda", "--out", tmp_path / "out")
    assert done.status == 2
    assert done.errors.startswith("error: device: expected a GPU for 'cuda' that torch can use, got none")
    assert done.errors.count("\n") == 1


def test_trials_share_no_gpu_unless_they_are_told_to():
    here, there = small(), small("device='cuda'")
    assert [processes_for(one, asked) for one, asked in (([here], None), ([here, there], None), ([there], 4))] == [
        None,
        1,
        4,
    ]
