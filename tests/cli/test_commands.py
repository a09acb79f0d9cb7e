import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from itertools import product

import pytest

from fedcore import __version__
from fedcore.cli import app
from fedcore.experiment import presets
from fedcore.experiment.results import read_folder
from fedcore.simulation.data import datasets
from tests.cli.command import invoke
from tests.devices import fake_driver

RUN = [sys.executable, "-m", "fedcore"]


def fedcore(*arguments, cwd):
    return subprocess.run([*RUN, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_the_quickstart_from_end_to_end(tmp_path):
    done = fedcore("run", "quickstart", "--rounds", "2", "--seeds", "1", "--workers", "1", cwd=tmp_path)
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


@pytest.mark.parametrize("together", ["true", "false"])
def test_how_clients_are_trained_and_by_how_many_threads(tmp_path, together):
    options = ["--rounds", 1, "--seeds", 1, "--workers", 0, "--set", f"together={together}", "--set", "threads=2"]
    assert invoke("run", "quickstart", *options, "--out", tmp_path / "run").status == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["together"], config["threads"]) == (together == "true", 2)
    assert {line.together for record in read_folder(tmp_path / "run") for line in record.rounds} == {together == "true"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "quickstrat"], "error: preset: 'quickstrat' is unknown; did you mean 'quickstart'?"),
        (["run", "quickstart", "--set", "local.epochz=1"], "did you mean 'epochs'?"),
        (["run", "quickstart", "--set", "algorithms=['Mimc']"], "did you mean 'MimiC'?"),
        (["run", "quickstart", "--seeds", "x"], "expected a count or numbers"),
        (["run", "quickstart", "--seeds", "0"], "expected at least one seed"),
        (["run", "quickstart", "--seeds", ""], "expected at least one seed"),
        (["run", "quickstart", "--seeds", "20260101"], "only this seed is 20260101,"),
        (["run", "quickstart", "--scale", "quick"], "quickstart: expected a table 'quick'"),
        (["run", "mimic/table3-tau21", "quickstart"], "did you mean 'mimic/table3-tau"),
        (["report", "nowhere"], "nowhere: expected records"),
        (["rnu"], "invalid choice: 'rnu' (choose from 'run', "),
        (["run"], "required: PRESET (see fedcore run --help)"),
        (["run", "quickstart", "--workers", "-1"], "--workers: '-1': must be a whole number, at least 0"),
        (["run", "quickstart", "--backend", "dask"], "invalid choice: 'dask' (choose from 'local', 'ray')"),
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
    assert (
        invoke("run", "quickstart", "--rounds", 1, "--seeds", 1, "--workers", 0, "--out", tmp_path / "run").status == 0
    )
    (tmp_path / "run" / "table.md").unlink()
    (tmp_path / "run" / "table.md").mkdir()
    done = invoke("report", tmp_path / "run")
    assert (done.status, done.errors.count("\n")) == (1, 1)
    assert f"Is a directory: '{tmp_path / 'run' / 'table.md'}'" in done.errors


def test_a_failed_trial_is_named_and_the_status_is_1(tmp_path, mnist):
    mnist.mkdir()
    for name in datasets.PUBLISHED["mnist"].files:
        (mnist / name).write_bytes(b"no images")
    changes = ["--set", "data.name=mnist", "--set", "model.name=lenet", "--set", "algorithms=['MIFA']"]
    done = fedcore("run", "quickstart", "--seeds", "4,", *changes, "--out", "run", cwd=tmp_path)
    assert done.returncode == 1
    assert f"MIFA, seed 4: failed: {mnist}/train-images-idx3-ubyte.gz: " in done.stdout.replace("\n", "")
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(("text", "seeds"), [("3", [0, 1, 2]), ("4,", [4]), ("0,4,2", [0, 4, 2]), ("0, 1", [0, 1])])
def test_seeds_are_a_count_or_a_list(text, seeds):
    from fedcore.cli.run import parse_seeds

    assert parse_seeds(text) == seeds


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
    monkeypatch.setattr("fedcore.cli.app.find_spec", lambda name: None if name == "torch" else find_spec(name))
    done = invoke("run", "quickstart")
    assert done.status == 2
    assert done.errors == "error: this command: need torch; pip install 'fedcore-fl[sim]'\n"


