import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcore
from fedcore import errors


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def trained(seed):
    torch.manual_seed(seed)
    model = net()
    for _ in range(seed + 1):
        model(torch.randn(5, 3))
    return model.state_dict()


def test_the_average_matches_a_loop_in_torch():
    models, weights = [trained(seed) for seed in range(4)], [30, 10, 0, 25]
    before = copy.deepcopy(models)
    averaged = fedcore.aggregate(models, weights)
    assert list(averaged) == list(models[0])
    for name, tensor in averaged.items():
        assert isinstance(tensor, torch.Tensor)
        assert (tensor.dtype, tensor.shape) == (models[0][name].dtype, models[0][name].shape)
        if tensor.is_floating_point():
            due = sum(w * m[name].double() for w, m in zip(weights, models, strict=True)) / sum(weights)
            torch.testing.assert_close(tensor, due.float(), rtol=1e-7, atol=0)
    assert averaged["1.num_batches_tracked"] == 4
    net().load_state_dict(averaged)
    for model, then in zip(models, before, strict=True):
        assert all(torch.equal(model[name], then[name]) for name in model)


def test_large_counters_stay_exact():
    assert fedcore.aggregate([{"n": np.array(2**62 + 1)}, {"n": np.array(5)}])["n"] == 2**62 + 1


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=9).filter(any))
def test_equal_numbers_keep_their_bits(weights):
    w = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    np.testing.assert_array_equal(fedcore.aggregate([{"w": w}] * len(weights), weights)["w"], w)


def test_numpy_arrays_scalars_and_empty_tensors():
    models = [{"s": np.float32(v), "e": np.zeros((0, 3), np.float32)} for v in (1, 2)]
    averaged = fedcore.aggregate(models)
    assert averaged["s"] == 1.5
    assert averaged["s"].dtype == np.float32
    assert averaged["e"].shape == (0, 3)


def test_tensors_that_are_not_contiguous_or_need_gradients():
    tensors = [torch.randn(3, 4, requires_grad=True), torch.randn(4, 3).t()]
    averaged = fedcore.aggregate([{"w": tensor} for tensor in tensors])["w"]
    torch.testing.assert_close(averaged, ((tensors[0] + tensors[1]) / 2).detach())
    arrays = [np.ones((3, 4), np.float32), np.full((4, 3), 3, np.float32).T]
    arrays.append(np.frombuffer(b"x" + np.full(12, 2, np.float32).tobytes(), np.float32, offset=1).reshape(3, 4))
    np.testing.assert_array_equal(fedcore.aggregate([{"w": a} for a in arrays])["w"], np.full((3, 4), 2))
    odd, line = bytearray(b"x" + np.arange(4, dtype=np.float32).tobytes()), np.arange(3, -0.5, -0.5, np.float32)
    views = [line[::-2], np.frombuffer(odd, "f4", offset=1), torch.frombuffer(odd, dtype=torch.float32, offset=1)]
    for first in (torch.zeros(4), torch.zeros(4).bfloat16()):
        for view, kind in itertools.product(views, (list, iter)):
            assert fedcore.aggregate(kind([{"w": first}, {"w": view}]))["w"].tolist() == [0, 0.5, 1, 1.5]


def test_large_float64_models_with_an_infinite_norm():
    assert fedcore.aggregate([{"w": np.full(2, 1e200)}] * 2)["w"][0] == 1e200


GOOD = {"a": np.ones(2, np.float32), "b": np.ones((2, 3), np.float32)}


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"a": GOOD["a"]}, errors.ArrayError, r"^client 2\b.*missing.*\(b\)"),
        (GOOD | {"c": GOOD["a"]}, errors.ArrayError, r"^client 2\b.*unexpected.*\(c\)"),
        (GOOD | {"b": np.ones((3, 2), np.float32)}, errors.ShapeError, r"^client 2, b\b"),
        (GOOD | {"a": np.ones(2, np.int64)}, errors.DtypeError, r"^client 2, a\b"),
        (GOOD | {"a": [1, 2]}, errors.ArrayError, r"^client 2\b.*\(a\).*\(a.0, a.1\)"),
        (GOOD | {"a": 7}, errors.ArrayError, r"^client 2, a\b"),
        (GOOD | {"b": np.full((2, 3), np.nan, np.float32)}, errors.ArrayError, r"^client 2, b\b"),
        (GOOD | {"a": np.float32([0, np.inf])}, errors.ArrayError, r"^client 2, a\b"),
        (GOOD | {"a": torch.ones(2, device="meta")}, errors.ArrayError, r"^client 2, a\b"),
        ([GOOD["a"]], errors.ArrayError, r"^client 2\b.*\(a, b\).*\(0\)"),
        (7, errors.ArrayError, r"^client 2\b.*int"),
    ],
)
def test_a_bad_model_is_named(bad, error, message):
    with pytest.raises(error, match=message):
        fedcore.aggregate([GOOD, GOOD, bad])


