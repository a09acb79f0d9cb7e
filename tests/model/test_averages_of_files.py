"""Averages of files and of iterators have the bits of averages of models in memory."""

import gc
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

import fedcore
from fedcore import Safetensors, errors, write_model
from fedcore.model import windows
from fedcore.model.files import open_model
from fedcore.model.safetensors import StoredTensor
from tests.kit import python
from tests.model.test_merging import PEAK, Tied, clients, hollow, saved
from tests.model.test_merging import same as same_by_name

WEIGHTS = [3, 1, 2]


def models(dtype=torch.float32, n=150_000):
    more = {"z": -torch.zeros((), dtype=dtype), "e": torch.zeros(0, 3, dtype=dtype)}
    return [model | {"w": model["w"].reshape(-1, 2)} | more for model in clients(dtype, 2 * n)[:3]]


def same(one, other):
    assert list(one) == list(other)
    same_by_name(one, other)


def in_torch(array):
    if isinstance(array, torch.Tensor):
        return array
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array))


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(windows, "LARGEST", 1 << 19)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_files_and_models_in_memory_give_the_same_bits(tmp_path, small_windows, dtype, ending):
    given = models(dtype)
    paths = saved(tmp_path, given, ending)
    due = fedcore.aggregate(given, WEIGHTS)
    found = fedcore.aggregate(paths, WEIGHTS)
    same({name: in_torch(found[name]) for name in due}, due)
    mixed = fedcore.aggregate([given[0], str(paths[1]), paths[2]], WEIGHTS)
    same(mixed, due)


@pytest.mark.parametrize("order", ["little", "big"])
def test_a_torch_file_has_the_numbers_that_its_byte_order_says(tmp_path, monkeypatch, order):
    due = {"w": torch.arange(1, 5, dtype=torch.float32)}
    as_saved = due["w"].numpy() if order == sys.byteorder else due["w"].numpy().byteswap()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "byteorder", order)  # which torch.save writes into the file
        torch.save({"w": torch.from_numpy(as_saved)}, tmp_path / "model.pt")
    assert isinstance(open_model(tmp_path / "model.pt")["w"], StoredTensor) == (order == sys.byteorder)
    same(fedcore.aggregate([tmp_path / "model.pt"] * 2), due)
    assert torch.equal(fedcore.read_model(tmp_path / "model.pt")["w"], due["w"])


def test_npz_files_give_the_bits_of_models_in_memory(tmp_path, small_windows):
    rng = np.random.default_rng(0)
    given = [
        {
            "w": rng.normal(size=(150_000, 2)).astype(np.float32),
            "transposed": rng.normal(size=(3, 5)).T,
            "swapped": rng.normal(size=4).astype(">f4"),
            "half": rng.normal(size=(2, 2)).astype(np.float16),
            "s": np.float32(k),
            "n": np.array(2**60 + k),
            "codes": np.arange(5, dtype=np.uint8),
            "e": np.zeros((0, 3), np.float32),
        }
        for k in range(3)
    ]
    paths = saved(tmp_path, given, "npz")
    np.savez_compressed(paths[1], **given[1])
    due = fedcore.aggregate([one | {"swapped": one["swapped"].astype("f4")} for one in given], WEIGHTS)
    found = fedcore.aggregate(paths, WEIGHTS)
    same(*({name: in_torch(tensor) for name, tensor in model.items()} for model in (found, due)))
    fedcore.merge(tmp_path / "out", paths, WEIGHTS)
    for name, tensor in Safetensors(tmp_path / "out").items():
        np.testing.assert_array_equal(np.asarray(tensor), due[name])
    assert isinstance(open_model(paths[0])["w"], StoredTensor)  # read in windows


@pytest.mark.parametrize("first", range(5))
def test_names_of_tied_tensors_may_be_missing_or_repeated(tmp_path, first):
    nets = [Tied(0), Tied(1)]
    torch.save(nets[1].state_dict(), tmp_path / "both.pt")
    for name in ("embed", "head"):
        write_model({f"{name}.weight": nets[1].embed.weight}, tmp_path / f"{name}.safetensors")
    files = [tmp_path / "both.pt", str(tmp_path / "embed.safetensors"), tmp_path / "head.safetensors"]
    forms = [nets[1], nets[1].state_dict(), *files]
    due = fedcore.aggregate(nets)["embed.weight"]
    given = [nets[0], nets[0].state_dict()]
    for pair in [(forms[first], other) for other in given] + [(other, forms[first]) for other in given]:
        for models in (list(pair), iter(pair)) if first < 2 or pair[0] is forms[first] else [list(pair)]:
            found = fedcore.aggregate(models)
            names = list(pair[0]) if isinstance(pair[0], dict) else list(found)
            assert list(found) == names
            assert all(torch.equal(torch.as_tensor(tensor), due) for tensor in found.values())


def test_names_of_tensors_that_are_not_tied_must_be_there():
    one, both = {"embed.weight": np.ones(3, np.float32)}, Tied(1, tied=False).state_dict()
    zeros = dict.fromkeys(both, np.zeros((30, 4), np.float32))  # one array for two tensors
    for models in ([one, both], [zeros, one], [Tied(0).state_dict(), both]):
        for given in (models, iter(models)):
            with pytest.raises(errors.ArrayError, match=r"client 1.*(unexpected|missing)|head.weight: is tied"):
                fedcore.aggregate(given)


