"""The table of conditions x methods of a sweep's overview."""

import pytest

from fedcore.sim.reports import write_overview
from fedcore.sim.reports.report import Bold
from fedcore.sim.reports.statistics import interval_of
from fedcore.sim.reports.sweeps import condition, conditions_table
from tests.sim.reports.kit import Page, read_csv


def test_best_method_is_marked_if_the_paired_interval_is_above_zero(record):
    apart = [record("A", 0, seed, [0.5 + 0.1 * seed]) for seed in range(3)]
    apart += [record("B", 1, seed, [0.51 + 0.1 * seed + 0.001 * seed]) for seed in range(3)]  # better for each seed
    apart += [record("C", 2, seed, [0.2]) for seed in range(3)]
    found = condition("p", "", apart)
    assert found.best == "B"
    # 0.6 and the half width t(0.975, 2) * 0.1 / sqrt(3) = 4.302653 * 0.057735 = 0.248414
    assert interval_of(found.values["A"]) == pytest.approx((0.351586, 0.848414), abs=1e-6)
    assert found.cell("A") == "60.0 (35.2 .. 84.8)"
    assert [isinstance(found.cell(label), Bold) for label in "ABC"] == [False, True, False]
    near = [record("A", 0, seed, [0.5]) for seed in range(3)]
    near += [record("B", 1, seed, [0.4 + 0.11 * seed]) for seed in range(3)]  # better only on average
    assert condition("p", "", near).best is None
    one = [record("A", 0, 0, [0.5]), record("B", 1, 0, [0.9])]
    assert (condition("p", "", one).values, condition("p", "", one).best) == ({"A": (0.5,), "B": (0.9,)}, None)
    assert condition("p", "", one).cell("A") == "50.0"
    high = [record("A", 0, seed, [0.9 + 0.1 * seed]) for seed in range(2)]
    assert condition("p", "", high).cell("A").endswith(" .. 100.0)")


def test_missing_method_has_an_empty_cell(record):
    first = condition("p", "", [record("A", 0, 0, [0.5])])
    second = condition("q", "participation.p=0.1", [record("B", 0, 0, [0.25])])
    table = conditions_table([first, second])
    assert list(table.columns) == ["accuracy %", "A", "B"]
    assert table.values.tolist() == [["p", "50.0", "–"], ["q, participation.p=0.1", "–", "25.0"]]


def two_conditions(put):
    for seed in (0, 1, 2):
        for preset, second in (("p", 0.7), ("q", 0.5)):
            put("", "A", 0, seed, [0.6 + 0.01 * seed] * 2, preset=preset)
            put("", "B", 1, seed, [second + 0.01 * seed] * 2, preset=preset)


def test_overview_of_two_presets_has_one_table(tmp_path, put):
    two_conditions(put)
    write_overview(tmp_path)
    text = (tmp_path / "overview.md").read_text()
    assert "| accuracy % | A | B |" in text
    assert "| p | 61.0 (58.5 .. 63.5) | **71.0 (68.5 .. 73.5)** |" in text
    assert "| q | **61.0 (58.5 .. 63.5)** | 51.0 (48.5 .. 53.5) |" in text
    assert text.count("| A |") == 1
    assert "<b>71.0 (68.5 .. 73.5)</b>" in (tmp_path / "overview.html").read_text()
    assert Page(tmp_path / "overview.html").addresses == []
    lines = read_csv(tmp_path / "overview.csv")
    assert [(line["preset"], line["figure"], line["here"], line["best"]) for line in lines] == [
        ("p", "A, accuracy %", "61.00", "0"),
        ("p", "B, accuracy %", "71.00", "1"),
        ("q", "A, accuracy %", "61.00", "1"),
        ("q", "B, accuracy %", "51.00", "0"),
    ]
    assert (lines[0]["low"], lines[0]["high"], lines[0]["spread"]) == ("58.52", "63.48", "± 1.00")


