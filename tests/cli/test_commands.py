"""Commands in general: help, errors, exit statuses, and the run from end to end."""

import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from itertools import product

import pytest

from fedcore import __version__
from fedcore.cli import app
from fedcore.cli.run import parse_seeds
from fedcore.server.compatibility import TABLE
from fedcore.sim.data import datasets
from fedcore.sim.experiment import config
from fedcore.sim.experiment.results import read_folder
from fedcore.sim.reports.report import FILES
from tests.cli.command import SMALL, assert_rejected, invoke, output_of
from tests.kit import python


def test_quickstart_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = output_of("run", "quickstart", "--rounds", 2, "--seeds", 1, "--workers", 0)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("quickstart-2")
    assert {path.name for path in folder.iterdir()} == {"config.json", "build.json", "records", *FILES}
    assert len(list((folder / "records").iterdir())) == 3
    for label in ("FedAvg", "MIFA", "MimiC"):
        assert f"{label}, seed 0: " in output
        assert f"| {label} |" in (folder / "table.md").read_text()
    config = json.loads((folder / "config.json").read_text())
    assert (config["rounds"], config["seeds"]) == (2, [0])


@pytest.mark.parametrize("together", ["true", "false"])
def test_batched_training_and_threads(tmp_path, together):
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
        (["run", "quickstart", "--seeds", "x"], "must be a count"),
        (["run", "quickstart", "--seeds", ""], "the count must be at least 1"),
        (["run", "quickstart", "--seeds", "20260101"], "write '20260101,'"),
        (["run", "quickstart", "--scale", "quick"], "quickstart: has no table 'quick'"),
        (["run", "mimic/table3-tau21", "quickstart"], "did you mean 'mimic/table3-tau"),
        (["report", "nowhere"], "nowhere: no records found"),
        (["rnu"], "invalid choice: 'rnu' (choose from 'run', "),
        (["average", "a.pt", "b.pt"], "error: average: no such command; use `fedcore merge` (see fedcore --help)"),
        (["run"], "required: PRESET (see fedcore run --help)"),
        (["run", "quickstart", "--workers", "-1"], "--workers: '-1': must be an integer of at least 0"),
        (["run", "quickstart", "--backend", "dask"], "invalid choice: 'dask' (choose from 'local', 'ray')"),
        (["run", "quickstart", "--round", "3"], "unrecognized arguments: --round 3 (see fedcore run --help)"),
        (["store", "verify"], "required: PATH (see fedcore store verify --help)"),
    ],
)
def test_invalid_command_line(arguments, message):
    assert_rejected(invoke(*arguments), message)


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """The folder of MNIST, which is missing."""
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    return tmp_path / "mnist"


def test_missing_data(tmp_path, mnist):
    changes = ["--set", "data.name=mnist", "--set", "model.name=lenet"]
    done = invoke("run", "quickstart", *changes, "--out", tmp_path / "run")
    assert_rejected(done, "error: mnist: expected train-images-idx3-ubyte.gz, ")
    assert done.output == ""
    assert not (tmp_path / "run").exists()


def test_report_that_cannot_be_written(tmp_path):
    output_of("run", "quickstart", *SMALL, "--out", tmp_path / "run")
    (tmp_path / "run" / "table.md").unlink()
    (tmp_path / "run" / "table.md").mkdir()
    done = invoke("report", tmp_path / "run")
    assert (done.status, done.errors.count("\n")) == (1, 1)
    assert f"Is a directory: '{tmp_path / 'run' / 'table.md'}'" in done.errors


def test_failed_trial_is_reported(tmp_path, mnist):
    mnist.mkdir()
    for name in datasets.PUBLISHED["mnist"].files:
        (mnist / name).write_bytes(b"no images")
    changes = ["--set", "data.name=mnist", "--set", "model.name=lenet", "--seeds", "4,"]
    done = invoke("run", "quickstart", *SMALL, *changes, "--out", tmp_path / "run")
    assert done.status == 1
    assert f"MIFA, seed 4: failed: {mnist}/train-images-idx3-ubyte.gz: " in done.output.replace("\n", "")
    assert "Traceback" not in done.output + done.errors


@pytest.mark.parametrize(("text", "seeds"), [("3", [0, 1, 2]), ("4,", [4]), ("0,4,2", [0, 4, 2]), ("0, 1", [0, 1])])
def test_seeds_are_a_count_or_a_list(text, seeds):
    assert parse_seeds(text) == seeds


