"""Whatever was changed is said wherever a title stands; a paper's figures stand beside its own experiment alone."""

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from fedcore.experiment import load_preset, read_records
from fedcore.experiment.presets import points
from fedcore.reports import write_overview, write_report
from tests.cli.command import invoke
from tests.reports.test_page import parsed

TABLE = "mimic/table3-tau20"


@pytest.fixture
def put(tmp_path, record):
    """Writes the run of a preset with some changes, as it would be after so many rounds."""

    def put(folder, experiment, rounds, methods=("FedAvg", "MimiC"), asked=None):
        run = tmp_path / folder
        (run / "records").mkdir(parents=True)
        (run / "config.json").write_text(json.dumps(experiment.tables()))
        for order, label in enumerate(methods):
            for seed in experiment.seeds:
                made = record(label, order, seed, [0.5 + order / 10] * rounds, asked)
                header = replace(made.header, preset=experiment.name, title=experiment.title)
                lines = "".join(json.dumps(asdict(line)) + "\n" for line in (header, *made.rounds))
                (run / "records" / f"{order}-{seed}.jsonl").write_text(lines)
        return run

    return put


def everywhere(run, drawn):
    """What a run's report says: on the terminal, in Markdown, on the page, in the picture."""
    shown = invoke("report", run)
    assert shown.status == 0
    picture = drawn[-2].axes[0].get_title(loc="left")  # the last is the loss
    markdown = (run / "table.md").read_text()
    page = parsed(run / "report.html").text.partition("Configuration")[0]
    return {
        name: " ".join(text.split())
        for name, text in {"terminal": shown.output, "table": markdown, "page": page, "picture": picture}.items()
    }


def test_a_preset_as_it_is_says_nothing(put, drawn):
    texts = everywhere(put("run", load_preset(TABLE), 200), drawn)
    for name, text in texts.items():
        assert "changed" not in text.lower(), name
        assert "CUT SHORT" not in text, name
    assert "| MimiC, accuracy % | 75.89 | 60.0 | ± 0.0 | 3 |" in texts["table"]
    assert "dotted: the paper's" in texts["picture"]


def test_a_run_that_was_made_shorter_is_marked_and_stays_beside_the_paper(put, drawn):
    texts = everywhere(put("run", load_preset(TABLE, ["rounds=10", "seeds=[0]"]), 10), drawn)
    for name, text in texts.items():
        assert "changed: rounds 200 -> 10, seeds 3 -> 1" in text.replace("Changed", "changed"), name
        assert "CUT SHORT here: 10 of 200 rounds, 1 of 3 seeds" in text, name
    assert "| figure | paper | here, CUT SHORT |" in texts["table"]
    assert "here, CUT SHORT" in texts["terminal"]


def test_a_run_that_was_stopped_is_cut_short_too(put, drawn):
    assert "CUT SHORT here: 7 of 200 rounds" in everywhere(put("run", load_preset(TABLE), 7), drawn)["terminal"]


@pytest.mark.parametrize(("changes", "asked"), [(["rounds=15"], None), ([], 500)])
def test_what_a_short_run_shows_is_said_to_be_shown_by_it(put, changes, asked):
    """Of the presets' rounds, where the paper does not say how many it had: made shorter, or stopped."""
    experiment = load_preset("momentum/figure5-s10", changes)
    run = put("run", experiment, 15, ("SCAFFOLD", "SCAFFOLDM"), asked)
    assert ": shown in 15 of 500 rounds" in " ".join(invoke("report", run).output.split())


def test_another_experiment_is_not_compared_with_the_paper(put, drawn):
    texts = everywhere(put("run", load_preset(TABLE, ["local.batch=8", "rounds=10"]), 10), drawn)
    for name, text in texts.items():
        assert "changed: rounds 200 -> 10, local.batch 16 -> 8" in text.replace("Changed", "changed"), name
        assert "75.89" not in text, name
        assert "dotted" not in text, name
        assert ("No comparison with Sun, Mao, Zhang 2023" in text) == (name != "picture"), name


def test_a_run_of_an_older_version_does_not_tell(put, drawn):
    run = put("run", load_preset(TABLE, ["local.batch=8"]), 200)
    tables = json.loads((run / "config.json").read_text())
    del tables["changes"]
    (run / "config.json").write_text(json.dumps(tables))
    assert "changed" not in everywhere(run, drawn)["terminal"]


def test_damaged_changes_are_named(put):
    run = put("run", load_preset(TABLE), 1)
    (run / "config.json").write_text('{"changes": [{"was": 3}]}')
    result = invoke("report", run)
    assert result.status == 2
    assert f"{TABLE}: its config.json is damaged" in result.errors


def test_of_a_sweep_the_chosen_points_count(put, tmp_path):
    tried = points(load_preset(TABLE, ["grid={'local.batch'=[16, 8]}", "seeds=[0]"]))
    for point in tried:
        put(f"{TABLE}/{point.name}", point.experiment, 200, ("FedAvg",))
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
        assert "69.39" not in text
    with (tmp_path / "overview.csv").open() as file:
        assert [row["paper"] for row in csv.DictReader(file)] == [""]


