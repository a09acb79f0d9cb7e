"""Safetensors files agree with the format's own library; malformed ones are rejected before anything is allocated."""

import json
import os
import tracemalloc
import zipfile
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

import fedcore
from fedcore import Safetensors, Server, errors, read_model, write_model
from fedcore.model import safetensors
from tests.model.fuzz_safetensors import DELIBERATE, fuzz

KINDS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def tensors():
    rng = np.random.default_rng(0)
    shapes = [(), (3,), (2, 3), (0, 4), (5, 1, 2)]
    found = {f"{kind}.{shape}": rng.integers(0, 2, shape).astype(kind) for kind in KINDS for shape in shapes}
    return found | {'"\\ü\n': np.ones(2, np.float32)}


def test_it_reads_what_the_library_writes_and_the_library_what_it_writes(tmp_path):
    due = tensors()
    save_file(due, tmp_path / "theirs.safetensors", {"format": "np", "ä": "b"})
    model = Safetensors(tmp_path / "theirs.safetensors")
    assert model.metadata == {"format": "np", "ä": "b"}
    write_model(due, tmp_path / "ours.safetensors")
    for read in (model, load_file(tmp_path / "ours.safetensors")):
        assert read.keys() == due.keys()
        for name, array in due.items():
            found = np.asarray(read[name])
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found, array)


def test_bfloat16_and_views_of_torch(tmp_path, monkeypatch):
    due = {
        "b": torch.randn(5).bfloat16(),
        "t": torch.randn(3, 2).t(),
        "n": torch.complex(*torch.ones(2, 2)).conj().imag,
        "one": torch.arange(5).reshape(1, 5)[:, 2],  # contiguous, with a stride of 5
    }
    write_model(due, tmp_path / "m.safetensors")
    assert all(torch.equal(tensor, due[name]) for name, tensor in load_torch(tmp_path / "m.safetensors").items())
    model = Safetensors(tmp_path / "m.safetensors")
    assert np.asarray(model["b"]).dtype == ml_dtypes.bfloat16
    monkeypatch.delitem(__import__("sys").modules, "ml_dtypes")
    np.testing.assert_array_equal(np.asarray(model["b"]), due["b"].float().numpy(), strict=True)
    assert read_model(tmp_path / "m.safetensors")["b"].dtype == np.float32


def sharded(folder):
    folder.mkdir()
    for number, names in enumerate(["ac", "b"]):
        save_file({name: np.full(2, ord(name), np.float32) for name in names}, folder / f"m-{number}.safetensors")
    named = {"a": "m-0.safetensors", "b": "m-1.safetensors", "c": "m-0.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": named}))
    return index, named


def test_a_sharded_model_is_a_folder_or_its_index(tmp_path):
    index, _ = sharded(tmp_path / "m")
    (tmp_path / "link").symlink_to(tmp_path / "m")
    for path in (tmp_path / "m", index, str(tmp_path / "link")):
        found = {name: float(np.asarray(tensor)[0]) for name, tensor in Safetensors(path).items()}
        assert found == {name: ord(name) for name in "abc"}
    (tmp_path / "m" / "m-1.safetensors").rename(tmp_path / "m" / "other.safetensors")
    with pytest.raises(errors.StoreError, match=r"m-1\.safetensors"):
        Safetensors(index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: named | {"a": "m-1.safetensors"}, r"\(a\)"),
        (lambda named: named | {"d": "m-1.safetensors"}, r"\(d\)"),
        (lambda named: {"a": "m-0.safetensors"}, r"\(c\)"),
        (lambda named: named | {"a": "../m/m-0.safetensors"}, "folder"),
        (lambda named: named | {"a": 3}, "folder"),
        (lambda named: [named], "malformed"),
        (lambda named: {}, "malformed"),
    ],
)
def test_an_index_names_each_tensor_and_only_files_beside_it(tmp_path, change, message):
    index, named = sharded(tmp_path / "m")
    index.write_text(json.dumps({"weight_map": change(named)}))
    with pytest.raises(errors.ArrayError, match=message):
        Safetensors(index)


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".pt"])
def test_a_file_without_tensors_is_no_model(tmp_path, ending):
    path = tmp_path / f"m{ending}"
    fedcore.write_model({"w": (torch.zeros if ending == ".pt" else np.zeros)(1)}, path)
    if ending == ".safetensors":
        save_file({}, path)
    elif ending == ".npz":
        np.savez(path)
    else:
        torch.save({}, path)
    for call in (fedcore.read_model, lambda path: fedcore.aggregate([path, path])):
        with pytest.raises(errors.FedcoreError, match=f"m{ending}.*(no tensors|empty)"):
            call(path)


