"""Every test that tests/README.md names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_named_tests_exist():
    named, path = [], ""
    for file, name in re.findall(r"`([\w/.]*)::(\w+)`", (ROOT / "tests" / "README.md").read_text()):
        path = file or path
        named.append((path, name))
    assert len(named) > 20
    assert [each for each in named if f"\ndef {each[1]}(" not in (ROOT / each[0]).read_text()] == []
