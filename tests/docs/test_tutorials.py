"""The tutorials run as programs and print the expected lines; `make docs` executes them as notebooks."""

import contextlib
import io
import re
import runpy
import sys
import tomllib

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.docs.running import restored_registries

EXPECTED = {
    "dropouts": ["clients in rounds 1 to 10: [", "MimiC ", "accuracy 0."],
    "non_iid": [
        "FedAvg,  5 local steps: x = 0.811",
        "SCAFFOLD, 5 local steps: x = 0.909",
        "\n 5 local steps: x = 0.811",
        "MimiC, IID: ",
    ],
    "method": ["keeps_total", "same bits as the built-in method: True"],
    "survival": ["rounds are saved: True and rows are saved: True", "the same bits: True", "as before: True"],
}


def test_every_tutorial_is_listed():
    assert {path.stem for path in (DOCS / "tutorials").glob("*.py")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_tutorial_runs(name, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    monkeypatch.setitem(matplotlib.rcParams, "backend", "agg")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    path = DOCS / "tutorials" / f"{name}.py"
    assert re.search(r"^# %% \[markdown\]\n# # \w", path.read_text(), re.MULTILINE)  # its title
    with restored_registries(), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    for line in EXPECTED[name]:
        assert line in printed.getvalue(), printed.getvalue()


def test_the_quickstart_installs_what_the_tutorials_import():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    simulator, frames = (
        {re.match(r"[\w-]+", package)[0] for package in extras[extra] + extras["torch"]} for extra in ("sim", "pandas")
    )
    texts = [path.read_text() for path in (DOCS / "tutorials").glob("*.py")]
    imported = {name for text in texts for name in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)}
    assert "matplotlib" in imported
    assert imported - sys.stdlib_module_names - {"fedcore", "numpy"} <= simulator
    assert frames <= simulator  # load_results
