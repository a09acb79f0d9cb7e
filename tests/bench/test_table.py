"""The selection of runs for the README's tables."""

import json
from dataclasses import asdict

import pytest

from bench import machine, table
from bench.line import ALONE, OURS, Line

LINE = Line(
    "sum",
    ratios={"read floor": 0.876, "torch": 2.5, "torch" + ALONE: 1.75},
    targets={"read floor": 0.85, "torch": 2.0},
    seconds={OURS: 0.05, "read floor": 0.0438, "torch": 0.125, "torch" + ALONE: 0.0875},
    quartiles={"read floor": [0.8, 0.9], "torch": [2.4, 2.6], "torch" + ALONE: [1.7, 1.8]},
    after_pause={"torch": 3.0},
    bytes=10**9,
)


def run(folder, isa, when, **changes):
    """A run of one benchmark, as pytest-benchmark writes it."""
    line = asdict(LINE) | changes
    content = {
        "datetime": when,
        "machine_info": machine.describe() | {"isa": isa},
        "benchmarks": [{"fullname": "bench/b.py::bench_sum", "extra_info": {"line": line}}],
    }
    file = folder / f"{isa}-{when}.json"
    file.write_text(json.dumps(content))
    return file


def test_the_newest_run_and_the_best_level_count(tmp_path):
    files = [
        run(tmp_path, "avx2", "2026-01-01"),
        run(tmp_path, "baseline", "2026-01-03", ratios={"read floor": 0.5}),
        run(tmp_path, "baseline", "2026-01-02", ratios={"read floor": 0.4}),
    ]
    text = table.markdown(table.read(files))
    assert "| line | against | baseline | avx2 |" in text
    assert "| sum | read floor | 0.50 | 0.88 |" in text


def test_short_and_disturbed_runs_do_not_count(tmp_path):
    with pytest.raises(SystemExit):
        table.markdown(table.read([run(tmp_path, "avx2", "2026-01-01", short=True)]))
    disturbed = table.markdown(table.read([run(tmp_path, "avx2", "2026-01-02", others=0.5)]))
    assert "| sum (*) |" in disturbed
    assert "no figure to quote" in disturbed
