"""Reports list the changes of an experiment, and compare only unchanged ones with the paper."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fedcore.sim.experiment import load_preset, load_results
from fedcore.sim.experiment.config import points
from fedcore.sim.reports import write_overview, write_report
from tests.cli.command import invoke
from tests.sim.reports.kit import Page, diamonds, read_csv, title_of

TABLE = "mimic/table3-tau20"


@pytest.fixture
def put_run(put, tmp_path):
    """Writes a run of an experiment with the same accuracies in each round."""

    def put_run(folder, experiment, rounds, methods=("FedAvg", "MimiC"), total=None):
        run = tmp_path / folder
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps(experiment.tables()))
        for order, label in enumerate(methods):
            for seed in experiment.seeds:
                accuracies = [0.5 + order / 10] * rounds
                put("", label, order, seed, accuracies, total, preset=folder, title=experiment.title)
                path = run / "records" / f"{order}-{label}-seed{seed}.jsonl"
                path.write_text(path.read_text().replace(f'"preset": "{folder}"', f'"preset": "{experiment.name}"'))
        return run

    return put_run


def texts_of(run, drawn):
    """The report of a run on the terminal, in Markdown, on the page and in the plot."""
    shown = invoke("report", run)
    assert shown.status == 0
    picture = drawn[-2].axes[0].get_title(loc="left")  # the last is the loss
    markdown = (run / "table.md").read_text()
    page = Page(run / "report.html").text.partition("Configuration")[0]
    return {
        name: " ".join(text.split())
        for name, text in {"terminal": shown.output, "table": markdown, "page": page, "picture": picture}.items()
    }


@pytest.mark.parametrize(
    ("changes", "rounds", "remark", "short"),
    [
        ([], 200, "", ""),
        ([], 7, "", "7 of 200 rounds"),
        (["rounds=10", "seeds=[0]"], 10, "rounds 200 -> 10, seeds 3 -> 1", "10 of 200 rounds, 1 of 3 seeds"),
    ],
)
def test_remarks_of_a_compared_run(put_run, drawn, changes, rounds, remark, short):
    texts = texts_of(put_run("run", load_preset(TABLE, changes), rounds), drawn)
    for name, text in texts.items():
        assert f"changed: {remark}" in text.replace("Changed", "changed") if remark else "changed" not in text.lower()
        assert f"CUT SHORT here: {short}" in text if short else "CUT SHORT" not in text, name
    assert "| MimiC, accuracy % | 75.89 | 60.0 |" in texts["table"]
    assert ("| figure | paper | here, CUT SHORT |" in texts["table"]) == ("here, CUT SHORT" in texts["terminal"])
    assert ("here, CUT SHORT" in texts["terminal"]) == bool(short)
    assert "dotted: the paper's" in texts["picture"]


@pytest.mark.parametrize(("changes", "total"), [(["rounds=15"], None), ([], 500)])
def test_verdict_of_a_short_run_names_its_rounds(put_run, changes, total):
    """The paper does not state its rounds, so the preset's count."""
    experiment = load_preset("momentum/figure5-s10", changes)
    run = put_run("run", experiment, 15, ("SCAFFOLD", "SCAFFOLDM"), total)
    assert invoke("report", run).status == 0
    assert ": shown in 15 of 500 rounds | 10.0 |" in (run / "table.md").read_text()


def test_other_experiment_is_not_compared(put_run, drawn):
    texts = texts_of(put_run("run", load_preset(TABLE, ["local.batch=8", "rounds=10"]), 10), drawn)
    for name, text in texts.items():
        assert "changed: rounds 200 -> 10, local.batch 16 -> 8" in text.replace("Changed", "changed"), name
        assert "75.89" not in text, name
        assert "dotted" not in text, name
        assert ("No comparison with Sun, Mao, Zhang 2023" in text) == (name != "picture"), name


def test_reports_begin_with_what_a_file_has_from_its_preset(put_run, drawn, tmp_path):
    (tmp_path / "mine.toml").write_text('base = "quickstart"\ntitle = "Mine"\n[local]\nepochs = 1\n')
    texts = texts_of(put_run("run", load_preset(tmp_path / "mine.toml"), 3), drawn)
    for name in ("terminal", "table", "page"):
        before, found, after = texts[name].partition("rom quickstart: rounds = 100, ")
        assert found, name
        assert "participation.first_round = all" in after, name
        assert "accuracy" not in before, name
        assert "local.epochs" not in texts[name], name


def test_run_of_an_older_version_lists_no_changes(put_run, drawn):
    run = put_run("run", load_preset(TABLE, ["local.batch=8"]), 200)
    tables = json.loads((run / "config.json").read_text())
    del tables["changes"]
    (run / "config.json").write_text(json.dumps(tables))
    assert "changed" not in texts_of(run, drawn)["terminal"]


def test_damaged_changes_are_reported(put_run):
    run = put_run("run", load_preset(TABLE), 1)
    (run / "config.json").write_text('{"changes": [{"was": 3}]}')
    result = invoke("report", run)
    assert result.status == 2
    assert f"{TABLE}: its config.json is damaged" in result.errors


def test_comparison_uses_the_best_points_of_a_sweep(put_run, tmp_path):
    tried = points(load_preset(TABLE, ["grid={'local.batch'=[16, 8]}", "seeds=[0]"]))
    for point in tried:
        put_run(f"{TABLE}/{point.name}", point.experiment, 200, ("FedAvg",))
    written = write_overview(tmp_path)
    (report,) = written.reports.values()
    assert report.summary.notes == (f"FedAvg: {tried[0].name}, the best of 2 points",)  # equally good, so the first
    assert report.paper.lines
    record = next((tmp_path / TABLE / tried[1].name / "records").iterdir())
    record.write_text(record.read_text().replace('"accuracy": 0.5', '"accuracy": 0.9'))
    written = write_overview(tmp_path)
    (report,) = written.reports.values()
    assert report.paper.lines == ()
    for name in ("overview.md", "overview.html"):
        text = (tmp_path / name).read_text()
        assert "Changed: seeds 3 -&gt; 1, local.batch 16 -&gt; 8." in text.replace(" -> ", " -&gt; ")
        assert "No comparison with" in text
        assert not re.search(r"(<td>|\| )69\.39", text)
    assert [row["paper"] for row in read_csv(tmp_path / "overview.csv")] == [""]


