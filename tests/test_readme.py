"""The README's code runs."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_first_example_runs_and_says_what_it_should():
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().rstrip().endswith("True")
