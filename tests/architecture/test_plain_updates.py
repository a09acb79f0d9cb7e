"""The native reader, which reads an update's fields by position, agrees with the oracle, which reads them by name."""

import re
from pathlib import Path

import numpy as np
import pytest

from fedcore import Update
from fedcore.arrays import core
from tests import oracle

SOURCE = Path(__file__).parents[2] / "csrc" / "bindings" / "bind_plain_updates.cpp"
Y = np.ones(3, np.float32)
PLAIN = {"client": 1, "value": Y, "steps": 2}
LIMITS = (3, 0.5, 10, 10, False, 1.0)
READERS = tuple((module.read_plain_updates, core.ClientIndex(bytes(16), 3)) for module in (core, oracle))


def test_the_native_names_are_the_fields_in_their_order():
    names = re.search(r"enum At \{(.*?)\}", SOURCE.read_text(), re.S)[1]
    found = [name.strip().removeprefix("k").lower() for name in names.split(",")]
    assert found == [name.replace("_", "") for name in Update._fields]


@pytest.mark.parametrize("field", Update._fields)
def test_an_unusual_field_is_found_by_both(field):
    """Each field's position in the native reader matches its name."""
    odd = {
        "client": "nobody",
        "value": Y.astype(np.float64),
        "steps": 11,
        "examples": 11,
        "lr": 0.25,
        "control": Y,
        "count": 2,
        "round": 0,
        "kind": "delta",
        "keep": True,  # the reader ignores this field
        "weight": 1.0,
        "loss": float("nan"),
        "update_id": 0,
    }
    for read, index in READERS:
        assert read([Update(**PLAIN)], Update, index, *LIMITS) is not None
        read_odd = read([Update(**PLAIN | {field: odd[field]})], Update, index, *LIMITS)
        assert (read_odd is None) == (field != "keep")


def test_clients_are_registered_and_different():
    for read, index in READERS:
        index.add("a")
        for ids, plain in (([2, 0, "a"], True), ([2, 0, 2], False), ([0, 3], False), ([0, "0"], False), ([], True)):
            found = read([Update(client, Y, 2) for client in ids], Update, index, *LIMITS)
            assert (found is not None) == plain
            assert found is None or found[0] == ids


@pytest.mark.parametrize(
    ("rounds", "oldest", "newest", "absent", "due"),
    [
        ([None, 3], 3, 3, 3, [3, 3]),
        ([None, 3], 3, 3, -2, None),  # a buffer needs the round
        ([2, 3], 2, 3, -2, [2, 3]),
        ([1, 3], 2, 3, -2, None),
        ([4], 2, 3, -2, None),
        ([True], 0, 3, -2, None),
        ([np.int64(3)], 2, 3, -2, None),
        ([2**70], 0, 2**62, -2, None),
    ],
)
def test_rounds_lie_in_a_range_and_clients_may_repeat(rounds, oldest, newest, absent, due):
    updates = [Update(1, Y, 2, round=round) for round in rounds]
    for read, index in READERS:
        found = read(updates, Update, index, *LIMITS, oldest, newest, absent, True)
        assert (None if found is None else found[5].tolist()) == due
        assert len(updates) == 1 or read(updates, Update, index, *LIMITS, oldest, newest, absent, False) is None


COLUMNS = (
    [], [1.0], [3.0, -2.0, 5e-324], [np.inf, 1.0], [np.nan, 1.0], [1.0, -np.inf], [1e308, 1e308, -1e308], [0.1] * 9
)  # fmt: skip


@pytest.mark.parametrize("numbers", COLUMNS)
def test_the_range_and_the_sum_of_a_column_are_the_oracles(numbers):
    column, times = np.array(numbers), np.arange(len(numbers)) + 0.3
    with np.errstate(all="ignore"):
        assert str(core.column_range(column)) == str(oracle.column_range(column))
        for by in (None, times):
            assert str(core.column_sum(0.2, column, by)) == str(oracle.column_sum(0.2, column, by))


def test_torch_tensors_are_plain_if_numpy_can_read_them():
    torch = pytest.importorskip("torch")
    plain = torch.arange(3, dtype=torch.float32)
    trained = plain.clone().requires_grad_()
    odd = [plain.double(), plain[None], torch.zeros(6)[::2], plain.to_sparse(), plain.to(torch.bfloat16)]
    for read, index in READERS:
        for y in (plain, trained, torch.zeros(4)[1:]):
            [view] = read([Update(1, y, 2)], Update, index, *LIMITS)[1]
            assert type(view) is np.ndarray
            assert view.ctypes.data == y.data_ptr()
        for y in odd:
            assert read([Update(0, plain, 2), Update(1, y, 2)], Update, index, *LIMITS) is None
