"""The report of a sweep: the best point of each algorithm, and the overview."""

import json
import re
from pathlib import Path

import pytest

from fedcore.errors import MissingDataError
from fedcore.sim.reports import is_sweep, write_overview
from fedcore.sim.reports.report import FILES
from tests.sim.reports.kit import Page, read_csv

PAPERS = Path(__file__).parents[3] / "bench" / "papers"


def test_each_algorithm_has_its_best_point(tmp_path, put):
    for point, plain, momentum in (("lr=0.1", 0.6, 0.5), ("lr=0.2", 0.5, 0.7), ("lr=0.3", 0.9, 0.9)):
        for seed in (0, 1):
            whole = None if point != "lr=0.3" or seed == 0 else 9  # the third point is incomplete
            put(point, "FedAvg", 0, seed, [plain + 0.01 * seed] * 3, whole)
            put(f"{point},beta=0.5", "FedAvgM", 0, seed, [momentum] * 3, whole)
    assert is_sweep(tmp_path)
    written = write_overview(tmp_path)
    fedavg, momentum = written.reports["p"].summary.rows
    assert (fedavg.algorithm, fedavg.final.mean) == ("FedAvg", pytest.approx(0.605))
    assert (momentum.algorithm, momentum.final.mean) == ("FedAvgM", pytest.approx(0.7))
    assert momentum.difference.mean == pytest.approx(0.095)
    assert written.reports["p"].summary.notes == (
        "FedAvg: lr=0.1, the best of 2 complete points of 3",
        "FedAvgM: lr=0.2,beta=0.5, the best of 2 complete points of 3",
    )
    assert {path.name for path in (tmp_path / "p").iterdir() if path.is_file()} == set(FILES)
    trials = read_csv(tmp_path / "trials.csv")
    assert len(trials) == 12
    assert float(trials[0].pop("loss")) == pytest.approx(0.4)
    columns = ("preset", "point", "algorithm", "seed", "rounds", "accuracy", "last_round", "uploads", "seconds")
    expected = ("p", "lr=0.1", "FedAvg", "0", "3", "0.6", "0.6", "3", "1.5")
    assert trials[0] == dict(zip(columns, expected, strict=True))


def test_no_point_is_best_if_no_model_moved(tmp_path, put):
    for point in ("lr=0.1", "lr=0.2"):
        put(point, "FedAvg", 0, 0, [0.5] * 3)
        put(point, "MIFA", 1, 0, [0.1] * 3, pending=2)
    best, stuck, waits = write_overview(tmp_path).reports["p"].summary.notes
    assert best == "FedAvg: lr=0.1, the best of 2 points"
    assert stuck == "MIFA: lr=0.1, but no point is best: no model moved at any"
    assert waits.startswith("MIFA: the model stayed as it was in 3 of 3 rounds")
    assert waits in (tmp_path / "overview.md").read_text()
    put("lr=0.2", "MIFA", 1, 0, [0.2] * 3, pending=0)
    assert write_overview(tmp_path).reports["p"].summary.notes[1] == "MIFA: lr=0.2, the best of 2 points"


def test_notes_and_verdicts_name_best_values_at_an_end(tmp_path, put):
    """Cheng et al., Figure 1(c), by the committed trials from .01 on: all best rates and betas are at an end."""
    for row in read_csv(PAPERS / "momentum-s1-trials.csv"):
        rate, _, beta = row["point"].removeprefix("rate.lr=").partition(",beta=")
        if float(rate) >= 0.01 and beta in ("", "0.2", "0.5"):
            put(row["point"], row["algorithm"], 0, int(row["seed"]), [float(row["accuracy"])], preset=row["preset"])
    report = write_overview(tmp_path).reports["momentum/figure1c"]
    assert {note.partition(", the best")[2] for note in report.summary.notes} == {
        " of 4 points, at an end of the values of rate.lr: try further ones",
        " of 8 points, at an end of the values of rate.lr and beta: try further ones",
    }
    for line, plain in zip(report.paper.lines, ("FedAvg", "SCAFFOLD"), strict=True):
        assert re.search(rf"contradicted, .*{plain}M \(rate.lr, beta\), {plain} \(rate.lr\)$", line.spread)


def test_a_best_point_within_the_values_has_no_note(tmp_path, put):
    for lr, accuracy in ((0.05, 0.5), (0.1, 0.6), (0.2, 0.5)):
        put(f"lr={lr},beta=0.5", "MimiC", 1, 0, [accuracy])
    assert write_overview(tmp_path).reports["p"].summary.notes == ("MimiC: lr=0.1,beta=0.5, the best of 3 points",)


