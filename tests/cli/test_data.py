"""``fedcore show-data``, and ``fedcore list`` with a kind."""

import pytest

from fedcore.sim.data import REGISTRY, partitions
from fedcore.sim.experiment.config import load_and_partition, load_preset
from tests.cli.command import assert_rejected, invoke, output_of


def test_help_has_examples():
    output = " ".join(output_of("show-data", "--help").split())
    assert "fedcore show-data quickstart --out partition.png --seed 3" in output
    assert "Nothing is trained" in output


def test_list_shows_options(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FEDCORE_DATA_DIR", "somewhere")
    output = output_of("list", "data") + output_of("list", "partitions")
    assert all(name in output for name in [*REGISTRY, *partitions.REGISTRY])
    assert "alpha, beta, sizes='pareto', smallest=50" in output
    assert "alpha, least=1" in output
    assert "clients," not in output  # set by the experiment
    assert "Files are read from FEDCORE_DATA_DIR, somewhere." in output


def test_table_shows_the_partition_of_a_run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    lines = output_of("show-data", "quickstart", "--seed", "3").splitlines()
    assert lines[0] == "digits, shards (shards_per_client=2, distinct_classes=True), seed 3"
    dataset, parts = load_and_partition(load_preset("quickstart"), 3)
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit() and len(line.split()) == 4]
    rows = [row for row in rows if row[0] != "1,437"]
    assert [int(row[1]) for row in rows] == [len(part) for part in parts]
    for row, part in zip(rows, parts, strict=True):
        assert {at for at, bar in enumerate(row[3]) if bar != "·"} == set(dataset.train_y[part].tolist())


def test_default_is_the_first_seed():
    change = ["--set", "seeds=[5, 6]"]
    assert output_of("show-data", "quickstart", *change) == output_of("show-data", "quickstart", "--seed", "5")


def test_plot_is_written(tmp_path):
    picture = tmp_path / "new" / "holdings.png"
    output = output_of("show-data", "quickstart", "--out", str(picture))
    assert f"wrote {picture}" in output.replace("\n", "")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_table_of_many_clients_is_cut():
    change = ["--set", "partition={name='iid', clients=50}"]
    short, long = output_of("show-data", "quickstart", *change), output_of("show-data", "quickstart", *change, "--all")
    assert "... and 10 more clients" in short
    assert "--all shows all clients" in short
    assert "more clients" not in long
    assert "49" in long


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstrat"], "did you mean 'quickstart'?"),
        (["quickstart", "--out", "holdings.jpg"], "--out 'holdings.jpg': must be a .png file"),
        (["quickstart", "--set", "partition={name='iid', clients=2000}"], "labels: expected at least 2000 examples"),
    ],
)
def test_invalid_arguments(arguments, message):
    assert_rejected(invoke("show-data", *arguments), message)