def test_of_two_problems_the_papers_own_is_compared_with_it(put, tmp_path):
    tried = points(load_preset(TABLE, ["grid={'participation.tau_max'=[20, 50]}", "seeds=[0]"]))
    for point in tried:
        put(f"{TABLE}/{point.name}", point.experiment, 200, ("FedAvg",))
    papers, other = write_overview(tmp_path).reports.values()
    assert any(line.paper == "69.39" for line in papers.paper.lines)
    assert other.paper.lines == ()
    assert other.summary.changed == "seeds 3 -> 1, participation.tau_max 20 -> 50"


def test_a_family_has_no_paper_where_it_is_another_experiment(put, tmp_path, drawn):
    for number, changes in ((1, []), (4, ["local.batch=8"])):
        preset = load_preset(f"flexible/table3-synthetic-niid-t{number}", ["seeds=[0]", *changes])
        put(preset.name, preset, 3, ("A", "B", "C"))
    write_overview(tmp_path)
    family = drawn[-1].axes[0].get_title(loc="left").replace("\n", " ")
    assert "changed: " in family
    assert "local.batch 20 -> 8" in family
    papers = [line for axes in drawn[-1].axes for line in axes.lines if line.get_marker() == "D"]
    assert [np.isfinite(line.get_ydata()).sum() for line in papers] == [1] * len(papers)  # of the one that is as it was
    assert "CUT SHORT beside the paper: 3 of 200 rounds" in (tmp_path / "overview.md").read_text()


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        (12, "mean over the last 10 evaluated rounds;"),
        (5, "mean over the 5 evaluated rounds there are;"),
        (1, "mean over the one evaluated round there is;"),
    ],
)
def test_a_mean_says_over_how_many_rounds_it_is(put, drawn, rounds, words):
    run = put("run", load_preset("quickstart", ["seeds=[0]"]), rounds)
    texts = everywhere(run, drawn)
    assert all(words in texts[name] for name in ("terminal", "table", "page"))
    line = run / "records" / "0-0.jsonl"
    if rounds == 12:
        line.write_text("".join(line.read_text().splitlines(keepends=True)[:4]))
        words = "mean over the last 10 evaluated rounds, or as many as there are (from 3 on);"
        assert words in everywhere(run, drawn)["table"]


def test_the_folder_of_several_runs_names_them(put, tmp_path):
    for name in ("b", "a"):
        put(name, load_preset("quickstart", ["seeds=[0]"]), 3)
    put("sweep/quickstart/rate.lr=0.1", load_preset("quickstart", ["seeds=[0]"]), 3)
    put("sweep/quickstart/rate.lr=0.2", load_preset("quickstart", ["seeds=[0]"]), 3)
    before = sorted(tmp_path.rglob("*"))
    result = invoke("report", tmp_path)
    assert result.status == 2
    a, b, sweep = (tmp_path / name for name in ("a", "b", "sweep"))
    assert result.errors == (
        f"error: {tmp_path}: expected a run or a sweep, got the folder of {a}, {b}, {sweep}; "
        f"report one of them: fedcore report {a}\n"
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert len(write_overview(sweep).reports) == 1
    assert write_report(a).summary.rows


def test_beside_a_sweep_s_presets_other_runs_are_left_out_and_named(put, tmp_path):
    put("quickstart", load_preset("quickstart", ["seeds=[0]"]), 3)
    put("mine", load_preset("quickstart", ["seeds=[0]"]), 3)
    result = invoke("report", tmp_path)
    assert result.status == 0
    assert f"left out, since they are no part of this sweep: {tmp_path / 'mine'}" in result.output.replace("\n", " ")


def test_a_preset_called_as_the_folder_of_records_is_reported_too(put, tmp_path):
    experiment = load_preset("quickstart", ["seeds=[0]", "name=records"])
    put("records", experiment, 3)
    assert invoke("report", tmp_path).status == 0
    assert list(write_overview(tmp_path).reports) == ["records"]
    assert len(read_records(tmp_path)) == 6


def test_a_sweep_s_report_says_where_each_condition_s_page_is(put, tmp_path):
    for clients in (10, 20):
        put(f"{TABLE}/partition.clients={clients}", load_preset(TABLE, ["seeds=[0]"]), 3)
    put("quickstart", load_preset("quickstart", ["seeds=[0]"]), 3)
    result = invoke("report", tmp_path)
    assert result.status == 0
    pages = [line.removeprefix("wrote ") for line in result.output.splitlines() if line.endswith("report.html")]
    assert pages == [str(report.page) for report in write_overview(tmp_path).reports.values()]
    assert len(pages) == 3
    assert all(Path(page).is_file() for page in pages)


@pytest.mark.parametrize("preset", ["../elsewhere", "/elsewhere", "quickstart/../../elsewhere"])
def test_a_record_that_names_a_folder_elsewhere_writes_nothing_there(put, tmp_path, preset):
    run = put("sweep/quickstart", load_preset("quickstart", ["seeds=[0]"]), 3)
    for path in (run / "records").iterdir():
        path.write_text(path.read_text().replace('"preset": "quickstart"', f'"preset": "{preset}"'))
    before = sorted(tmp_path.rglob("*"))
    assert invoke("report", tmp_path / "sweep").status == 2
    assert sorted(tmp_path.rglob("*")) == before
