"""The native reader, which reads an update's fields by position, agrees with the oracle, which reads them by name."""

import re
from collections import ChainMap, OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore import Compute, Model, Server, Update
from fedcore.algorithms import SCAFFOLD, FedAvg
from fedcore.arrays import core, from_dlpack
from fedcore.kernels.robust import GramSum
from fedcore.server.update import KINDS
from fedcore.server.validation import UpdateReader
from tests import oracle

SOURCE = Path(__file__).parents[2] / "csrc" / "bindings" / "bind_plain_updates.cpp"
Y = np.ones(3, np.float32)
PARTS = [("a", (2,)), ("b", (1, 1))]
LISTED = [("0", (2,)), ("1", (1, 1))]
MODULES = (core, oracle)
INDICES = {module: core.ClientIndex(bytes(16), 3) for module in MODULES}
for index in INDICES.values():
    index.add("a")


def reader(module, rounds=(0, 0, 0), flags=(False,) * 3, nonnegative=(), parts=PARTS, copied=0, may_hold=False,
           owns=lambda y: False):  # fmt: skip
    """``flags``: whether clients may repeat, updates may have weights, and all elements are parameters."""
    limits = 0.5, 10, 10, False, 1.0, *rounds, *flags
    return module.PlainUpdates(Update, INDICES[module], 3, limits, list(nonnegative), parts, copied, may_hold, owns)


def added(module, updates, **options):
    """What a new reader answers to these updates, and its columns."""
    plain = reader(module, **options)
    answer = plain.add(updates, set(), set(), -1, 0)
    return answer, plain.take() if answer else None


def test_the_native_names_are_the_fields_in_their_order():
    names = re.search(r"enum At \{(.*?)\}", SOURCE.read_text(), re.S)[1]
    found = [name.strip().removeprefix("k").lower() for name in names.split(",")]
    assert found == [name.replace("_", "") for name in Update._fields]


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


SENT = SCAFFOLD(control="sent")
WAYS = (FedAvg(), {}), (FedAvg(), {"aggregation": "median"}), (SENT, {}), (SENT, {"compute": Compute(shards=2)})


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(("method", "options"), WAYS)
def test_torch_cannot_free_what_a_round_holds(method, options, dtype):
    torch = pytest.importorskip("torch")
    sent = (torch.arange(80_000.0) % 256).to(getattr(torch, dtype))
    control, flat, bad, whole = (sent.clone() for _ in range(4))
    bad[1] = torch.nan
    named = {"0": whole[:40_000].view(2, -1), "1": whole[40_000:], "count": torch.tensor(1)}
    x = {"0": np.zeros((2, 20_000), np.float32), "1": np.zeros(40_000, np.float32), "count": np.int64(0)}
    server = Server(x, method, 4, lr=0.5, **options)
    with server.open_round() as round:
        for client, y in enumerate((flat, bad, named)):
            assert round.add(client, y, steps=1, control=control, keep=True)
        for tensor in (flat, bad, *[control] * (method == SENT), *[whole] * (dtype != "float64")):  # else copied
            with pytest.raises(RuntimeError, match="resiz"):
                tensor.untyped_storage().resize_(0)
            tensor.share_memory_()  # frees the memory it had, as a queue of torch.multiprocessing does
            tensor.data = torch.full_like(tensor, 99)  # takes that memory
        assert round.add(3, sent, steps=1, control=sent)
    assert round.report.accepted == (0, 2, 3)
    np.testing.assert_allclose(server.x, sent.float())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_groups_medians_and_inner_products_follow_moved_tensors(dtype):
    torch, n = pytest.importorskip("torch"), 9_000_000  # so large that freed memory is unmapped
    y, row = (torch.full((n,), 2, dtype=getattr(torch, dtype)) for _ in "01")
    server = Server(Model({"a": np.zeros(n)}, {"one": "a"}), SENT, 2, lr=0.5)
    medians, view, gram = Server(np.zeros(n), "FedAvg", 2, lr=0.5, aggregation="median"), row.numpy(), GramSum(1)
    with server.open_round() as round, medians.open_round() as other:
        assert all([round.add(0, {"a": y}, steps=1, control=y, keep=True), other.add(0, row, steps=1, keep=True)])
        taken = [torch.full_like(tensor.share_memory_(), 99) for tensor in (y, row)]
        assert other.add(1, y, steps=1)
    gram.add(None, [view])
    assert [{*server.x}, {*medians.x}, gram.result().tolist(), taken[0][0]] == [{2}, {2}, [[4 * n]], 99]


def test_a_second_vector_may_lie_at_an_odd_address():
    with (server := Server(Y, SENT, 2, lr=0.5)).open_round() as round:
        odd = np.frombuffer(b"0" + Y.tobytes(), np.float32, offset=1)
        assert round.add(0, Y, steps=1, control=odd)
    assert server.x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_kept_tensor_of_16_bits_may_move_and_lie_at_an_odd_address(dtype):
    torch, server = pytest.importorskip("torch"), Server(Y, FedAvg(), 2, lr=0.5, aggregation="median")
    tensors = (odd := torch.frombuffer(bytearray(7), dtype=getattr(torch, dtype), offset=1).fill_(2)).clone(), odd
    with server.open_round() as round:
        assert all(round.add_batch([Update(client, y, 1, keep=True) for client, y in enumerate(tensors)]))
        tensors[0].share_memory_()
    assert server.x.tolist() == [2, 2, 2]
    with pytest.raises(BufferError):  # NumPy would return uninitialised memory
        torch.func.functionalize(from_dlpack)(tensors[0])


