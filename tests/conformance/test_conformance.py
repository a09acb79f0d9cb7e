"""Every set of replies in every framework that is installed here: fedcore's average is the framework's."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest

from tests.conformance.cases import CASES
from tests.conformance.rows import (
    DEVIATIONS,
    FRAMEWORKS,
    Row,
    bound,
    compare,
    difference,
    expected,
    framework,
    numpy_of,
    of_framework,
    outcome,
    right,
)
from tests.conformance.table import PAGE, cell, declared, page, run

SETS = {case.name: case for case in CASES}
ROWS = [pytest.param(name, case, id=f"{name}-{case.name}") for name in FRAMEWORKS for case in CASES]


def installed(name):
    """The framework's module; without the framework the test is left out, and `make conformance` runs the rows."""
    package = declared(name)["package"]
    pytest.importorskip(package, reason=f"needs {package}: `make conformance` runs its rows")
    return framework(name)


@pytest.mark.parametrize(("name", "case"), ROWS)
def test_the_row_is_as_it_should_be(name, case):
    installed(name)
    row = compare(name, case)
    if row.state == "not run":
        pytest.skip(f"{row.why}: `make conformance` runs the row")
    assert row == expected(name, case), f"{row.state}: {row.why}"


@pytest.mark.parametrize(("name", "case"), ROWS)
@pytest.mark.filterwarnings("ignore")
def test_the_framework_gives_what_the_table_says(name, case):
    """This holds whatever fedcore gives, so that no fault of fedcore's hides a wrong word about a framework."""
    module, state = installed(name), expected(name, case).state
    if state == "cannot" or (case.needs and not find_spec(case.needs)):
        return  # the row's own test leaves it out by name
    case = of_framework(module, case)
    theirs = outcome(module.theirs, case)
    apart = isinstance(theirs, Exception) or difference(right(case), theirs, case)
    if state == "equal":
        assert not isinstance(theirs, Exception)
        assert not apart or not all(one.counts for one in case.replies), apart
    else:
        assert apart


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_names_sets_that_exist_and_at_most_six_deviations(name):
    module = installed(name)
    named = [*module.DEVIATES, *module.WRONG, *module.CANNOT]
    assert len(named) == len(set(named)) < len(SETS)
    assert set(named) <= SETS.keys()
    deviations = set(module.DEVIATES.values())
    assert deviations <= DEVIATIONS.keys()
    assert len(deviations) <= 6
    assert declared(name) == {"name": module.NAME, "package": module.PACKAGE, "extra": module.EXTRA}


def test_the_sets_are_many_and_of_different_names():
    assert len(SETS) == len(CASES) >= 24


@pytest.mark.parametrize("case", [case for case in CASES if case.needs is None], ids=lambda case: case.name)
def test_a_difference_past_rounding_is_seen(case):
    due = right(case)
    assert difference(due, due, case) is None
    moved = {**due, "w": (due["w"].astype(np.float64) * (1 + 8 * bound(case))).astype(due["w"].dtype)}
    assert difference(due, moved, case).startswith("w: ")
    assert difference(due, {**due, "w": due["w"].astype(np.complex64)}, case).startswith("w: ")
    assert difference(due, {"w": due["w"]}, case).startswith("tensors ")


def test_the_right_average_of_three_numbers_by_hand():
    case = SETS["a counter in differences"]
    first, second = (numpy_of(one.tensors["w"]) for one in case.replies)
    due = right(case)
    np.testing.assert_allclose(due["w"], numpy_of(case.x0["w"]) + (first + second) / 2, rtol=1e-6)
    assert due["seen"] == 8
    assert due["seen"].dtype == np.int64


def test_the_page_has_a_row_of_each_set_and_a_column_of_each_framework():
    lines = PAGE.read_text().splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert [line[0] for line in table[1:]] == list(SETS)
    assert {len(line) for line in table} == {1 + len(FRAMEWORKS)}
    assert table[0][1:] == [declared(name)["name"] for name in FRAMEWORKS]


def test_an_interpreter_runs_the_rows_of_a_framework():
    found = run("aggregate", sys.executable)
    assert found["name"] == declared("aggregate")["name"]
    assert "torch" in found["versions"]
    assert found["rows"] == {case.name: vars(compare("aggregate", case)) for case in CASES}


def test_the_page_shows_what_is_to_mend():
    rows = {case.name: vars(Row("equal")) for case in CASES}
    rows["two sites, 20 and 1,000"] = vars(Row("ours is wrong", "w: 1, 2"))
    written = page([{"name": "one", "rows": rows, "versions": {"one": "1"}}])
    assert "| two sites, 20 and 1,000 | **to mend** |" in written
    assert "- one, two sites, 20 and 1,000: w: 1, 2" in written
    assert cell(vars(Row("deviates", "once"))) == "once"