def test_who_has_read_enough_ends_it_without_a_word(tmp_path):
    command = f"{shlex.join(RUN)} list | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    first, status = done.stdout.splitlines()
    assert first.startswith("presets")
    assert status in ("0", "1")  # 0 where all was written before head was gone
    assert done.stderr == ""


def test_doctor_names_the_build():
    output = invoke("doctor").output
    assert all(word in output for word in ("fedcore", "numpy", "torch", "isa", "compiler", "cuda_kernels"))


def test_doctor_says_why_there_is_no_cuda_device():
    env = os.environ | {"FEDCORE_CUDA_DRIVER": "/nowhere/libcuda.so.1"}
    said = subprocess.run([*RUN, "doctor"], env=env, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in said.splitlines() if line.startswith("cuda "))
    assert "none: " in line
    assert "/nowhere/libcuda.so.1" in line


def test_doctor_names_the_devices():
    env = fake_driver.environment()
    said = subprocess.run([*RUN, "doctor"], env=env, capture_output=True, text=True, check=True).stdout
    lines = [line.split(maxsplit=1) for line in said.splitlines() if line.startswith("cuda:")]
    assert lines == [[f"cuda:{n}", "emulated GPU, 9.0, 8.0 GiB"] for n in range(fake_driver.DEVICES)]


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["run"],
        ["report"],
        ["list"],
        ["doctor"],
        ["show-data"],
        ["store"],
        ["store", "info"],
        ["store", "verify"],
        ["store", "compact"],
        ["store", "undo"],
        ["store", "recover"],
        ["store", "export"],
        ["store", "remove-client"],
        ["store", "reshard"],
    ],
)
def test_help(command):
    result = invoke(*command, "--help")
    assert result.status == 0
    assert result.output.startswith(f"usage: {' '.join(['fedcore', *command])} [-h]")


def test_a_line_of_help_has_at_most_80_characters():
    for group in ([], ["store"]):
        lines = invoke(*group, "--help").output.partition("commands:")[2].splitlines()
        assert len(lines) > 6
    for parser in parsers(app.parser()):
        assert len(parser.description) <= 80, parser.prog
        for action in parser._actions:
            assert len(action.help or "") <= 90, action.option_strings


def parsers(parser):
    """The parser of each command."""
    yield parser
    for action in parser._actions:
        for below in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
            yield from parsers(below)


def test_the_help_imports_nothing_slow():
    code = (
        "import sys, contextlib; from fedcore.cli import main\n"
        "for words in (['--help'], ['run', '--help'], ['show-data', '--help'], ['store', 'undo', '--help']):\n"
        "    with contextlib.suppress(SystemExit): main(words)\n"
        "assert not {'torch', 'pandas', 'matplotlib', 'pydantic', 'rich', 'scipy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_version():
    assert invoke("--version").output == f"fedcore {__version__}\n"


SMALL = ["--rounds", "1", "--seeds", "1", "--workers", "0", "--set", "local.epochs=1", "--set", "algorithms=['MIFA']"]


@pytest.mark.parametrize(
    ("words", "sweep"),
    [
        ([], False),
        (["--sweep"], True),
        (["--set", "grid={'rate.lr'=[0.1, 0.2]}"], True),
        (["--set", "grid={}"], False),
    ],
)
def test_a_grid_or_the_option_makes_a_sweep(tmp_path, words, sweep):
    done = invoke("run", "quickstart", *SMALL, *words, "--out", tmp_path / "out")
    assert done.status == 0, done.errors
    assert (tmp_path / "out" / "overview.html").exists() == sweep
    assert (tmp_path / "out" / "config.json").exists() != sweep


def test_several_presets_make_a_sweep(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "quickstart"\nname = "mine"\n')
    done = invoke("run", "quickstart", tmp_path / "mine.toml", *SMALL, "--out", tmp_path / "out")
    assert done.status == 0, done.errors
    assert {path.parent.name for path in (tmp_path / "out").glob("*/config.json")} == {"quickstart", "mine"}