def test_only_the_problem_of_the_paper_is_compared(put_run, tmp_path):
    tried = points(load_preset(TABLE, ["grid={'participation.tau_max'=[20, 50]}", "seeds=[0]"]))
    for point in tried:
        put_run(f"{TABLE}/{point.name}", point.experiment, 200, ("FedAvg",))
    papers, other = write_overview(tmp_path).reports.values()
    assert any(line.paper == "69.39" for line in papers.paper.lines)
    assert other.paper.lines == ()
    assert other.summary.changed == "seeds 3 -> 1, participation.tau_max 20 -> 50"


def test_changed_member_of_a_family_is_not_compared(put_run, tmp_path, drawn):
    for number, changes in ((1, []), (4, ["local.batch=8"])):
        preset = load_preset(f"flexible/table3-synthetic-niid-t{number}", ["seeds=[0]", *changes])
        put_run(preset.name, preset, 3, ("A", "B", "C"))
    write_overview(tmp_path)
    assert "changed: " in title_of(drawn[-1])
    assert "local.batch 20 -> 8" in title_of(drawn[-1])
    papers = [line for axes in drawn[-1].axes for line in diamonds(axes)]
    assert [np.isfinite(line.get_ydata()).sum() for line in papers] == [1] * len(papers)  # of the unchanged member
    assert "CUT SHORT beside the paper: 3 of 200 rounds" in (tmp_path / "overview.md").read_text()


def test_window_is_that_of_the_configuration(put_run, drawn):
    run = put_run("run", load_preset("quickstart", ["seeds=[0]", "report.window=3"]), 12)
    line = run / "records" / "0-FedAvg-seed0.jsonl"
    lines = line.read_text().splitlines(keepends=True)
    lines[-3:] = [text.replace("0.5", new, 1) for text, new in zip(lines[-3:], ("0.0", "0.1", "0.3"), strict=True)]
    line.write_text("".join(lines))
    texts = texts_of(run, drawn)
    assert all("the evaluated rounds among a trial's last 3;" in texts[name] for name in ("terminal", "table", "page"))
    assert "| FedAvg | 13.3 | 30.0 |" in texts["table"]  # of 0, .1 and .3


def test_folder_of_several_runs_is_rejected(put_run, tmp_path):
    for name in ("b", "a"):
        put_run(name, load_preset("quickstart", ["seeds=[0]"]), 3)
    put_run("sweep/quickstart/rate.lr=0.1", load_preset("quickstart", ["seeds=[0]"]), 3)
    put_run("sweep/quickstart/rate.lr=0.2", load_preset("quickstart", ["seeds=[0]"]), 3)
    before = sorted(tmp_path.rglob("*"))
    result = invoke("report", tmp_path)
    assert result.status == 2
    a, b, sweep = (tmp_path / name for name in ("a", "b", "sweep"))
    assert result.errors == (
        f"error: {tmp_path}: holds several runs or sweeps: {a}, {b}, {sweep}; report one of them: fedcore report {a}\n"
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert len(write_overview(sweep).reports) == 1
    assert write_report(a).summary.rows


def test_other_runs_in_a_sweep_are_listed(put_run, tmp_path):
    put_run("quickstart", load_preset("quickstart", ["seeds=[0]"]), 3)
    put_run("mine", load_preset("quickstart", ["seeds=[0]"]), 3)
    result = invoke("report", tmp_path)
    assert result.status == 0
    assert f"left out, since they are no part of this sweep: {tmp_path / 'mine'}" in result.output.replace("\n", " ")


def test_preset_named_records(put_run, tmp_path):
    experiment = load_preset("quickstart", ["seeds=[0]", "name=records"])
    put_run("records", experiment, 3)
    assert invoke("report", tmp_path).status == 0
    assert list(write_overview(tmp_path).reports) == ["records"]
    assert len(load_results(tmp_path)) == 6


def test_command_lists_the_page_of_each_condition(put_run, tmp_path):
    for clients in (10, 20):
        put_run(f"{TABLE}/partition.clients={clients}", load_preset(TABLE, ["seeds=[0]"]), 3)
    put_run("quickstart", load_preset("quickstart", ["seeds=[0]"]), 3)
    result = invoke("report", tmp_path)
    assert result.status == 0
    pages = [line.removeprefix("wrote ") for line in result.output.splitlines() if line.endswith("report.html")]
    assert pages == [str(report.page) for report in write_overview(tmp_path).reports.values()]
    assert len(pages) == 3
    assert all(Path(page).is_file() for page in pages)


@pytest.mark.parametrize("preset", ["../elsewhere", "/elsewhere", "quickstart/../../elsewhere"])
def test_preset_outside_of_the_sweep_writes_nothing(put_run, tmp_path, preset):
    run = put_run("sweep/quickstart", load_preset("quickstart", ["seeds=[0]"]), 3)
    for path in (run / "records").iterdir():
        path.write_text(path.read_text().replace('"preset": "quickstart"', f'"preset": "{preset}"'))
    before = sorted(tmp_path.rglob("*"))
    assert invoke("report", tmp_path / "sweep").status == 2
    assert sorted(tmp_path.rglob("*")) == before