def test_point_without_a_seed_of_another_is_incomplete(tmp_path, put):
    put("lr=0.1", "FedAvg", 0, 0, [0.7])
    put("lr=0.1", "FedAvg", 0, 1, [0.3])
    put("lr=0.2", "FedAvg", 0, 0, [0.6])  # its second seed has not begun
    summary = write_overview(tmp_path).reports["p"].summary
    assert (summary.notes, summary.rows[0].seeds) == (("FedAvg: lr=0.1, the best of 1 complete point of 2",), (0, 1))


def test_page_has_the_configuration_of_the_best_point(tmp_path, put):
    for point, accuracy in (("lr=0.1", 0.5), ("lr=0.2", 0.6)):
        put(point, "FedAvg", 0, 0, [accuracy])
        (tmp_path / "p" / point / "config.json").write_text(json.dumps({"description": f"at {point}"}))
    write_overview(tmp_path)
    page = (tmp_path / "p" / "report.html").read_text()
    assert ("at lr=0.2" in page, "at lr=0.1" in page) == (True, False)


def test_changes_at_different_best_points_name_the_method(tmp_path, put):
    for lr, one, other in ((0.1, 0.5, 0.6), (0.2, 0.6, 0.5)):
        put(f"lr={lr}", "FedAvg", 0, 0, [one])
        changes = [{"key": "local.batch", "was": 8, "now": 4}, {"key": "rate.lr", "was": 0.3, "now": lr}]
        put(f"lr={lr}", "MimiC", 1, 0, [other]).joinpath("config.json").write_text(json.dumps({"changes": changes}))
    named = "local.batch 8 -> 4, algorithms.FedAvg.rate.lr 0.3 -> 0.2, algorithms.MimiC.rate.lr 0.3 -> 0.1"
    assert write_overview(tmp_path).reports["p"].summary.changed == named


def test_algorithm_without_a_complete_point_is_omitted(tmp_path, put):
    put("lr=0.1", "FedAvg", 0, 0, [0.6], rounds=3)
    put("lr=0.2", "FedAvg", 0, 0, [0.7], rounds=3)
    put("", "MIFA", 1, 0, [0.7], rounds=3, preset="q")  # a single point
    varied = {"family": "mine/figure", "title": "Mine", "label": "p", "value": 0.1}
    (tmp_path / "q" / "config.json").write_text(json.dumps({"pictures": {"varied": varied}}))
    written = write_overview(tmp_path)
    assert list(written.reports) == ["q"]
    left_out = ("p: left out: FedAvg: no point is complete", "q: left out over p, as trials are not finished: MIFA")
    assert written.notes == left_out
    assert all(note in (tmp_path / "overview.md").read_text() for note in left_out)
    with pytest.raises(MissingDataError, match="no records found"):
        write_overview(tmp_path / "p" / "records")


def test_overview_compares_with_the_paper(tmp_path, put):
    for label, order, value in (("A", 0, 0.5), ("B", 1, 0.6), ("C", 2, 0.65)):
        put("", label, order, 0, [value] * 3, preset="flexible/table3-synthetic-niid-t2")
    write_overview(tmp_path)
    rows = [(row["figure"], row["paper"], row["here"]) for row in read_csv(tmp_path / "overview.csv")]
    assert rows == [("B - A, points", "+9.6", "10.00"), ("C - B, points", "+1.5", "5.00")]
    text = (tmp_path / "overview.md").read_text()
    assert "| B - A, points | +9.6 | 10.0 | one seed | 10.0 | 1 |" in text
    assert "Table 3; 200 rounds." in text
    assert "flexible/table3-synthetic-niid-t2, 3 rounds, seed 0." in text
    assert "| C | 65.0 | 65.0 | +15.0 |" in text  # the comparison with the paper has no accuracies
    page = Page(tmp_path / "overview.html")
    assert (page.tags.count("svg"), page.addresses) == (2, [])  # accuracy and loss


def test_presets_are_sorted_by_number(tmp_path, put):
    for number in (100, 5, 10):
        for point in ("a", "b"):
            put(point, "A", 0, 0, [0.5], preset=f"s{number}")
    written = write_overview(tmp_path)
    assert list(written.reports) == ["s5", "s10", "s100"]
    assert written.reports["s5"].summary.notes == ("A: a, the best of 2 points",)
