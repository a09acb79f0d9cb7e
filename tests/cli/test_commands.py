import json
import os
import re
import shlex
import subprocess
import sys
from itertools import product

import pytest

from fedcore import data
from fedcore.cli import work
from fedcore.experiment import presets
from fedcore.experiment.records import read_folder
from tests.cli.command import invoke
from tests.devices import fake_driver

RUN = [sys.executable, "-m", "fedcore"]


def fedcore(*arguments, cwd):
    return subprocess.run([*RUN, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_the_quickstart_from_end_to_end(tmp_path):
    done = fedcore("run", "quickstart", "--rounds", "2", "--seeds", "1", "--jobs", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("quickstart-2")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "build.json",
        "records",
        "table.md",
        "table.csv",
        "curves.png",
        "loss.png",
        "report.html",
    }
    assert len(list((folder / "records").iterdir())) == 3
    for label in ("FedAvg", "MIFA", "MimiC"):
        assert f"{label}, seed 0: " in done.stdout
        assert f"| {label} |" in (folder / "table.md").read_text()
    config = json.loads((folder / "config.json").read_text())
    assert (config["rounds"], config["seeds"]) == (2, [0])


@pytest.mark.parametrize("together", ["yes", "no"])
def test_how_clients_are_trained_and_by_how_many_threads(tmp_path, together):
    options = ["--rounds", 1, "--seeds", 1, "--jobs", 0, "--together", together, "--threads", 2]
    assert invoke("run", "quickstart", *options, "--out", tmp_path / "run").status == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["together"], config["threads"]) == (together == "yes", 2)
    assert {line.together for record in read_folder(tmp_path / "run") for line in record.rounds} == {together == "yes"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "quickstrat"], "error: preset: 'quickstrat' is unknown; did you mean 'quickstart'?"),
        (["run", "quickstart", "--set", "local.epochz=1"], "did you mean 'epochs'?"),
        (["run", "quickstart", "--set", "algorithms=['Mimc']"], "did you mean 'MimiC'?"),
        (["run", "quickstart", "--seeds", "x"], "expected a count or numbers"),
        (["run", "quickstart", "--seeds", "0"], "expected at least one seed"),
        (["run", "quickstart", "--seeds", ""], "expected at least one seed"),
        (["run", "quickstart", "--seeds", "20260101"], "this seed alone is 20260101,"),
        (["run", "quickstart", "--scale", "quick"], "quickstart: expected a table 'quick'"),
        (["sweep", "mimic/table3-tau21"], "did you mean 'mimic/table3-tau"),
        (["report", "nowhere"], "nowhere: expected records"),
        (["rnu"], "invalid choice: 'rnu' (choose from 'run', "),
        (["run"], "required: PRESET (see fedcore run --help)"),
        (["run", "quickstart", "--jobs", "-1"], "--jobs: expected an integer >= 0, got '-1'"),
        (["run", "quickstart", "--together", "perhaps"], "invalid choice: 'perhaps' (choose from 'yes', 'no', 'vmap')"),
        (["run", "quickstart", "--round", "3"], "unrecognized arguments: --round"),
        (["store", "verify"], "required: PATH (see fedcore store verify --help)"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, message):
    done = invoke(*arguments)
    assert done.status == 2
    assert message in done.errors
    assert done.errors.count("\n") == 1


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """The folder in which MNIST is looked for."""
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    return tmp_path / "mnist"


def test_missing_data_is_one_line_and_status_2(tmp_path, mnist):
    done = invoke(
        "run", "quickstart", "--set", "data.name=mnist", "--set", "model.name=lenet", "--out", tmp_path / "run"
    )
    assert done.status == 2
    assert done.errors.startswith("error: mnist: expected train-images-idx3-ubyte.gz, ")
    assert done.errors.count("\n") == 1
    assert done.output == ""
    assert not (tmp_path / "run").exists()


