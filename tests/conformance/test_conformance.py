"""Every set of replies in every installed framework: fedcore's average is the framework's."""

import sys

import pytest

from tests.conformance.cases import CASES
from tests.conformance.rows import FRAMEWORKS, compare, difference, expected, framework, of_framework, right
from tests.conformance.table import PAGE, declared, run

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
