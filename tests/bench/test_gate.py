"""The gate fails if a ratio is too low or missing, and every bound names an existing benchmark."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bench import gate

ROOT = Path(__file__).parent.parent.parent
ALLOWED = gate.ALLOWED.read_text()
TEXT = """
[[line]]
bench = "bench/kernels/bench_a.py::bench_a[ring]"
against = "read floor"
least = 0.8
short = 0.4

[[line]]
bench = "bench/kernels/bench_b.py::bench_b"
against = "torch"
least = 2.0
"""
A, B = (("bench/kernels/bench_a.py::bench_a[ring]", "read floor"), ("bench/kernels/bench_b.py::bench_b", "torch"))


class Measured:
    """A fake machine: one dictionary of ratios after another."""

    def __init__(self, *ratios):
        self.ratios, self.asked = list(ratios), []

    def __call__(self, bounds, *, short):
        self.asked.append([bound.bench for bound in bounds])
        return self.ratios.pop(0)


@pytest.mark.parametrize(
    ("runs", "status"),
    [
        ([{A: 0.8, B: 2.0}], 0),
        ([{A: 0.79, B: 9.0}, {A: 0.79}], 1),
        ([{A: 0.5, B: 9.0}, {A: 0.81}], 0),
        ([{A: 0.9}, {}], 1),
        ([{}, {A: 0.9, B: 1.9}], 1),
    ],
    ids=["kept", "short twice", "kept at the second try", "never measured", "another falls short"],
)
def test_exit_status(runs, status):
    assert gate.run(TEXT, Measured(*runs), short=False) == status


def test_a_disturbed_machine_gives_no_result(capsys):
    def measure(bounds, *, short):
        raise gate.DisturbedError("other programs took 80% of the cores")

    assert gate.run(TEXT, measure, short=False) == 3
    assert "not judged: other programs took 80%" in capsys.readouterr().out


def test_only_what_fell_short_is_measured_again():
    measured = Measured({A: 0.9, B: 1.0}, {B: 3.0})
    assert gate.run(TEXT, measured, short=False) == 0
    assert measured.asked == [[A[0], B[0]], [B[0]]]


def test_the_short_form_has_its_own_bounds():
    assert gate.run(TEXT, Measured({A: 0.41}), short=True) == 0
    assert gate.run(TEXT, Measured({A: 0.39}, {A: 0.39}), short=True) == 1


@pytest.mark.parametrize("short", [False, True])
def test_every_bound_of_the_gate_can_fail(short):
    """For each line, if only it is slightly below its bound."""
    bounds = gate.bounds(ALLOWED, short=short)
    kept = {(bound.bench, bound.against): bound.least for bound in bounds}
    assert gate.run(ALLOWED, Measured(kept), short=short) == 0
    for bound in bounds:
        fallen = kept | {(bound.bench, bound.against): bound.least * 0.99}
        assert gate.run(ALLOWED, Measured(fallen, fallen), short=short) == 1


@pytest.mark.parametrize(("ratio", "status"), [(1000, 0), (0, 1)])
def test_the_exit_status_of_the_command(monkeypatch, ratio, status):
    """As make and CI see it."""
    ratios = {(bound.bench, bound.against): ratio for bound in gate.bounds(ALLOWED, short=True)}
    monkeypatch.setattr(gate, "measure", Measured(ratios, ratios))
    monkeypatch.setattr(sys, "argv", ["bench.gate", "--short"])
    with pytest.raises(SystemExit) as end:
        gate.main()
    assert end.value.code == status


def test_every_bound_names_a_benchmark_and_a_rival():
    # In a process, since modules of bench would stay imported. Its environment does not mark it as a worker.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "bench", "--collect-only"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for line in tomllib.loads(ALLOWED)["line"]:
        assert line["bench"] in found
        assert f'"{line["against"]}"' in (ROOT / line["bench"].split("::")[0]).read_text()


def test_an_unknown_argument_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.gate", "--shrot"])
    with pytest.raises(SystemExit, match="--shrot"):
        gate.main()
