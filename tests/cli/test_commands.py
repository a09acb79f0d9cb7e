import json
import re
import subprocess
import sys
from itertools import product

import pytest
from typer.testing import CliRunner

from fedcore.cli import app as cli
from fedcore.experiment import presets

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
        "report.html",
    }
    assert len(list((folder / "records").iterdir())) == 3
    for label in ("FedAvg", "MIFA", "MimiC"):
        assert f"{label}, seed 0: " in done.stdout
        assert f"| {label} |" in (folder / "table.md").read_text()
    config = json.loads((folder / "config.json").read_text())
    assert (config["rounds"], config["seeds"]) == (2, [0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "quickstrat"], "error: preset: 'quickstrat' is unknown; did you mean 'quickstart'?"),
        (["run", "quickstart", "--set", "local.epochz=1"], "did you mean 'epochs'?"),
        (["run", "quickstart", "--set", "algorithms=['Mimc']"], "did you mean 'MimiC'?"),
        (["run", "quickstart", "--seeds", "x"], "expected a count or numbers"),
        (["run", "quickstart", "--seeds", "0"], "expected at least one seed"),
        (["run", "quickstart", "--scale", "quick"], "quickstart: expected a table 'quick'"),
        (["sweep", "mimic/table3-tau21"], "did you mean 'mimic/table3-tau"),
        (["report", "nowhere"], "nowhere: expected records"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedcore", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.run_app()
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_a_failed_trial_is_named_and_the_status_is_1(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    changes = ["--set", "data.name=mnist", "--set", "model.name=lenet", "--set", "algorithms=['MIFA']"]
    done = fedcore("run", "quickstart", "--seeds", "4,", *changes, "--out", "run", cwd=tmp_path)
    assert done.returncode == 1
    assert "MIFA, seed 4: failed: mnist: expected train-images-idx3-ubyte.gz" in done.stdout.replace("\n", " ")
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(("text", "seeds"), [("3", [0, 1, 2]), ("4,", [4]), ("0,4,2", [0, 4, 2]), ("0, 1", [0, 1])])
def test_seeds_are_a_count_or_a_list(text, seeds):
    from fedcore.cli.run import _seeds

    assert _seeds(text) == seeds


def test_list_names_every_preset():
    output = CliRunner().invoke(cli.app, ["list"]).output
    assert set(presets.names()) <= {name for word in output.split() for name in unfolded(word)}
    assert "MimiC" in output


def unfolded(word):
    """What a shell makes of braces.

    >>> unfolded("a-{x,y}-z")
    ['a-x-z', 'a-y-z']
    """
    parts = [part[1:-1].split(",") if part[:1] == "{" else [part] for part in re.findall(r"{[^}]*}|[^{]+", word)]
    return ["".join(choice) for choice in product(*parts)]


def test_info_names_the_build():
    output = CliRunner().invoke(cli.app, ["info"]).output
    assert all(word in output for word in ("fedcore", "numpy", "torch", "isa", "compiler"))


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
    ],
)
def test_help(command):
    result = CliRunner().invoke(cli.app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