def test_a_report_that_cannot_be_written_is_one_line_and_status_1(tmp_path):
    assert invoke("run", "quickstart", "--rounds", 1, "--seeds", 1, "--jobs", 0, "--out", tmp_path / "run").status == 0
    (tmp_path / "run" / "table.md").unlink()
    (tmp_path / "run" / "table.md").mkdir()
    done = invoke("report", tmp_path / "run")
    assert (done.status, done.errors.count("\n")) == (1, 1)
    assert f"Is a directory: '{tmp_path / 'run' / 'table.md'}'" in done.errors


def test_a_failed_trial_is_named_and_the_status_is_1(tmp_path, mnist):
    mnist.mkdir()
    for name in data.mnist.SHA256["mnist"]:
        (mnist / name).write_bytes(b"no images")
    changes = ["--set", "data.name=mnist", "--set", "model.name=lenet", "--set", "algorithms=['MIFA']"]
    done = fedcore("run", "quickstart", "--seeds", "4,", *changes, "--out", "run", cwd=tmp_path)
    assert done.returncode == 1
    assert f"MIFA, seed 4: failed: {mnist}/train-images-idx3-ubyte.gz: " in done.stdout.replace("\n", "")
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(("text", "seeds"), [("3", [0, 1, 2]), ("4,", [4]), ("0,4,2", [0, 4, 2]), ("0, 1", [0, 1])])
def test_seeds_are_a_count_or_a_list(text, seeds):
    from fedcore.cli.overrides import _seeds

    assert _seeds(text) == seeds


def test_list_names_every_preset():
    output = invoke("list").output
    assert set(presets.names()) <= {name for word in output.split() for name in unfolded(word)}
    assert "MimiC" in output


def test_list_does_not_wait_for_pictures():
    """What draws takes a second to import; nothing is drawn."""
    code = "import sys; from fedcore.cli import main; main(['list']); assert 'matplotlib' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def unfolded(word):
    """What a shell makes of braces.

    >>> unfolded("a-{x,y}-z")
    ['a-x-z', 'a-y-z']
    """
    parts = [part[1:-1].split(",") if part[:1] == "{" else [part] for part in re.findall(r"{[^}]*}|[^{]+", word)]
    return ["".join(choice) for choice in product(*parts)]


def test_without_the_simulator_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(work, "SIMULATOR", ("numpy", "no_torch_here"))
    done = invoke("run", "quickstart")
    assert done.status == 2
    assert done.errors == "error: this command: need no_torch_here; pip install 'fedcore-fl[sim]'\n"


def test_who_has_read_enough_ends_it_without_a_word(tmp_path):
    command = f"{shlex.join(RUN)} list | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    first, status = done.stdout.splitlines()
    assert first.startswith("presets")
    assert status in ("0", "1")  # 0 where all was written before head was gone
    assert done.stderr == ""


def test_info_names_the_build():
    output = invoke("info").output
    assert all(word in output for word in ("fedcore", "numpy", "torch", "isa", "compiler", "cuda_kernels"))


def test_info_says_why_there_is_no_cuda_device():
    env = os.environ | {"FEDCORE_CUDA_DRIVER": "/nowhere/libcuda.so.1"}
    said = subprocess.run([*RUN, "info"], env=env, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in said.splitlines() if line.startswith("cuda "))
    assert "none: " in line
    assert "/nowhere/libcuda.so.1" in line


def test_info_names_the_devices():
    env = fake_driver.environment()
    said = subprocess.run([*RUN, "info"], env=env, capture_output=True, text=True, check=True).stdout
    lines = [line.split(maxsplit=1) for line in said.splitlines() if line.startswith("cuda:")]
    assert lines == [[f"cuda:{n}", "emulated GPU, 9.0, 8.0 GiB"] for n in range(fake_driver.DEVICES)]


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["run"],
        ["report"],
        ["sweep"],
        ["list"],
        ["info"],
        ["store"],
        ["store", "info"],
        ["store", "verify"],
        ["store", "compact"],
        ["data"],
        ["data", "list"],
        ["data", "show"],
    ],
)
def test_help(command):
    result = invoke(*command, "--help")
    assert result.status == 0
    assert result.output.startswith(f"usage: {' '.join(['fedcore', *command])} [-h]")