def test_list_names_every_preset():
    output = invoke("list").output
    assert set(config.names()) <= {name for word in output.split() for name in expanded_braces(word)}
    assert {"MimiC,", "FedBuff,"} <= set(output.split())
    assert {"MimiC", "FedBuff"} <= {
        row["name"] for row in json.loads(invoke("list", "methods", "--json").output)["methods"]
    }


def test_list_breaks_no_name():
    rows = invoke("list", "combinations").output.splitlines()
    assert [row.split(": not")[0] for row in rows] == [row.a.replace("|", ", ") for row in TABLE]
    assert "TrimmedMean " in invoke("list", "rules").output


def test_list_imports_neither_torch_nor_matplotlib():
    code = "import sys; from fedcore.cli import main; main(['list', 'data']); main(['list', 'partitions'])\n"
    python("-c", code + "assert 'torch' not in sys.modules; main(['list']); assert 'matplotlib' not in sys.modules")


def expanded_braces(word):
    """The expansion of braces by a shell.

    >>> expanded_braces("a-{x,y}-z")
    ['a-x-z', 'a-y-z']
    """
    parts = [part[1:-1].split(",") if part[:1] == "{" else [part] for part in re.findall(r"{[^}]*}|[^{]+", word)]
    return ["".join(choice) for choice in product(*parts)]


def test_error_without_the_simulator(monkeypatch):
    monkeypatch.setattr("fedcore.cli.app.find_spec", lambda name: None if name == "torch" else find_spec(name))
    assert_rejected(invoke("run", "quickstart"), "error: this command: needs torch; pip install 'fedcore-fl[sim]'\n")


def test_closed_pipe_is_not_an_error(tmp_path):
    command = f"{shlex.quote(sys.executable)} -m fedcore list | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    first, status = done.stdout.splitlines()
    assert first.startswith("presets")
    assert status in ("0", "1")  # 0 if head closed the pipe after the last line
    assert done.stderr == ""


def test_doctor_names_the_build():
    output = invoke("doctor").output
    assert all(word in output for word in ("fedcore", "numpy", "torch", "isa", "compiler", "cuda_kernels"))


STORE = ["info", "verify", "compact", "undo", "recover", "export", "remove-client", "replace", "audit", "reshard"]


GROUPS = [[], ["run"], ["report"], ["list"], ["doctor"], ["show-data"], ["store"]]


@pytest.mark.parametrize("command", [*GROUPS, *(["store", name] for name in STORE)])
def test_help(command):
    assert output_of(*command, "--help").startswith(f"usage: {' '.join(['fedcore', *command])} [-h]")


def test_help_of_an_option_has_at_most_80_characters():
    for group in ([], ["store"]):
        lines = invoke(*group, "--help").output.partition("commands:")[2].splitlines()
        assert len(lines) > 6
    for parser in parsers(app.parser()):
        assert len(parser.description) <= 80, parser.prog
        for action in parser._actions:
            assert len(action.help or "") <= 80, action.option_strings


def parsers(parser):
    """The parsers of all commands."""
    yield parser
    for action in parser._actions:
        for below in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
            yield from parsers(below)


def test_help_imports_no_slow_package():
    code = (
        "import sys, contextlib; from fedcore.cli import main\n"
        "for words in (['--help'], ['run', '--help'], ['show-data', '--help'], ['store', 'undo', '--help']):\n"
        "    with contextlib.suppress(SystemExit): main(words)\n"
        "assert not {'torch', 'pandas', 'matplotlib', 'pydantic', 'rich', 'scipy'} & set(sys.modules)"
    )
    python("-c", code)


def test_version():
    assert invoke("--version").output == f"fedcore {__version__}\n"


@pytest.mark.parametrize(
    ("words", "sweep"),
    [([], False), (["--sweep"], True), (["--set", "grid={'rate.lr'=[0.1, 0.2]}"], True), (["--set", "grid={}"], False)],
)
def test_grid_or_option_makes_a_sweep(tmp_path, words, sweep):
    output_of("run", "quickstart", *SMALL, *words, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "overview.html").exists() == sweep
    assert (tmp_path / "out" / "config.json").exists() != sweep


def test_several_presets_make_a_sweep(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "quickstart"\nname = "mine"\n')
    output_of("run", "quickstart", tmp_path / "mine.toml", *SMALL, "--out", tmp_path / "out")
    assert {path.parent.name for path in (tmp_path / "out").glob("*/config.json")} == {"quickstart", "mine"}
