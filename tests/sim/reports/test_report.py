"""The files of a run's report."""

import json
import re

import pytest

from fedcore.errors import MissingDataError
from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment.results import read_folder
from fedcore.sim.experiment.schema import trials
from fedcore.sim.experiment.trial import run_trial
from fedcore.sim.reports import write_report
from fedcore.sim.reports.report import FILES, Config, draw_curves
from tests.sim.reports.kit import Page, write_lines


def write(folder, *records):
    for record in records:
        write_lines(folder / "records" / f"{record.header.algorithm}-{record.header.seed}.jsonl", record)


def test_incomplete_run_has_a_report(tmp_path, record):
    write(
        tmp_path,
        record("A", 0, 0, [0.1, 0.2, 0.3]),
        record("B", 1, 0, [0.2, None], rounds=3),
        record("B", 1, 1, [], rounds=3),
    )
    torn = tmp_path / "records" / "B-0.jsonl"
    torn.write_text(torn.read_text() + '{"round": 2, "act')
    written = write_report(tmp_path)
    assert [path.name for path in written.files] == list(FILES)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert written.summary.notes == (
        "B, seed 0: stopped after 2 of 3 rounds",
        "B, seed 0: the last line of its record was cut off and is left out",
        "B, seed 1: stopped after 0 of 3 rounds",
    )
    assert written.summary.rows[1].difference is not None
    assert written.summary.rows[1].difference.mean == pytest.approx(0.1)


def test_run_without_rounds_has_a_report(tmp_path, record):
    write(tmp_path, record("A", 0, 0, [], rounds=3))
    assert write_report(tmp_path).summary.rows[0].final.mean is None


def test_folder_without_records_is_rejected(tmp_path):
    with pytest.raises(MissingDataError, match="no records found"):
        write_report(tmp_path)


def test_report_notes_that_a_model_waited(tmp_path):
    methods = "algorithms=['MIFA', {name='MIFA', wait=false}]"
    pattern = "participation={name='Bernoulli', p=0.6}"
    for trial in trials(load_preset("quickstart", [methods, pattern, "rounds=10", "seeds=[0]", "local.epochs=1"])):
        run_trial(trial, tmp_path)
    waits, starts = read_folder(tmp_path)
    seen_so_far = [set().union(*(line.active for line in waits.rounds[: t + 1])) for t in range(10)]
    assert [line.pending for line in waits.rounds] == [30 - len(seen) for seen in seen_so_far]
    assert [line.gamma == 0 for line in waits.rounds] == [len(seen) < 30 for seen in seen_so_far]
    assert [line.pending for line in starts.rounds] == [0] * 10
    stayed = sum(len(seen) < 30 for seen in seen_so_far)
    assert 0 < stayed < 10
    (first,) = write_report(tmp_path).summary.notes
    note = f"MIFA: the model stayed as it was in {stayed} of 10 rounds, waiting for clients without any update so far"
    assert first.startswith(note)
    for name in ("table.md", "report.html"):
        assert note in (tmp_path / name).read_text()


def test_shifts_are_arrivals_and_departures():
    participation = load_preset("flexible/figure5-synthetic").tables()["participation"]
    assert shifts({"participation": participation}) == (100, 150, 200)
    departing = load_preset("flexible/figure4-departure-synthetic").tables()["participation"]
    assert shifts({"participation": {"name": "Uniform", "k": 3, "among": departing}}) == (50,)
    assert shifts({}) == shifts({"participation": {"name": "Always"}}) == ()


def shifts(tables):
    return Config.parse("p", json.dumps(tables)).shifts


def test_shift_is_drawn(tmp_path, record):
    records = [record("include", 0, 0, [0.5] * 9), record("exclude", 1, 0, [0.4] * 9)]
    pictures = []
    for when in ((), (4,)):
        draw_curves(records, tmp_path / "curves.png", shifts=when)
        pictures.append((tmp_path / "curves.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_page_is_self_contained(tmp_path, record):
    write(tmp_path, record("FedAvg <b>", 0, 0, [0.5, 0.6]), record("MimiC", 1, 0, [0.6, 0.7]))
    (tmp_path / "config.json").write_text('{"name": "x & y"}')
    write_report(tmp_path)
    page = Page(tmp_path / "report.html")
    assert (page.addresses, page.images, page.tags.count("svg"), page.tags.count("script")) == ([], [], 2, 1)
    assert "link" not in page.tags
    assert "FedAvg <b>" in page.text
    assert '{"name": "x & y"}' in page.text
    text = (tmp_path / "report.html").read_text()
    assert set(re.findall(r"url\((.)|xlink:href=\"(.)", text)) <= {("#", ""), ("", "#")}
    assert "@import" not in text
    assert re.search(r"<details><summary>Configuration</summary><pre>\{", text)


def test_settings_of_a_report(tmp_path, record):
    write(tmp_path, *(record("A", 0, seed, [0.1 * (seed + 1)] * 3) for seed in (0, 1)))
    (tmp_path / "config.json").write_text('{"report": {"formats": ["svg"], "window": 1}, "note": "tuned"}')
    written = write_report(tmp_path, formats=("pdf",))
    assert {path.suffix for path in written.files} == {".md", ".csv", ".tex", ".png", ".pdf", ".html"}
    assert (tmp_path / "loss.pdf").exists()
    assert (written.summary.window, written.summary.notes) == (1, ("tuned",))
    (tmp_path / "curves.pdf").write_bytes(b"of fewer rounds")
    write_report(tmp_path)  # again, as after more rounds
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")
    lines = (tmp_path / "table.tex").read_text().splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrrrrrr}"
    assert lines[4].startswith(r"A & \textbf{15.0 $\pm$ 7.1} & 15.0 $\pm$ 7.1 &")