FORMS = {
    "flat": np.asarray,
    "long": lambda y: y * np.float32(1e15),
    "f16": np.float16,
    "f64": np.float64,
    "odd bytes": lambda y: np.frombuffer(b"0" + y.tobytes(), np.float32, offset=1),
    "raw": lambda y: y.tobytes(),
    "list": lambda y: [y[:2], y[2:].reshape(1, 1)],
    "numbered": lambda y: {"0": y[:2], "1": y[2:].reshape(1, 1)},
    "other numbers": lambda y: {0: y[:2], True: y[2:].reshape(1, 1)},
    "half tuple": lambda y: (np.float16(y[:2]), y[2:].reshape(1, 1)),
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
CHANGES = {
    "client": ["a", 3, "0", np.int64(1), np.uint8(0)],
    "steps": [10, 11, np.int32(3), np.float32(3), type("numpy.int64", (), {"__float__": lambda _: 3.0})()],
    "examples": [7, 0.5, 11, 10.5, np.int16(7), np.float16(0.1), np.True_],
    "lr": [0.5, np.float32(0.5), 0.5000002, 0.50001, 0.25, 1],
    "control": [Y],
    "count": [2, np.int8(1)],
    "round": [0, np.int64(0), 2, 3, 4, True, 2**70],
    "kind": [*KINDS, "other"],
    "keep": [True],
    "weight": [0, 3, 0.25, -0.5, np.inf, np.nan, 2**53, 2**2000, True, np.float64(2)],
    "loss": [0, 1.5, -1.0, np.inf],
    "update_id": [0],
}
ANY = st.tuples(
    st.sampled_from([0, 1, 2]),
    st.sampled_from(list(FORMS)),
    st.lists(st.sampled_from([0.0, 1.5, 2.5, -2.0, np.inf, np.nan, 6e4]), min_size=3, max_size=3),
    st.lists(st.sampled_from([{name: value} for name, values in CHANGES.items() for value in values]), max_size=1),
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.lists(ANY, max_size=2), max_size=4),
    st.sampled_from([-1, 0, 1, 2]),
    st.fixed_dictionaries(
        {
            "flags": st.tuples(*[st.booleans()] * 3),
            "parts": st.sampled_from([PARTS, LISTED, []]),
            "rounds": st.sampled_from([(0, 0, 0), (2, 3, 3), (2, 3, -2), (0, 2**62, 0)]),
            "nonnegative": st.sampled_from([[], [(0, 1)], [(1, 3)]]),
            "copied": st.sampled_from([0, 11, 12]),
            "may_hold": st.booleans(),
            "owns": st.sampled_from([lambda y: False, lambda y: y.base is not None]),
        }
    ),
)
def test_it_reads_and_holds_like_the_oracle(batches, examples, options):
    native, expected = (reader(module, **options) for module in MODULES)
    known = {native: {2}, expected: {2}}
    for first, batch in enumerate(batches):
        made = [
            Update(client, FORMS[form](np.float32(numbers)), 1)._replace(**ChainMap(*changes))
            for client, form, numbers, changes in batch
        ]
        answers = [plain.add(made, known[plain], set(), examples, first) for plain in (native, expected)]
        assert answers[0] == answers[1]
        assert known[native] == known[expected]
    assert len(native) == len(expected)
    if len(native):
        for found, due in zip(native.take(), expected.take(), strict=True):
            np.testing.assert_equal(found, due)


@pytest.mark.parametrize("method", ["FedAvg", "FedNova", "MIFA", "MimiC"])
def test_a_round_has_the_bits_of_updates_that_are_read_one_by_one(method, monkeypatch):
    """Also with numbers of NumPy, weights, differences and gradients."""
    rng, found = np.random.default_rng(1), []
    forms = "flat", "f16", "raw", "list", "half tuple", "torch"
    ys = [FORMS[form](rng.standard_normal(3, np.float32)) for form in forms]
    rounds = [
        [Update(np.int64(i), y, np.int32(i + 1), kind=kinds[i % len(kinds)]) for i, y in enumerate(ys)]
        for kinds in (["model"], ["delta"], KINDS)
    ]
    if method == "FedNova":
        rounds.append([one._replace(weight=one.client + 0.5, loss=np.float32(1)) for one in rounds[0]])
    for reads in (UpdateReader.plain_updates, lambda reader, **_: None):
        monkeypatch.setattr(UpdateReader, "plain_updates", reads)
        server = Server([np.zeros(2, np.float32), np.zeros((1, 1), np.float32)], method, clients=6, lr=0.5)
        found.append([(server.round(updates), server.x.tobytes()) for updates in rounds])
    for (report, x), (due, due_x) in zip(*found, strict=True):
        np.testing.assert_equal([report.norms, report.weights], [due.norms, due.weights])
        assert (report.accepted, report.rejected, x) == (due.accepted, due.rejected, due_x)
