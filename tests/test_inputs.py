"""Containers and dtypes of models: every entry point accepts and rejects the same inputs."""

import warnings

import numpy as np
import pytest
import torch

import fedcore
from fedcore import Compute, Server, Update
from fedcore.cluster import LocalThreads
from fedcore.errors import DivergedError, FedcoreError
from fedcore.server.folder import read_model
from fedcore.sim.network import Network


class OnlyDLPack:
    """An array of a library that supports only DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def in_aggregate(x0, replies):
    return fedcore.aggregate(replies)


def after_a_round(server, replies):
    """Return a server after a round of these updates; raise the first rejection."""
    with server.open_round() as round:
        for client, reply in enumerate(replies):
            round.add(client, reply, steps=1)
    if round.report.rejected:
        raise FedcoreError(round.report.rejected[0][1])
    return server


def in_server(x0, replies):
    return after_a_round(Server(x0, "FedAvg", len(replies), lr=0.1), replies).tensors()


def in_shards(x0, replies):
    with Server(x0, "FedAvg", len(replies), lr=0.1, compute=Compute(executor=LocalThreads())) as server:
        return after_a_round(server, replies).tensors()


def in_network(x0, replies):
    network = Network([x0] * len(replies), np.full((len(replies),) * 2, 1 / len(replies)), lr=0.1)
    return after_a_round(network, replies).tensors(0)


ENTRIES = [in_aggregate, in_server, in_shards, in_network]
W, B = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array(5.0)


def as_numpy(dtype):
    return lambda array: array.astype(dtype)


def as_torch(dtype):
    return lambda array: torch.tensor(array, dtype=dtype)


CASTS = {
    "float32": as_numpy("f4"),
    "float64": as_numpy("f8"),
    "float16": as_numpy("f2"),
    "torch": as_torch(torch.float32),
    "torch-double": as_torch(torch.float64),
    "torch-bfloat16": as_torch(torch.bfloat16),
    "torch-half": as_torch(torch.float16),
}
CONTAINERS = {
    "mapping": lambda w, b: {"w": w, "b": b},
    "list": lambda w, b: [w, b],
    "nested": lambda w, b: {"layers": [{"w": w}, {"b": b}]},
    "another order": lambda w, b: {"b": b, "w": w},
}


def values(tree):
    if isinstance(tree, dict):
        return {name: values(part) for name, part in tree.items()}
    if isinstance(tree, list):
        return [values(part) for part in tree]
    return tree.double().tolist() if isinstance(tree, torch.Tensor) else np.float64(tree).tolist()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("cast", CASTS)
def test_the_result_has_library_dtypes_and_nesting_of_the_first_model(entry, container, cast):
    make, of = CONTAINERS[container], CASTS[cast]
    x0, update, expected = (make(of(W * by), of(np.array(B * by))) for by in (0, 3, 2))
    got = entry(x0, [make(of(W), of(B)), update])
    assert values(got) == values(expected)
    leaves = [got, expected]
    for _ in range(3):
        leaves = [
            next(iter(one.values())) if isinstance(one, dict) else one[0] if isinstance(one, list) else one
            for one in leaves
        ]
    assert type(leaves[0]) is type(leaves[1])
    assert leaves[0].dtype == leaves[1].dtype


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("first", CASTS)
@pytest.mark.parametrize("other", CASTS)
def test_updates_of_another_float_dtype_or_library_are_accepted(entry, first, other):
    replies = [{"w": CASTS[first](W)}, {"w": CASTS[other](3 * W)}]
    assert values(entry({"w": CASTS[first](0 * W)}, replies)) == {"w": (2 * W).tolist()}


@pytest.mark.parametrize("entry", ENTRIES)
def test_objects_that_support_only_dlpack_are_accepted(entry):
    replies = [{"w": OnlyDLPack(W.astype("f4"))}, {"w": OnlyDLPack(torch.tensor(3 * W, dtype=torch.bfloat16))}]
    assert values(entry({"w": OnlyDLPack(0 * W.astype("f4"))}, replies)) == {"w": (2 * W).tolist()}


@pytest.mark.parametrize("entry", ENTRIES)
def test_modules_are_accepted(entry):
    def net(value):
        made = torch.nn.Linear(2, 1)
        with torch.no_grad():
            made.weight.fill_(value)
            made.bias.fill_(value)
        return made

    got = entry(net(0), [net(1), net(3)])
    assert values(got) == {"weight": [[2.0, 2.0]], "bias": [2.0]}


MASK = np.triu(np.full((2, 2), -np.inf), 1)
CONSTANTS = {
    "mask": MASK.astype("f4"),
    "half mask": torch.tensor(MASK, dtype=torch.bfloat16),
    "bool": np.array([True, False]),
    "packed": np.array([3, 200], np.uint8),
    "codes": torch.tensor([5, -100], dtype=torch.int8),
    "indices": torch.arange(3),
    "small scalar": np.array(7, np.int16),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_unchanged_and_must_be_equal(entry, name):
    constant = CONSTANTS[name]
    of = torch.tensor if isinstance(constant, torch.Tensor) else np.float32
    models = [{"w": of([float(k)]), "c": constant} for k in (0, 1, 3)]
    got = entry(models[0], models[1:])
    assert float(got["w"][0]) == 2
    assert type(got["c"]) is type(constant)
    assert got["c"].dtype == constant.dtype
    assert np.array_equal(
        np.asarray(got["c"].float() if isinstance(constant, torch.Tensor) else got["c"]),
        constant.float() if isinstance(constant, torch.Tensor) else constant,
    )
    changed = constant.clone() if isinstance(constant, torch.Tensor) else constant.copy()
    changed.reshape(-1)[-1] = not changed.reshape(-1)[-1]
    differing = models[0], [models[1], models[2] | {"c": changed}]
    if name in ("packed", "codes", "indices") or entry is in_aggregate:
        with pytest.raises(FedcoreError, match=r"\bc\b"):
            entry(*differing)
    else:  # a flag changes only with the majority
        assert str(entry(*differing)["c"]) == str(constant)


COUNTS = {"numpy": np.int64, "torch": torch.tensor, "int32": np.int32, "uint64": np.uint64}


@pytest.mark.parametrize("of", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", ["num_batches_tracked", "steps"])
def test_a_counter_becomes_the_largest_one(of, name):
    for entry in ENTRIES:
        models = [
            {"w": np.float32([0]), name: np.asarray(of(k)) if of is not torch.tensor else of(k)} for k in (5, 7, 9)
        ]
        assert int(entry(models[0], models[1:])[name]) == 9


@pytest.mark.parametrize("kind", ["model", "delta"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_counters_and_constants_of_differences(kind, dtype):
    x0 = {
        "w": np.zeros(1, np.float32),
        "num_batches_tracked": np.array(5, dtype),
        "mask": MASK.astype("f4"),
        "packed": np.array([3, 200], np.uint8),
        "bool": np.array([True]),
    }
    server = Server(x0, "FedAvg", 3, lr=0.1)
    with server.open_round() as round:
        for client, batches in enumerate((3, 2)):
            model = x0 | {"w": np.float32([1]), "num_batches_tracked": np.array(5 + batches, dtype)}
            with np.errstate(invalid="ignore"):
                delta = {name: model[name] ^ x0[name] if name == "bool" else model[name] - x0[name] for name in x0}
            assert round.add(client, model if kind == "model" else delta, steps=1, kind=kind)
        bad = (delta if kind == "delta" else model) | {"packed": np.array([1, 0], np.uint8)}
        assert not round.add(2, bad, steps=1, kind=kind)
    assert "packed" in round.report.rejected[0][1]
    got = server.tensors()
    assert got["num_batches_tracked"] == 8
    assert got["num_batches_tracked"].dtype == dtype
    assert all(np.array_equal(got[name], x0[name]) for name in ("mask", "packed", "bool"))


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC", "SCAFFOLD", "FedNova"])
def test_a_counter_may_grow_by_more_than_the_steps(method):
    """BatchNorm counts forward passes, and a step may have several."""
    x0 = {"w": np.zeros(1, np.float32), "num_batches_tracked": np.array(0)}
    server = Server(x0, method, 2, lr=0.1)
    control = {"control": np.zeros(1, np.float32)} if method == "SCAFFOLD" else {}
    with server.open_round() as round:
        for client in range(2):
            round.add(client, x0 | {"num_batches_tracked": np.array(32)}, steps=4, **control)
    assert round.report.accepted == (0, 1)
    assert server.tensors()["num_batches_tracked"] == 32


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SPARSE = torch.eye(2).to_sparse_csr()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("reply", "names"),
    [
        ({"w": torch.eye(2).to_sparse()}, ["w", "sparse_coo", "to_dense"]),
        ({"w": SPARSE}, ["w", "sparse_csr"]),
        ({"w": np.zeros((2, 3), "f4")}, ["w", "shape"]),
        ({"w": np.zeros((2, 2), "c8")}, ["w", "complex64"]),
        ({"w": np.zeros((2, 2), "i4")}, ["w", "int32"]),
        ({"w": np.full((2, 2), np.nan, "f4")}, ["w", "NaN"]),
        ({"module.w": np.zeros((2, 2), "f4")}, ["'module.'", "remove"]),
        ({"_orig_mod.w": np.zeros((2, 2), "f4")}, ["'_orig_mod.'"]),
        ({"model.w": np.zeros((2, 2), "f4")}, ["'model.'"]),
        ({"w.default": np.zeros((2, 2), "f4")}, ["'.default'"]),
        ({f"a{k}": np.zeros(1, "f4") for k in range(500)}, ["missing 1 (w)", "unexpected 500"]),
        ({"w": "text"}, ["w", "array"]),
        (7, ["int"]),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, dict) else "",
)
def test_invalid_updates_are_rejected_by_tensor_name_in_500_characters(entry, reply, names):
    with pytest.raises(FedcoreError) as found:
        entry({"w": np.zeros((2, 2), "f4")}, [{"w": np.ones((2, 2), "f4")}, reply])
    for name in names:
        assert name in str(found.value)
    assert len(str(found.value)) <= 500


@pytest.mark.parametrize("shards", [0, 2])
def test_a_step_beyond_the_model_s_dtype_is_rolled_back(shards):
    x0 = {"w": torch.full((40_000,), 65504, dtype=torch.float16)}
    made = {"lr": 1.0, "server_lr": 1.0}
    server = Server(x0, "FedAvg", 1, compute=Compute(shards=2), **made) if shards else Server(x0, "FedAvg", 1, **made)
    with pytest.raises(fedcore.errors.DivergedError):
        server.round([fedcore.Update(0, value=np.full(40_000, -1000, np.float32), kind="gradient", steps=1)])
    assert torch.isfinite(torch.as_tensor(server.tensors(library="torch")["w"])).all()
    server.close()


def test_nested_models_are_saved_and_loaded(tmp_path):
    x0 = {"layers": [{"w": W}, {"b": B}], "mask": MASK, "n": np.array(3)}
    server = Server(x0, "FedAvg", 2, lr=0.1, storage=tmp_path / "s")
    server.close()
    with Server.load(tmp_path / "s") as again:
        got = again.tensors()
        assert values(got) == values(x0)
        assert got["layers"][0]["w"].dtype == np.float64
        again.round([fedcore.Update(0, x0, 1)])
        again.save(tmp_path / "copy")
    assert values(read_model(tmp_path / "copy").tensors()) == values(x0)


def test_a_node_s_step_beyond_float16_is_an_error():
    network = Network([{"a": np.float16([40000])}] * 2, [[0.75, 0.25], [0.25, 0.75]], lr=0.1)
    with pytest.raises(DivergedError, match=r"^round 0\b.*\ba\b"):
        network.round([Update(node, value={"a": np.float32([40000])}, kind="delta", steps=1) for node in (0, 1)])
    assert network.round_number == 0
