"""The README's code runs."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_first_example_runs_and_says_what_it_should():
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().rstrip().endswith("True")


@pytest.mark.parametrize("name", ["torch_loop", "nvflare_job", "nvflare_client", "pfl_mifa"])
def test_the_readme_shows_the_examples_as_they_are(name):
    assert (README.parent / "examples" / f"{name}.py").read_text().rstrip() in README.read_text()
