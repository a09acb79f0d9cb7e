import subprocess
import sys

import pytest

from fedcore.experiment.presets import load_and_partition, load_preset
from fedcore.simulation.data import REGISTRY, partitions
from tests.cli.command import invoke


def fedcore(*arguments):
    result = invoke(*arguments)
    assert result.status == 0, result.errors
    return result.output


def test_the_help_teaches_by_examples():
    output = " ".join(fedcore("show-data", "--help").split())
    assert "fedcore show-data quickstart --out partition.png --seed 3" in output
    assert "Nothing is trained" in output


def test_list_does_not_wait_for_torch():
    """Which takes two seconds to import; it builds no model."""
    code = (
        "import sys; from fedcore.cli import main; main(['list', 'data']); main(['list', 'partitions'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_list_names_everything_with_its_options(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FEDCORE_DATA_DIR", "somewhere")
    output = fedcore("list", "data") + fedcore("list", "partitions")
    assert all(name in output for name in [*REGISTRY, *partitions.REGISTRY])
    assert "alpha, beta, sizes='pareto', smallest=50" in output
    assert "alpha, least=1" in output
    assert "clients," not in output  # the experiment gives them
    assert "Files are read from FEDCORE_DATA_DIR, somewhere." in output


def test_show_tells_what_a_run_deals(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    lines = fedcore("show-data", "quickstart", "--seed", "3").splitlines()
    assert lines[0] == "digits, shards (shards_per_client=2, distinct_classes=True), seed 3"
    dataset, parts = load_and_partition(load_preset("quickstart"), 3)
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit() and len(line.split()) == 4]
    rows = [row for row in rows if row[0] != "1,437"]
    assert [int(row[1]) for row in rows] == [len(part) for part in parts]
    for row, part in zip(rows, parts, strict=True):
        assert {at for at, bar in enumerate(row[3]) if bar != "·"} == set(dataset.train_y[part].tolist())


def test_the_first_seed_is_shown_unless_another_is_asked_for():
    change = ["--set", "seeds=[5, 6]"]
    assert fedcore("show-data", "quickstart", *change) == fedcore("show-data", "quickstart", "--seed", "5")


def test_show_draws_a_picture_where_it_is_told_to(tmp_path):
    picture = tmp_path / "new" / "who.png"
    output = fedcore("show-data", "quickstart", "--out", str(picture))
    assert f"wrote {picture}" in output.replace("\n", "")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_many_clients_are_cut_unless_all_are_asked_for():
    change = ["--set", "partition={name='iid', clients=50}"]
    short, long = fedcore("show-data", "quickstart", *change), fedcore("show-data", "quickstart", *change, "--all")
    assert "... and 10 more clients" in short
    assert "--all shows all clients" in short
    assert "more clients" not in long
    assert "49" in long


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstrat"], "did you mean 'quickstart'?"),
        (["quickstart", "--out", "who.jpg"], "--out: expected a file that ends in .png, got 'who.jpg'"),
        (["quickstart", "--set", "partition={name='iid', clients=2000}"], "labels: expected at least 2000 examples"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, message):
    done = invoke("show-data", *arguments)
    assert done.status == 2
    assert message in done.errors
    assert done.errors.count("\n") == 1
