"""Reproduced records: a row of bench/papers, and one of the README's table."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch

from bench.papers import counts, rates
from bench.papers.pairs import differences
from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment.results import read
from fedcore.sim.experiment.schema import Trial
from fedcore.sim.experiment.trial import run_trial
from fedcore.sim.reports.statistics import final, summarise

ROOT = Path(__file__).parents[2]
PAPERS, QUICKSTART = ROOT / "bench" / "papers", ROOT / "docs" / "quickstart.csv"
PRESET, LABEL, SEED = "flexible/table3-synthetic-niid-t4", "C", 1


def committed(preset, label, seed):
    with (PAPERS / "flexible-table3-trials.csv").open(encoding="utf-8") as file:
        (row,) = (
            row
            for row in csv.DictReader(file)
            if (row["preset"], row["algorithm"], row["seed"]) == (preset, label, str(seed))
        )
    return row


def made(experiment, label, seed, folder):
    """The record of a trial on this machine."""
    order = [method.label for method in experiment.algorithms].index(label)
    trial = Trial(experiment, order, seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes of a sweep have it
    try:
        run_trial(trial, folder)
    finally:
        torch.set_num_threads(threads)
    return read(folder / "records" / trial.file_name)


def due(figure):
    """A committed figure, with this machine's tolerance."""
    machine = json.loads((PAPERS / "machine.json").read_text(encoding="utf-8"))
    here = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if here == {key: machine[key] for key in here}:
        return pytest.approx(float(figure), rel=1e-12)
    # Another torch, or other vector instructions, adds in another order, and a few examples change sides.
    return pytest.approx(float(figure), abs=min(0.01, 0.5 * float(figure)))


def test_a_committed_row_is_reproduced(tmp_path):
    row, record = committed(PRESET, LABEL, SEED), made(load_preset(PRESET), LABEL, SEED, tmp_path)
    assert final(record) == due(row["accuracy"])
    assert len(record.rounds) == int(row["rounds"])
    assert record.rounds[-1].uploads == int(row["uploads"])


def test_pairs_of_methods_over_any_rounds(tmp_path):
    """A has .5 and .7 in rounds 1 and 2; B, judged by round 0, has .4 and .5: the differences are .1 and .2."""
    curves = "round,A seed 0,B seed 0,A seed 1,B seed 1\n0,.9,.4,.9,.5\n1,.4,.9,.6,.9\n2,.6,.9,.8,.9\n"
    (tmp_path / "rounds.csv").write_text(curves)
    command = [sys.executable, "-m", "bench.papers.pairs", tmp_path / "rounds.csv", "1-2", "B=0-0"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    cells = [line[6:].split(")")[0].strip() for line in lines[1:]]
    # t(0.975, 1) = 12.7062 times the deviation over the root of 2: 14.1421 / 1.4142 = 10 and 7.0711 / 1.4142 = 5
    assert cells == ["60.00 (-67.06 .. 187.06", "45.00 (-18.53 .. 108.53", "+15.00 (-48.53 .. +78.53"]


def test_the_change_of_a_lead_between_two_sweeps():
    """A leads B by 3 and 5 points in one sweep, by 1 and 1 in the other; C is only in the other."""
    one = pandas.DataFrame({"A": [7.0, 9.0], "B": [4.0, 4.0]})
    other = pandas.DataFrame({"A": [3.0, 2.0], "B": [2.0, 1.0], "C": [0.0, 0.0]})
    found = {pair: list(values) for pair, values in differences(one, other).items()}
    assert found.keys() == {f"{a} - {b}'" for a in "AB" for b in "ABC"} | {"(A - B) - (A - B)'"}
    assert (found["A - B'"], found["(A - B) - (A - B)'"]) == ([5, 8], [2, 4])


def test_counts_over_the_shift_and_after_several_arrivals(tmp_path, capsys):
    """Later by 10 rounds, the seeds need 4 and 7 more (*never* is the remaining 10 rounds): slopes of .4 and .7."""
    rows = '"fast: rounds to recover",{},"seeds: {}",30'
    lines = [f"x-t{shift},{rows.format(0, seeds)}" for shift, seeds in ((10, "1, 3"), (20, "5, never"))]
    (tmp_path / "x.csv").write_text("\n".join(["preset,figure,paper,spread,rounds", *lines]))
    for family, of in counts.of_table(str(tmp_path / "x.csv")).items():
        counts.show(family, of)
    assert [line.split(" (")[0] for line in capsys.readouterr().out.splitlines()] == [
        "x, fast: slope +0.55",
        "x, fast: 20 minus 10 +5.5",
    ]
    accuracy = "\n".join(f"{round},{value},{value}" for round, value in enumerate((0.5, 0.4, 0.6, 0.3, 0.5)))
    (tmp_path / "x-rounds.csv").write_text(f"round,fast seed 0,fast seed 1\n{accuracy}\n")
    counts.arrivals(str(tmp_path / "x-rounds.csv"), [1, 3])
    found = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("fast")]
    assert found == [["2", "2"], ["never", "never"]]


def test_each_method_at_its_best_rate():
    levels = {"A1": (0.1, 0.4), "A2": (0.2, 0.2), "B1": (0.5, 0.6), "B2": (0.7, 0.8), "B3": (0.9,)}  # B3 lacks a seed
    trials = [(f"r={name[1]}", name[0], seed, value) for name, own in levels.items() for seed, value in enumerate(own)]
    best = rates.best_of(pandas.DataFrame(trials, columns=["point", "algorithm", "seed", "accuracy"]))
    assert {label: values.round(9).tolist() for label, values in best.items()} == {"A": [10, 40], "B": [70, 80]}


def test_a_row_of_the_quickstart_is_reproduced(tmp_path):
    experiment = load_preset("quickstart")
    with QUICKSTART.open(encoding="utf-8") as file:
        *_, row = csv.DictReader(file)
    records = [made(experiment, row["algorithm"], seed, tmp_path) for seed in experiment.seeds]
    (came,) = summarise(records).rows
    for figure in ("final", "oscillation"):
        found = getattr(came, figure)
        assert (found.mean, found.deviation) == (due(row[f"{figure}_mean"]), due(row[f"{figure}_std"]))
    assert (came.rounds, len(came.seeds)) == (int(row["rounds"]), int(row["seeds"]))
