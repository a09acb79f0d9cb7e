"""The native reader, which reads an update's fields by position, agrees with the oracle, which reads them by name."""

import re
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore import Update
from fedcore.arrays import core
from tests import oracle

SOURCE = Path(__file__).parents[2] / "csrc" / "bindings" / "bind_plain_updates.cpp"
Y = np.ones(3, np.float32)
PLAIN = {"client": 1, "value": Y, "steps": 2}
PARTS = [("a", (2,)), ("b", (1, 1))]
MODULES = (core, oracle)
INDICES = {module: core.ClientIndex(bytes(16), 3) for module in MODULES}


def reader(module, rounds=(0, -1, 0), repeats=False, nonnegative=(), copied=0, may_hold=False, owns=lambda y: False):
    limits = 0.5, 10, 10, False, 1.0, *rounds, repeats
    return module.PlainUpdates(Update, INDICES[module], 3, limits, list(nonnegative), PARTS, copied, may_hold, owns)


def added(module, updates, known=(), examples=-1, **options):
    """What a new reader answers to these updates, and its columns."""
    plain = reader(module, **options)
    answer = plain.add(updates, set(known), set(), examples, 0)
    return answer, plain.take() if answer else None


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
        "keep": True,
        "weight": 1.0,
        "loss": float("nan"),
        "update_id": 0,
    }
    for module in MODULES:
        assert added(module, [Update(**PLAIN)])[0] is not None
        assert (added(module, [Update(**PLAIN | {field: odd[field]})])[0] is None) == (field != "keep")


def test_clients_are_registered_and_different():
    for module in MODULES:
        INDICES[module].add("a")
        for ids, plain in (([2, 0, "a"], True), ([2, 0, 2], False), ([0, 3], False), ([0, "0"], False), ([], False)):
            found, _ = added(module, [Update(client, Y, 2) for client in ids])
            assert (found is not None) == plain
            assert found is None or found[0] == ids
        assert added(module, [Update(2, Y, 2)], known=[2])[0] is None


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
    for module in MODULES:
        _, found = added(module, updates, rounds=(oldest, newest, absent), repeats=True)
        assert (None if found is None else found[7].tolist()) == due
        assert len(updates) == 1 or added(module, updates, rounds=(oldest, newest, absent))[0] is None


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
    for module in MODULES:
        for y in (plain, trained, torch.zeros(4)[1:]):
            [view] = added(module, [Update(1, y, 2)], may_hold=True)[1][1]
            assert type(view) is np.ndarray
            assert view.ctypes.data == y.data_ptr()
        for y in odd:
            assert added(module, [Update(0, plain, 2), Update(1, y, 2)])[0] is None


def test_a_subnormal_number_is_negative_in_every_mode():
    torch, y = pytest.importorskip("torch"), np.float32([-1e-40, 0, 0])
    for flushes in (True, False):
        torch.set_flush_denormal(flushes)
        try:
            found, _ = added(core, [Update(1, y, 2)], nonnegative=[(0, 1)], may_hold=True)
        finally:
            torch.set_flush_denormal(False)
        assert found is None


def test_a_tensor_that_got_other_memory_is_listed_as_changed():
    torch = pytest.importorskip("torch")
    same, other, plain = torch.ones(3), torch.ones(3), reader(core, may_hold=True)
    assert plain.add([Update(0, same, 2), Update(1, other, 2)], set(), set(), -1, 0) is not None
    other.data = torch.zeros(3)
    _, [_, view], *_, changed = plain.take()
    assert (changed, view.tolist(), len(plain)) == ([1], [1, 1, 1], 0)


FORMS = {
    "flat": np.asarray,
    "long": lambda y: y * np.float32(1e15),
    "f16": np.float16,
    "f64": np.float64,
    "odd bytes": lambda y: np.frombuffer(b"0" + y.tobytes(), np.float32, offset=1),
    "bytes": lambda y: np.frombuffer(y.tobytes(), np.float32),
    "named": lambda y: {"a": y[:2], "b": y[2:].reshape(1, 1)},
    "named bytes": lambda y: {"a": FORMS["bytes"](y[:2]), "b": FORMS["bytes"](y[2:]).reshape(1, 1)},
    "ordered": lambda y: OrderedDict(b=np.float16(y[2:].reshape(1, 1)), a=y[:2]),
    "other names": lambda y: {"a": y[:2], "c": y[2:].reshape(1, 1)},
    "other shape": lambda y: {"a": y[:2], "b": y[2:]},
    "more": lambda y: {"a": y[:2], "b": y[2:].reshape(1, 1), "c": y},
    "torch": lambda y: pytest.importorskip("torch").tensor(y),
    "bf16": lambda y: pytest.importorskip("torch").tensor(y).bfloat16(),
    "torch named": lambda y: {"b": pytest.importorskip("torch").tensor(y[2:])[None].bfloat16(), "a": y[:2]},
    "none": lambda y: None,
}
NUMBERS = st.sampled_from([0.0, 1.5, -2.0, np.inf, np.nan, 6e4])
ANY = st.fixed_dictionaries(
    {
        "client": st.sampled_from([0, 1, 2, "a", 3]),
        "form": st.sampled_from(list(FORMS)),
        "numbers": st.lists(NUMBERS, min_size=3, max_size=3),
        "steps": st.sampled_from([1, 10, 11]),
        "examples": st.sampled_from([None, None, 7]),
        "keep": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(ANY, max_size=2), max_size=4),
    st.sampled_from([-1, 0, 1, 2]),
    st.fixed_dictionaries(
        {
            "nonnegative": st.sampled_from([[], [(0, 1)], [(1, 3)]]),
            "copied": st.sampled_from([0, 11, 12]),
            "may_hold": st.booleans(),
            "repeats": st.booleans(),
            "owns": st.sampled_from([lambda y: False, lambda y: y.base is not None]),
        }
    ),
)
def test_it_reads_and_holds_like_the_oracle(batches, examples, options):
    native, expected = (reader(module, **options) for module in MODULES)
    known = {native: {2}, expected: {2}}
    for first, batch in enumerate(batches):
        made = [
            Update(one["client"], FORMS[one["form"]](np.float32(one["numbers"])), one["steps"], one["examples"],
                   keep=one["keep"])
            for one in batch
        ]  # fmt: skip
        answers = [plain.add(made, known[plain], set(), examples, first) for plain in (native, expected)]
        assert answers[0] == answers[1]
        assert known[native] == known[expected]
    assert len(native) == len(expected)
    if len(native):
        for found, due in zip(native.take(), expected.take(), strict=True):
            np.testing.assert_equal(found, due)