def test_a_torch_file_is_named(tmp_path):
    torch.save({"epoch": 3, "best": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    with pytest.raises(errors.ArrayError, match=r"not in safetensors format; read a torch file by read_model"):
        Safetensors(tmp_path / "a.pt")
    with pytest.raises(errors.ArrayError, match="pass key='best', or --key best"):
        fedcore.read_model(tmp_path / "a.pt")
    torch.save({0: torch.ones(2), "0": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(errors.ArrayError, match="0, '0'"):
        fedcore.read_model(tmp_path / "a.pt")


@pytest.mark.parametrize("ending", ["safetensors", "npz", "pt"])
@pytest.mark.parametrize("name", ["__metadata__", "\ud800", "allow_pickle", "file", "a\0b", "n" * 65_531, "n" * 65_532])
def test_a_name_is_read_again_or_refused(tmp_path, name, ending):
    path = tmp_path / f"m.{ending}"
    with suppress(errors.ArrayError):
        write_model({name: torch.ones(2) if ending == "pt" else np.ones(2)}, path)
    with suppress(errors.ArrayError) if path.exists() else pytest.raises(errors.StoreError):
        fedcore.merge(tmp_path / "out", [path])
    for written in map(tmp_path.joinpath, os.listdir(tmp_path)):
        assert list(read_model(written)) == [name]


@pytest.mark.parametrize("dtype", [object, "V2", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.int4])
def test_a_dtype_that_npz_does_not_hold_is_refused(tmp_path, dtype):
    with pytest.raises(errors.DtypeError, match=r"^w: a \.npz file cannot hold"):
        write_model({"w": np.zeros(2, dtype)}, tmp_path / "m.npz")


def test_a_view_is_written_without_the_memory_around_it(tmp_path):
    whole = torch.arange(100_000.0)
    write_model({"w": whole[3:5], "v": whole[5::50_000], "one": whole[:1].expand(4)}, tmp_path / "m.pt")
    assert (tmp_path / "m.pt").stat().st_size < 5000
    found = read_model(tmp_path / "m.pt")
    assert {name: one.tolist() for name, one in found.items()} == {"w": [3, 4], "v": [5, 50_005], "one": [0] * 4}


def test_a_model_of_several_files_needs_an_index(tmp_path):
    index, _ = sharded(tmp_path / "m")
    index.unlink()
    with pytest.raises(errors.ArrayError, match=r"m-0.*m-1"):
        Safetensors(tmp_path / "m")
    with pytest.raises(errors.StoreError, match="nowhere"):
        Safetensors(tmp_path / "nowhere.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(errors.StoreError, match="regular file"):
        Safetensors(tmp_path / "pipe.safetensors")


def filled(folder, names, index=()):
    """Make a folder with a model of one tensor in each file, and an index of some of the files."""
    folder.mkdir(parents=True)
    for name in names:
        if name.endswith((".safetensors", ".npz")):
            write_model({f"w{name}": np.ones(2, np.float32)}, folder / name)
        else:
            (folder / name).write_bytes(b"PK")
    if index:
        text = json.dumps({"weight_map": {f"w{name}": name for name in index}})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


ONE, TWO, THREE = (f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3))
MODEL = "model.safetensors"
REFUSED = {
    "a part": ([ONE], (), "1 of 3"),
    "two parts": ([ONE, THREE], (), "2 of 3"),
    "a part with other separators": (["model_1_of_2.safetensors"], (), "1 of 2"),
    "a part of a torch model": (["pytorch_model-00002-of-00002.bin"], (), "1 of 2"),
    "an index of two parts of three": ([ONE, TWO], (ONE, TWO), "2 of 3"),
    "a part and a file": ([MODEL, TWO], (), f"1 of 3.*{TWO}.*{MODEL}"),
    "an index and a file": ([ONE, TWO, THREE, MODEL], (ONE, TWO, THREE), f"index.json.*{MODEL}"),
    "a file and a torch file": ([MODEL, "pytorch_model.bin"], (), f"{MODEL}.*pytorch_model.bin"),
    "a suffix in capitals": ([MODEL, "pytorch_model.BIN"], (), f"{MODEL}.*pytorch_model.BIN"),
    "two files that differ in capitals": ([MODEL, "MODEL.SAFETENSORS"], (), f"MODEL.SAFETENSORS.*{MODEL}"),
    "a torch file alone": (["pytorch_model.bin"], (), "path of .*pytorch_model.bin"),
    "a NumPy file alone": (["model.npz"], (), "path of .*model.npz"),
    "two formats of one name": (["a.safetensors", "a.npz"], (), "a.npz.*a.safetensors"),
    "an index and a part of a torch model": (
        [ONE, TWO, THREE, "pytorch_model-00001-of-00002.bin"],
        (ONE, TWO, THREE),
        "1 of 2",
    ),
    "an adapter and a model": (["adapter_model.safetensors", MODEL], (), f"adapter_model.*{MODEL}"),
    "two indices": ([MODEL, "pytorch_model.bin.index.json"], (MODEL,), "safetensors.index.*bin.index"),
}


@pytest.mark.parametrize(("names", "index", "message"), REFUSED.values(), ids=list(REFUSED))
def test_a_folder_with_a_part_of_a_model_or_two_models_is_refused(tmp_path, names, index, message):
    folder, whole = filled(tmp_path / "m", names, index), tmp_path / "whole.safetensors"
    write_model({"w": np.ones(2, np.float32)}, whole)
    for read in (
        read_model,
        Safetensors,
        lambda path: fedcore.aggregate([whole, path]),
        lambda path: fedcore.merge(tmp_path / "out", [path]),
        lambda path: fedcore.merge(tmp_path / "out", [whole], base=path),
    ):
        with pytest.raises(errors.ArrayError, match=message):
            read(folder)
    for name in names:  # the path of one file is the caller's choice
        if name.endswith(".safetensors"):
            assert list(read_model(folder / name)) == [f"w{name}"]


def test_other_files_in_a_folder_are_no_models(tmp_path):
    others = ["training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "optimizer.bin", "config.json"]
    assert len(Safetensors(filled(tmp_path / "one", [MODEL, *others]))) == 1
    assert len(Safetensors(filled(tmp_path / "all", [ONE, TWO, THREE, *others], (ONE, TWO, THREE)))) == 3
    assert len(Safetensors(filled(tmp_path / "whole", ["model-00001-of-00001.safetensors"]))) == 1


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "9" * 5000 + "-of-" + "9" * 5000, "x" * 5000])
def test_an_index_of_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    filled(tmp_path / "m", [MODEL], (name,))
    with pytest.raises(errors.FedcoreError, match=r"index\.json|xxx|999") as caught:
        read_model(tmp_path / "m")
    assert str(caught.value).encode()


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_a_name_that_no_file_can_have_is_a_store_error(tmp_path, name):
    for use in (read_model, Safetensors, lambda path: write_model({"w": np.ones(2, np.float32)}, path)):
        with pytest.raises(errors.StoreError, match=r"\.npz: cannot"):
            use(tmp_path / f"{name}.npz")


HOSTILE = {
    "empty": b"",
    "seven bytes": bytes(7),
    "a header longer than the file": (2**40).to_bytes(8, "little") + b"{}",
    "a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}",
    "no object": file_of(b"[]"),
    "deep": file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep metadata": file_of(b'{"__metadata__":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"),
    "many lists": file_of(b'{"a":[' + b"[]," * 1_000_000 + b"[]]}"),
    "twice": file_of(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
    "twice, one escaped": file_of(b'{"a":%s,"\\u0061":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
    "a field twice": file_of(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "two shapes": file_of(b'{"a":{"dtype":"F32","shape":[1],"shape":[1]}}', bytes(4)),
    "a gap": file_of({"a": entry(), "b": entry(offsets=(8, 12))}, bytes(12)),
    "an overlap": file_of({"a": entry(shape=(2,), offsets=(0, 8)), "b": entry(offsets=(4, 8))}, bytes(8)),
    "data before the first": file_of({"a": entry(offsets=(4, 8))}, bytes(8)),
    "data after the last": file_of({"a": entry()}, bytes(5)),
    "too few data": file_of({"a": entry()}, bytes(3)),
    "no tensor, but data": file_of({}, bytes(1)),
    "a shape that does not fit": file_of({"a": entry(shape=(2,))}, bytes(4)),
    "a negative side": file_of({"a": entry(shape=(-1, -1))}, bytes(4)),
    "a side of true": file_of({"a": entry(shape=(True,))}, bytes(4)),
    "a product past 2^64": file_of({"a": entry(shape=(2**33, 2**33, 0), offsets=(0, 0))}),
    "backwards": file_of({"a": entry(offsets=(4, 0))}, bytes(4)),
    "33 axes": file_of({"a": entry(shape=(1,) * 33)}, bytes(4)),
    "an unknown dtype": file_of({"a": entry("F8_E4M3", (4,))}, bytes(4)),
    "100,001 empty tensors": file_of(
        b"{%s}" % b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(100_001))
    ),
    "17 MB of metadata": file_of(b'{"__metadata__":{%s}}' % b",".join(b'"%07d":""' % i for i in range(1_400_000))),
    "leading zeros": file_of(json.dumps({"a": entry()}).replace("[1]", "[01]").encode(), bytes(4)),
    "broken UTF-8": file_of(b'{"\xff":%s}' % json.dumps(entry()).encode(), bytes(4)),
    "a surrogate in UTF-8": file_of(b'{"\xed\xa0\x80":%s}' % json.dumps(entry()).encode(), bytes(4)),
    "half a surrogate": file_of(b'{"\\ud800":%s}' % json.dumps(entry()).encode(), bytes(4)),
    "a number as metadata": file_of({"__metadata__": {"a": 1}}),
    "a comma too many": file_of(json.dumps({"a": entry()}).replace("}}", "}, }").encode(), bytes(4)),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=list(HOSTILE))
def test_malformed_files_are_rejected_without_allocating_more_than_the_file(tmp_path, data):
    (tmp_path / "m.safetensors").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises((errors.ArrayError, errors.ShapeError, errors.DtypeError), match=r"m\.safetensors"):
            Safetensors(tmp_path / "m.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data) + 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("cases", [1000, pytest.param(300_000, marks=pytest.mark.endurance)])
def test_fuzzed_files_are_read_as_the_library_reads_them_or_refused_by_a_listed_reason(tmp_path, cases):
    found = fuzz(cases, cases, tmp_path)
    assert min(found["accepted"], found["refused by both"]) > cases / 8
    assert found.keys() >= DELIBERATE.keys()


def test_a_tensor_of_more_than_2_31_elements(tmp_path):
    n, path = 2**31 + 5, tmp_path / "m.safetensors"
    head = safetensors.header_of([("first", "float32", (3,)), ("w", "bfloat16", (n,))])
    with open(path, "wb") as file:
        file.write(head)
        file.seek(len(head) + 12 + 2 * (n - 2))
        file.write(np.array([1.5, -2], ml_dtypes.bfloat16).tobytes())
    model = Safetensors(path)
    assert model["w"].shape == (n,)
    np.testing.assert_array_equal(model["w"].read(n - 3).astype(np.float32), [0, 1.5, -2])


def test_a_file_that_changes_or_shrinks_is_noticed(tmp_path):
    path = tmp_path / "m.safetensors"
    write_model({"w": np.ones(10, np.float32)}, path)
    model = Safetensors(path)
    write_model({"w": np.zeros(10, np.float32)}, path)
    with pytest.raises(errors.CorruptionError, match="changed"):
        np.asarray(model["w"])
    tensor = Safetensors(path)["w"]
    with open(path, "r+b") as file:
        file.truncate(60)
        memory, start = np.empty(40, np.uint8), tensor.start
        with pytest.raises(errors.CorruptionError, match="cut off"):
            safetensors.read_at(file.fileno(), start, memory, str(path))


def test_it_is_a_model_of_a_server(tmp_path):
    save_torch({"w": torch.ones(3).bfloat16(), "n": torch.tensor(4)}, tmp_path / "x.safetensors")
    write_model({"w": np.float32([1, 2, 3]), "n": np.array(5)}, tmp_path / "y.safetensors")
    server = Server(Safetensors(tmp_path / "x.safetensors"), "FedAvg", 2, lr=0.1)
    with server.open_round() as round:
        round.add(0, Safetensors(tmp_path / "y.safetensors"), steps=1)
    assert round.report.accepted == (0,)
    np.testing.assert_array_equal(server.x, [1, 2, 3])
    net = torch.nn.Sequential()
    net.w = torch.nn.Parameter(torch.zeros(3))
    net.head = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(errors.ArrayError, match="head"):
        server.load_into(net)
    server.load_into(net, strict=False)
    assert net.w.tolist() == [1, 2, 3]


def test_the_own_format_of_each_suffix_is_read_again(tmp_path):
    due = {"w": np.float32([[1, 2]]), "n": np.array(3)}
    for name in ("m.safetensors", "m.npz"):
        write_model(due, tmp_path / name)
        assert all(np.array_equal(found, due[name]) for name, found in read_model(tmp_path / name).items())
    state = torch.nn.Linear(2, 1).state_dict()
    torch.save({"net": state, "epoch": 3}, tmp_path / "m.pt")
    assert torch.equal(fedcore.read_model(tmp_path / "m.pt", key="net")["weight"], state["weight"])
    torch.save(state, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    fedcore.merge(tmp_path / "out", [tmp_path / "old.bin"])
    for model in (read_model(tmp_path / "old.bin"), fedcore.aggregate([tmp_path / "old.bin"])):
        assert torch.equal(model["weight"], state["weight"])
    with pytest.raises(errors.ArrayError, match=r"'net', 'epoch'"):
        read_model(tmp_path / "m.pt")
    with pytest.raises(errors.ArrayError, match="key"):
        read_model(tmp_path / "m.npz", key="net")
    damaged = bytearray((tmp_path / "m.npz").read_bytes())
    damaged[damaged.index(np.float32([[1, 2]]).tobytes())] ^= 1
    for name in ("m.pt", "m.npz", "m.safetensors"):
        for content in (damaged, b"version https://git-lfs", b"PK\x03\x04nothing", b"\x93NUMPY\x01\x00v\x00"):
            (tmp_path / name).write_bytes(content)
            for read in (read_model, lambda path: fedcore.aggregate([path])):
                with pytest.raises(errors.FedcoreError, match=rf"{name}: (cannot be read|is not in)"):
                    read(tmp_path / name)
    for shape in ((5,), (True,), (-1, -1), (0, 2**62, 2**62), (1,) * 70):
        with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive, archive.open("w.npy", "w") as member:
            np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": shape})
            member.write(bytes(4))
        with pytest.raises(errors.StoreError, match=r"m\.npz.*'w'"):
            fedcore.aggregate([tmp_path / "m.npz"])
    with pytest.raises(errors.DtypeError, match="bfloat16"):  # numpy would store bytes without a dtype
        write_model({"w": np.ones(2, ml_dtypes.bfloat16)}, tmp_path / "b.npz")
