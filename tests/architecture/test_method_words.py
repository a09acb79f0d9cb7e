"""No room but ``fedcore/algorithms`` compares a word of a method's table; others ask its properties."""

import ast
from functools import cached_property
from pathlib import Path

import pytest

import fedcore
from fedcore.algorithms import Algorithm, algorithm

ROOT = Path(fedcore.layout.__file__).parent
FILES = [file for file in sorted(ROOT.rglob("*.py")) if file.parent.name != "algorithms"]

CONSTANTS = {name for name, value in vars(algorithm).items() if name.isupper() and isinstance(value, str)}
ENTRIES = {"anchor", "placement", "second_vector", "unit"}
"""Entries of the table that are words."""
LOOKED_UP = {"hasattr", "getattr"}
METHODS = {"algorithm", "method"}
"""Names that methods have elsewhere."""


def test_these_are_the_words():
    assert {"MEAN_GRADIENT", "ROW_CHANGE"} <= CONSTANTS
    words = {
        name
        for name, entry in vars(Algorithm).items()
        if isinstance(entry, cached_property) and entry.func.__annotations__["return"] in WORDS
    }
    assert words - {"averaging_option"} == ENTRIES  # it is shown, as it is


WORDS = (str, str | None, algorithm.Anchor | None, algorithm.Placement, algorithm.Unit)


def compared(source):
    """What a module compares of the words, or looks for in a method by a name in a string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _last(node.func) in LOOKED_UP:
            if _last(node.args[0]) in METHODS and isinstance(node.args[1], ast.Constant):
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            named = {getattr(part, "id", getattr(part, "attr", None)) for side in sides for part in ast.walk(side)}
            text = any(
                isinstance(part, ast.Constant) and isinstance(part.value, str)
                for side in sides
                for part in ast.walk(side)
            )
            if named & CONSTANTS or (text and any(getattr(side, "attr", None) in ENTRIES for side in sides)):
                yield ast.unparse(node)


def _last(node):
    return getattr(node, "attr", getattr(node, "id", None))


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("second not in (None, MEAN_GRADIENT)", True),
        ("method.second_vector == algorithms.ROW_CHANGE", True),
        ("server.algorithm.unit == 'model'", True),
        ("'client' == method.placement", True),
        ("hasattr(algorithm, 'units')", True),
        ("getattr(server.algorithm, 'beta', 0)", True),
        ("method.averages", False),
        ("method.second_vector is None", False),
        ("is_made_here(second_vector)", False),
        ("replace(order, second_vector=MEAN_GRADIENT)", False),
    ],
)
def test_a_comparison_is_found(source, is_found):
    assert bool(list(compared(source))) == is_found


def test_no_other_room_compares_a_word():
    found = [f"{file.relative_to(ROOT)}: {what}" for file in FILES for what in compared(file.read_text())]
    assert found == []