def test_other_dtypes_are_cast_to_the_first_models(tmp_path, monkeypatch):
    first, other = {"w": torch.randn(9).bfloat16()}, {"w": torch.randn(9).double()}
    write_model(other, tmp_path / "m.safetensors")
    same(fedcore.aggregate([first, tmp_path / "m.safetensors"]), fedcore.aggregate([first, other]))
    write_model(first, tmp_path / "f.safetensors")
    found = fedcore.aggregate([tmp_path / "m.safetensors", tmp_path / "f.safetensors"])["w"]
    np.testing.assert_array_equal(found, fedcore.aggregate([other, first])["w"])
    monkeypatch.delitem(sys.modules, "ml_dtypes")
    for rule in (None, "median"):  # NumPy has no bfloat16 then
        found = fedcore.aggregate([tmp_path / "f.safetensors"] * 3, rule=rule)["w"]
        assert (found.dtype, found.tolist()) == (np.float32, first["w"].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_an_iterator_gives_the_same_bits_and_its_models_are_freed(dtype):
    alive = weakref.WeakSet()

    def coming():
        for model in models(dtype, n=2000):
            net = torch.nn.Module()
            for name, tensor in model.items():
                net.register_buffer(name, tensor.clone())
            alive.add(net.w)
            gc.collect()
            assert len(alive) <= 2  # the one that the sums have just read, and this one
            yield net
            del net

    same(fedcore.aggregate(coming(), WEIGHTS), fedcore.aggregate(models(dtype, n=2000), WEIGHTS))
    found, due = fedcore.aggregate(coming()), fedcore.aggregate(models(dtype, n=2000))
    np.testing.assert_allclose(found["w"].double(), due["w"].double(), atol=4 * torch.finfo(dtype).eps)


def test_an_iterator_of_paths_and_other_forms(tmp_path):
    for k in (1, 4):
        write_model({"w": np.full(2, k, np.float32)}, tmp_path / f"{k}.safetensors")
    assert fedcore.aggregate(tmp_path.glob("*.safetensors"))["w"].tolist() == [2.5, 2.5]
    assert fedcore.aggregate(iter([np.float32([1]), np.float32([2])])).tolist() == [1.5]
    assert fedcore.aggregate([np.float32([k])] for k in (1, 2))[0].tolist() == [1.5]
    assert fedcore.aggregate([fedcore.Model({"w": np.float32([k])}) for k in (1, 2)])["w"].tolist() == [1.5]
    with pytest.raises(errors.RangeError, match="empty"):
        fedcore.aggregate(iter([]))
    one = tmp_path / "1.safetensors"
    for several in (fedcore.aggregate, lambda inputs: fedcore.merge(tmp_path / "out", inputs)):
        for wrong in (one, str(one), Safetensors(one), 3, *([{"a": one}] if several is not fedcore.aggregate else [])):
            with pytest.raises(errors.ArrayError, match="list of paths"):
                several(wrong)
        several(path for path in [one, one])
    for weights in ([1], [1, 2, 3]):
        with pytest.raises(errors.ShapeError, match="weights"):
            fedcore.aggregate(iter([{"w": np.float32([1])}] * 2), weights)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_model_of_an_iterator_is_named(bad):
    good, spoilt = {"w": np.ones(2, np.float32)}, {"w": np.float32([1, bad])}
    with pytest.raises(errors.ArrayError, match=r"^client 1, w\b"):
        fedcore.aggregate(iter([good, spoilt]))
    with pytest.raises(errors.ArrayError, match=r"^client 1\b.*missing"):
        fedcore.aggregate(iter([good, {"v": good["w"]}]))
    with pytest.raises(errors.DivergedError, match=r"^w\b"):
        fedcore.aggregate(iter([{"w": np.float64([1e308])}] * 2))  # whose sum is no float64


def test_a_mapping_names_clients():
    one, two = {"w": np.float32([1])}, {"w": np.float32([4])}
    assert fedcore.aggregate({"a": one, 7: two}, {7: 1, "a": 2})["w"] == 2
    assert fedcore.aggregate({"a": one, 7: two}, [1, 2])["w"] == 3
    with pytest.raises(errors.ShapeError, match=r"^client 'b', w\b"):
        fedcore.aggregate({"a": one, "b": {"w": np.ones(2, np.float32)}})
    with pytest.raises(errors.UnknownClientError, match=r"weights.*\(b\)"):
        fedcore.aggregate({"a": one, "b": two}, {"a": 1})


def test_a_bad_file_is_named(tmp_path):
    good = {"w": np.ones(200_000, np.float32), "c": np.arange(3)}
    write_model(good, tmp_path / "good.safetensors")
    spoilt = good["w"].copy()
    spoilt[-1] = np.nan
    cases = {
        r"client 1 \(.*bad.*, w\b.*NaN": good | {"w": spoilt},
        r"client 1 \(.*bad.*, c\b.*equal": good | {"c": np.arange(1, 4)},
        r"client 1 \(.*bad.*missing 1 \(c\)": {"w": good["w"]},
        r"client 1 \(.*bad.*, w\b.*shape": good | {"w": good["w"][1:]},
    }
    for message, bad in cases.items():
        write_model(bad, tmp_path / "bad.safetensors")
        with pytest.raises(errors.FedcoreError, match=message):
            fedcore.aggregate([Safetensors(tmp_path / "good.safetensors"), tmp_path / "bad.safetensors"], [1, 0])


def test_twenty_files_need_the_memory_of_the_average_and_its_windows(tmp_path):
    write_model({"w": np.ones(3, np.float32)}, small := tmp_path / "small.safetensors")
    paths = [hollow(tmp_path / f"{k}.safetensors", 5_000_000, "float32") for k in range(20)]
    script = PEAK.replace("before =", "fedcore.aggregate([sys.argv[1]] * 2)  # the libraries' own memory\nbefore =")
    peak = python(
        "-c", script.replace("merge(sys.argv[1], sys.argv[2:], rule=RULE)", "aggregate(sys.argv[2:])"), small, *paths
    ).stdout
    assert int(peak) < 20 + 20 + 15  # of 400 MB
