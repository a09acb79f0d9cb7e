"""One committed row of bench/papers, made again."""

import csv
import json
from pathlib import Path

import pytest
import torch

from fedcore.experiment import load_preset
from fedcore.experiment.loop import run_trial
from fedcore.experiment.records import read
from fedcore.experiment.trial import Trial
from fedcore.reports.summary import final

PAPERS = Path(__file__).parents[2] / "bench" / "papers"
PRESET, LABEL, SEED = "flexible/table3-synthetic-niid-t4", "C", 1


def committed(preset, label, seed):
    with (PAPERS / "flexible-table3-trials.csv").open(encoding="utf-8") as file:
        (row,) = (
            row
            for row in csv.DictReader(file)
            if (row["preset"], row["algorithm"], row["seed"]) == (preset, label, str(seed))
        )
    return row


def test_a_committed_row_comes_out_again(tmp_path):
    row = committed(PRESET, LABEL, SEED)
    experiment = load_preset(PRESET)
    order = [method.label for method in experiment.algorithms].index(LABEL)
    trial = Trial(experiment, order, SEED)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes of a sweep have it
    try:
        run_trial(trial, tmp_path)
    finally:
        torch.set_num_threads(threads)
    record = read(tmp_path / "records" / trial.file_name)
    came, due = final(record), float(row["accuracy"])
    assert len(record.rounds) == int(row["rounds"])
    assert record.rounds[-1].uploads == int(row["uploads"])
    machine = json.loads((PAPERS / "machine.json").read_text(encoding="utf-8"))
    here = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if here == {key: machine[key] for key in here}:
        assert came == due
    else:  # another torch, or other vector instructions, adds in another order, and a few examples change sides
        assert came == pytest.approx(due, abs=0.01)
