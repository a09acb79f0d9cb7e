"""The native reader of updates knows their fields by place, and so does its twin by name."""

import re
from pathlib import Path

import numpy as np
import pytest

from fedcore import Update, reference
from fedcore.native import core

SOURCE = Path(__file__).parents[2] / "csrc" / "bindings" / "bind_plain_updates.cpp"
Y = np.ones(3, np.float32)
PLAIN = {"client": 1, "model": Y, "steps": 2}
ARGUMENTS = (Update, 3, 0.5, 10, 10, False, 1.0)


def test_the_native_names_are_the_fields_in_their_order():
    names = re.search(r"enum Field \{(.*?)\}", SOURCE.read_text(), re.S)[1]
    *found, count = [name.strip() for name in names.split(",")]
    assert [name.removeprefix("k").lower() for name in found] == list(Update._fields)
    assert count == "kFields"


@pytest.mark.parametrize("field", Update._fields)
def test_a_field_out_of_the_plain_is_seen_by_both(field):
    """Each field in turn: what is read at its place is what stands there under its name."""
    odd = {
        "client": "a",
        "model": Y.astype(np.float64),
        "steps": 11,
        "examples": 11,
        "lr": 0.25,
        "control": Y,
        "count": 2,
        "round": 0,
        "delta": Y,
        "gradient": Y,
        "keep": True,  # says nothing here
    }
    for read in (core.read_plain_updates, reference.read_plain_updates):
        assert read([Update(**PLAIN)], *ARGUMENTS) is not None
        read_odd = read([Update(**PLAIN | {field: odd[field]})], *ARGUMENTS)
        assert (read_odd is None) == (field != "keep")
