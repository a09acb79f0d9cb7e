"""The committed archives of records, and the function that packs them."""

import csv
import json
import os
import tarfile
from pathlib import Path

import pytest

from bench.papers.archive import pack
from fedcore.errors import MissingDataError
from fedcore.sim.experiment import Sweep, load_preset, run_sweep
from fedcore.sim.reports.sweeps import write_overview

PAPERS = Path(__file__).parents[2] / "bench" / "papers"
SUFFIX = "-records.tar.xz"
ARCHIVES = sorted(PAPERS.glob(f"*{SUFFIX}"))
SHORT = sorted(ARCHIVES, key=lambda path: path.stat().st_size)[:4]


def unpacked(archive, folder):
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (run,) = folder.iterdir()
    return run


def rows(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "archive",
    [pytest.param(path, marks=[pytest.mark.endurance] * (path not in SHORT), id=path.name) for path in ARCHIVES],
)
def test_the_committed_figures_are_those_of_the_records(archive, tmp_path):
    write_overview(folder := unpacked(archive, tmp_path))
    name = archive.name.removesuffix(SUFFIX)
    trials, committed = rows(folder / "trials.csv"), rows(PAPERS / f"{name}-trials.csv")
    assert trials == [row for row in committed if row in trials or name != "momentum-s1"]  # this has a part of the grid
    assert rows(folder / "overview.csv") == rows(PAPERS / f"{name}.csv")


def figures(records):
    """All records, without times."""
    lines = [json.loads(line) for path in sorted(records.iterdir()) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_the_archives_exist():
    names = {archive.name.removesuffix(SUFFIX) for archive in ARCHIVES}
    assert {"mimic-code-law", "mimic-no-dropout", "mimic-table3-tau50"} <= names


def test_no_archive_is_overwritten_without_a_complete_trial(tmp_path):
    run_sweep(Sweep([small([0])], tmp_path / "it"), jobs=0)
    for path in tmp_path.rglob("*.jsonl"):
        path.write_text(path.read_text().splitlines(keepends=True)[0])
    (tmp_path / "it-records.tar.xz").write_bytes(b"before")
    with pytest.raises(MissingDataError, match=r"/it\b"):
        pack(tmp_path / "it", tmp_path / "it-records.tar.xz")
    assert (tmp_path / "it-records.tar.xz").read_bytes() == b"before"


def small(seeds):
    return load_preset("quickstart", ["rounds=3", f"seeds={seeds}", 'algorithms=["FedAvg", "MimiC"]'])


def test_a_sweep_resumes_from_an_archive(tmp_path):
    """Complete trials do not run again, incomplete ones are not packed, and the results equal a straight run's."""
    run_sweep(Sweep([small([0, 1])], tmp_path / "straight"), jobs=0)
    straight = tmp_path / "straight" / "quickstart" / "records"
    begun = tmp_path / "begun" / "it"
    run_sweep(Sweep([small([0])], begun), jobs=0)
    torn = begun / "quickstart" / "records" / "1-mimic-seed0.jsonl"
    torn.write_text("".join(torn.read_text().splitlines(keepends=True)[:-1]))

    packed = pack(begun, archive := tmp_path / "it-records.tar.xz")
    assert [path.name for path in packed] == ["0-fedavg-seed0.jsonl"]
    there = unpacked(archive, tmp_path / "there")
    for path in there.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    pack(there, again := tmp_path / "again.tar.xz")
    assert again.read_bytes() == archive.read_bytes()

    own = there / "quickstart" / "records"
    before = (own / packed[0].name).read_bytes()
    assert run_sweep(Sweep([small([0, 1])], there), jobs=0) == []
    assert (own / packed[0].name).read_bytes() == before  # its times, too
    assert [path.name for path in sorted(own.iterdir())] == [path.name for path in sorted(straight.iterdir())]
    assert figures(own) == figures(straight)
