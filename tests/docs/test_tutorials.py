"""The tutorials run as programs, and say what they should; `make docs` executes them as notebooks."""

import contextlib
import io
import re
import runpy

import pytest

from tests.docs.pages import DOCS
from tests.docs.running import forgotten

DUE = {
    "dropouts": ["clients in rounds 1 to 10: [", "MimiC ", "accuracy 0."],
    "method": ["say keeps_total = True", "own has the same bits: True"],
    "survival": ["rounds are there: True and clients are remembered: True", "the same bits: True", "as before: True"],
}


def test_every_tutorial_is_run():
    assert {path.stem for path in (DOCS / "tutorials").glob("*.py")} == DUE.keys()


@pytest.mark.parametrize("name", DUE)
def test_the_tutorial_runs(name, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    monkeypatch.setitem(matplotlib.rcParams, "backend", "agg")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    with forgotten(), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(DOCS / "tutorials" / f"{name}.py"), run_name="__main__")
    for due in DUE[name]:
        assert due in printed.getvalue(), printed.getvalue()


@pytest.mark.parametrize("name", DUE)
def test_the_tutorial_begins_with_its_title(name):
    text = (DOCS / "tutorials" / f"{name}.py").read_text()
    assert re.search(r"^# %% \[markdown\]\n# # \w", text, re.MULTILINE)