def test_each_problem_has_its_own_best_points(tmp_path, put):
    for p, plain in ((0.1, 0.5), (0.3, 0.8)):
        for lr, more in ((0.1, 0.0), (0.2, 0.1)):
            for seed in (0, 1):
                put(f"participation.p={p},rate.lr={lr}", "A", 0, seed, [plain + more] * 2)
                put(f"participation.p={p},rate.lr={lr}", "B", 1, seed, [plain - more] * 2)
    written = write_overview(tmp_path)
    assert list(written.reports) == ["p, participation.p=0.1", "p, participation.p=0.3"]
    for (name, report), (p, plain) in zip(written.reports.items(), ((0.1, 0.5), (0.3, 0.8)), strict=True):
        a, b = report.summary.rows
        assert (a.final.mean, b.final.mean) == (pytest.approx(plain + 0.1), pytest.approx(plain))
        assert report.summary.notes == (
            f"A: participation.p={p},rate.lr=0.2, the best of 2 points",
            f"B: participation.p={p},rate.lr=0.1, the best of 2 points",
        )
        setting = tmp_path / "p" / "reports" / f"participation.p={p}"
        assert {file.parent for file in report.files} == {setting}
        assert all(file.stat().st_size for file in report.files)
        assert f"{name}, 2 rounds" in (tmp_path / "overview.md").read_text()
        assert f"| {name} | **{100 * plain + 10:.1f} " in (tmp_path / "overview.md").read_text()
    assert Page(tmp_path / "overview.html").addresses == []
    settings = [line["setting"] for line in read_csv(tmp_path / "overview.csv")]
    assert settings == ["participation.p=0.1"] * 2 + ["participation.p=0.3"] * 2


def test_order_of_keys_does_not_matter(tmp_path, put):
    put("participation.p=0.1,partition.alpha=2,rate.lr=0.1", "A", 0, 0, [0.5] * 2)
    put("partition.alpha=2,participation.p=0.1,rate.lr=0.2", "A", 0, 0, [0.6] * 2)
    (report,) = write_overview(tmp_path).reports.values()
    assert report.summary.rows[0].final.mean == pytest.approx(0.6)


def test_problems_are_sorted_by_number(tmp_path, put):
    for k in (10, 2):
        put(f"participation.k={k}", "A", 0, 0, [0.5] * 2)
        (tmp_path / "p" / f"participation.k={k}" / "config.json").write_text(f'{{"description": "the one with {k}."}}')
    assert list(write_overview(tmp_path).reports) == ["p, participation.k=2", "p, participation.k=10"]
    for k in (2, 10):
        page = (tmp_path / "p" / "reports" / f"participation.k={k}" / "report.html").read_text()
        assert [one for one in (2, 10) if f"the one with {one}." in page] == [k]
    settings = [(line["preset"], line["setting"]) for line in read_csv(tmp_path / "overview.csv")]
    assert settings == [("p", "participation.k=2"), ("p", "participation.k=10")]


def test_report_of_a_former_single_problem_is_deleted(tmp_path, put):
    put("participation.k=2", "A", 0, 0, [0.5] * 2)
    write_overview(tmp_path)
    assert (tmp_path / "p" / "report.html").exists()
    put("participation.k=3", "A", 0, 0, [0.7] * 2)
    write_overview(tmp_path)
    assert [path.name for path in (tmp_path / "p").iterdir() if path.is_file()] == []


def test_presets_with_several_problems_are_not_a_family(tmp_path, put):
    for number in (1, 2):
        preset = f"flexible/table3-synthetic-niid-t{number}"
        for clients in (10, 20):
            put(f"partition.clients={clients}", "A", 0, 0, [0.5] * 2, preset=preset)
    assert len(write_overview(tmp_path).reports) == 4
    assert not list(tmp_path.rglob("*over*.png"))


def test_single_condition_has_no_table_of_conditions(tmp_path, put):
    put("", "A", 0, 0, [0.6])
    write_overview(tmp_path)
    assert "Conditions and methods" not in (tmp_path / "overview.md").read_text()
    assert "| A | 60.0 |" in (tmp_path / "overview.md").read_text()
