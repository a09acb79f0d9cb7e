"""Every set of replies in every installed framework: fedcore's average is the framework's."""

import sys

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
    right,
)
from tests.conformance.table import PAGE, cell, declared, page, run

SETS = {case.name: case for case in CASES}
ROWS = [pytest.param(name, case, id=f"{name}-{case.name}") for name in FRAMEWORKS for case in CASES]


def installed(name):
    """The framework's module; the test is skipped without the framework, and `make conformance` runs its rows."""
    package = declared(name)["package"]
    pytest.importorskip(package, reason=f"needs {package}: `make conformance` runs its rows")
    return framework(name)


@pytest.mark.parametrize(("name", "case"), ROWS)
def test_the_row_is_as_the_table_has_it(name, case):
    """The framework's own result is compared as well, so that no fault of fedcore hides a wrong entry about it."""
    module, due = installed(name), expected(name, case)
    row, theirs = compare(name, case)
    if row.state == "not run":
        pytest.skip(f"{row.why}: `make conformance` runs the row")
    assert row == due, f"{row.state}: {row.why}"
    if due.state == "cannot":
        return
    case = of_framework(module, case)
    apart = isinstance(theirs, Exception) or difference(right(case), theirs, case)
    if due.state == "equal":
        assert not isinstance(theirs, Exception)
        assert not apart or not all(one.counts for one in case.replies), apart
    else:
        assert apart


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_names_sets_that_exist_and_at_most_six_deviations(name):
    module = installed(name)
    named = [*module.DEVIATES, *module.WRONG, *module.CANNOT]
    assert len(named) == len(set(named)) < len(SETS) == len(CASES)
    assert set(named) <= SETS.keys()
    deviations = set(module.DEVIATES.values())
    assert deviations <= DEVIATIONS.keys()
    assert len(deviations) <= 6
    assert declared(name) == {"name": module.NAME, "package": module.PACKAGE, "extra": module.EXTRA}


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
    assert found["rows"] == {case.name: vars(compare("aggregate", case)[0]) for case in CASES}


def test_the_page_shows_rows_to_mend():
    rows = {case.name: vars(Row("equal")) for case in CASES}
    rows["two sites, 20 and 1,000"] = vars(Row("fedcore is wrong", "w: 1, 2"))
    written = page([{"name": "one", "rows": rows, "versions": {"one": "1"}}])
    assert "| two sites, 20 and 1,000 | **fedcore is wrong** |" in written
    assert "- one, two sites, 20 and 1,000: w: 1, 2" in written
    assert cell(vars(Row("deviates", "no duplicates"))) == "no duplicates"