@pytest.mark.parametrize(
    ("bad", "error"),
    [(np.zeros(2, np.int64), errors.ShapeError), (np.int32(1), errors.DtypeError), ("many", errors.ArrayError)],
)
def test_a_counter_of_another_form_is_named(bad, error):
    good = GOOD | {"n": np.array(1)}
    with pytest.raises(error, match=r"^client 2, n\b"):
        fedcore.aggregate([good, good, GOOD | {"n": bad}])


def test_counters_of_a_nested_model():
    averaged = fedcore.aggregate([{"norm": {"w": np.float32([k]), "n": np.array(k)}} for k in (1, 5)])
    assert averaged == {"norm": {"w": [3], "n": 5}}


@pytest.mark.parametrize(
    ("models", "weights", "error", "message"),
    [
        ([], None, errors.RangeError, r"^models\b"),
        ([GOOD], [1, 2], errors.ShapeError, r"^weights\b"),
        ([GOOD] * 2, [1, -1], errors.RangeError, "^weights.1."),
        ([GOOD] * 2, [1, float("nan")], errors.RangeError, "^weights.1."),
        ([GOOD] * 2, [0, 0], errors.RangeError, r"^weights\b.*zero"),
        *[([GOOD] * 2, [one, 1], errors.DtypeError, "weights") for one in ("x", 1j, 10**400)],
        *[(one, None, errors.ArrayError, r"^models\b") for one in (None, 3, "a")],
        ([{"z": np.ones(2, np.complex64)}], None, errors.DtypeError, r"^client 0, z\b"),
        ([{"z": "text"}], None, errors.ArrayError, r"^client 0, z\b"),
        ([{"z": SimpleNamespace(dtype=np.dtype("f4"), shape=(2,))}], None, errors.DtypeError, r"^client 0, z\b"),
        ([torch.nn.Linear], None, errors.ArrayError, r"^client 0\b"),
    ],
)
def test_bad_arguments(models, weights, error, message):
    with pytest.raises(error, match=message):
        fedcore.aggregate(models, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", [[1, 0], [1, 1]])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_numbers_are_named_for_any_weight(dtype, weights, bad):
    good = {"a": torch.ones(3).to(dtype), "w": torch.ones(70_000).to(dtype)}
    spoilt = {name: tensor.clone() for name, tensor in good.items()}
    spoilt["w"][69_999] = bad
    with pytest.raises(errors.ArrayError, match=r"^client 1, w\b"):
        fedcore.aggregate([good, spoilt], weights)


@pytest.mark.parametrize("made", [np.float32, torch.tensor])
def test_infinities_and_a_nan_are_no_mask(made):
    with pytest.raises(errors.ArrayError, match=r"^client 0, w\b"):
        fedcore.aggregate([{"w": made([float("nan"), float("inf")])}] * 2)


def test_infinities_that_cancel_are_rejected():
    models = [{"w": np.float32([1, sign * np.inf])} for sign in (1, -1)]
    with pytest.raises(errors.RangeError, match=r"^client 1, w\b"):
        fedcore.aggregate(models)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_averages_tensors_are_independent(library):
    arrays = {"a": np.ones(5, np.float32), "b": np.ones((1000, 1000), np.float32), "c": np.float32(1)}
    models = [arrays if library == "numpy" else {name: torch.tensor(one) for name, one in arrays.items()}] * 2
    averaged = fedcore.aggregate(models)
    averaged["a"][:] = 7
    kept = averaged.pop("b")
    del averaged
    assert kept.sum() == 1_000_000
    if library == "torch":
        assert kept.untyped_storage().nbytes() == 4_000_000, "to save one tensor is not to save all"


@pytest.mark.parametrize("made", [np.ones, torch.ones])
def test_the_next_average_does_not_change_the_last_one(made):
    kept = fedcore.aggregate([{"w": made(1000), "b": made(3)}])["w"][10:]
    for _ in range(3):
        fedcore.aggregate([{"w": 2 * made(1000), "b": made(3)}])
    assert kept.tolist() == [1.0] * 990


def test_messages_are_short_for_any_input():
    good, odd = {"w": np.ones(2, np.float32)}, np.zeros(2, np.dtype([(f"f{i}", "f4") for i in range(1000)]))
    for model in ({"w": odd}, {"x" * 10_000: good["w"]}):
        with pytest.raises(errors.FedcoreError) as raised:
            fedcore.aggregate([good, model])
        assert len(str(raised.value)) <= 500
