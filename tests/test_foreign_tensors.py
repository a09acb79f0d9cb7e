"""Tensors of every class and layout of torch, at every door: the right numbers, or an error that names the tensor."""

import math
import re
import sys
import warnings
from contextlib import suppress
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import torch.testing._internal.common_subclass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import fedcore
from fedcore import Layout, Model, Server, Update, errors, kernels
from fedcore.model.files import write_model
from fedcore.sim.data import from_arrays
from fedcore.sim.data.partitions import iid
from tests.kit import python

SHAPE = (2, 16384)


def within(mode, make):
    def made(x):
        with mode():
            return make(x)

    return made


def inside(transform):
    """The tensor that a function under a transform of torch.func sees; used after the transform."""

    def made(x):
        seen = []
        transform(lambda one: (seen.append(one), one.sum())[1])(x)
        return seen[0]

    return made


def with_storage(size, offset=0):
    """A tensor whose storage has another size in bytes, as FSDP frees that of its flat parameter."""

    def made(x):
        part = torch.cat([x[:1]] * offset + [x])[offset:]
        part.untyped_storage().resize_(size)
        return part

    return made


def of_complex(x):
    return torch.complex(x, -x)


MAKERS = {
    "plain": lambda x: x,
    "a parameter": torch.nn.Parameter,
    "a buffer": torch.nn.Buffer,
    "float64": lambda x: x.double(),
    "requires grad": lambda x: x.clone().requires_grad_() * 1,
    "a view": lambda x: torch.stack([x, -x], dim=-1)[..., 0],
    "negated": lambda x: torch._neg_view(-x),
    "a negated bfloat16": lambda x: torch._neg_view(-x.bfloat16()),
    "an imaginary part": lambda x: of_complex(x).conj().imag,
    "complex": of_complex,
    "conjugate": lambda x: of_complex(x).conj(),
    "expanded": lambda x: x[:1].expand(x.shape),
    "of no elements": lambda _: torch.zeros(0, SHAPE[1]),
    "meta": lambda x: x.to("meta"),
    "fake": within(FakeTensorMode, lambda x: torch.ones(x.shape)),
    "converted to fake": lambda x: FakeTensorMode().from_tensor(x),
    "functional": torch._to_functional_tensor,
    "a FunctionalTensor": within(FunctionalTensorMode, FunctionalTensor.to_functional),
    "batched": inside(torch.vmap),
    "differentiated": inside(torch.func.grad),
    "functionalised": inside(torch.func.functionalize),
    "zero tensor": lambda x: torch._efficientzerotensor(x.shape),
    "freed": with_storage(0),
    "shrunk": with_storage(8),
    "nested": lambda x: torch.nested.nested_tensor([*x]),
    "jagged": lambda x: torch.nested.nested_tensor([*x], layout=torch.jagged),
    "masked": lambda x: masked_tensor(x, x > 0),
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
    "mkldnn": lambda x: x.to_mkldnn(),
    "qint8": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "quint8 by channel": lambda x: torch.quantize_per_channel(
        x, torch.ones(len(x)), torch.zeros(len(x)), 0, torch.quint8
    ),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "an empty parameter": lambda _: torch.nn.UninitializedParameter(),
    "an empty buffer": lambda _: torch.nn.UninitializedBuffer(),
    "two tensors": lambda x: TwoTensor(x, x),
    "a parameter of two tensors": lambda x: torch.nn.Parameter(TwoTensor(x, x)),
    "memmap": lambda x: x.numpy().view(np.memmap),
    "matrix": lambda x: x.numpy().view(np.matrix),
    "recarray": lambda x: x.numpy().view(np.recarray),
    "a masked array": lambda x: np.ma.masked_less(x.numpy(), 0),
}


def derived(kind):
    """The classes that derive from a class in the imported modules."""
    for child in type.__subclasses__(kind):
        yield child
        yield from derived(child)


for _class in derived(torch.Tensor):
    if _class.__module__.startswith("torch"):
        _name = f"{_class.__module__}.{_class.__name__}"
        MAKERS |= {
            f"{_name} of one": _class,
            f"{_name} of two": lambda x, kind=_class: kind(x, x),
            f"{_name} over memory": lambda x, kind=_class: torch.Tensor._make_subclass(kind, x),
        }


def server(**more):
    return Server({"w": np.zeros(SHAPE, np.float32)}, "FedAvg", clients=1, lr=1.0, **more)


def rounded(update, **more):
    made = server(**more)
    report = made.round([update])
    return refused(report) or made.tensors()["w"]


def refused(report):
    if report.rejected:
        raise errors.ArrayError(report.rejected[0][1])


def in_float32(tensor):
    """The numbers as torch reads them, or those of ``Layout`` for a tensor that torch cannot read so."""
    if not isinstance(tensor, torch.Tensor):
        return np.array(tensor, np.float32)
    try:
        if type(tensor) is torch.Tensor:
            tensor.as_strided(tensor.shape, tensor.stride())  # raises an error if the storage is too short
            tensor = tensor.clone() if tensor._is_zerotensor() else tensor  # torch would read from its address
        return np.array(tensor.detach().to(torch.float32).tolist(), np.float32)
    except Exception:
        raise errors.ArrayError("w") from None


def flat(tensor):
    try:
        return tensor.reshape(-1)
    except Exception:  # torch has no such view
        raise errors.ArrayError("model") from None


def in_module(tensor):
    net = torch.nn.Module()
    net.first = torch.nn.Parameter(torch.zeros(1))
    try:
        net.register_buffer("w", tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(np.array(tensor)))
        net.state_dict()
    except Exception:  # torch cannot detach the tensor
        raise errors.ArrayError("w") from None
    return Server(net, clients=1, lr=1.0).tensors()["w"]


def as_control(tensor):
    zeros = np.zeros(SHAPE, np.float32)
    made = Server({"w": zeros}, fedcore.algorithms.named("SCAFFOLD", control="sent"), clients=1, lr=1.0)
    refused(made.round([Update(0, {"w": zeros}, 1, control=flat(tensor))]))
    return made.row(0).reshape(SHAPE) if hasattr(made, "row") else None


def written(tensor):
    made = server()
    with made.open_round() as round:
        incoming = round.begin(0, steps=1)
        incoming.write("w", tensor)
        incoming.done()
    return refused(round.report) or made.tensors()["w"]


def as_scales(tensor):
    made = server()
    with made.open_round() as round:
        incoming = round.begin(0, steps=1)
        incoming.write("w", np.ones(math.prod(SHAPE), np.int8), scales=tensor, block=1)
        incoming.done()
    return refused(round.report) or made.tensors()["w"]


def in_file(suffix, read):
    def passed(tensor):
        with TemporaryDirectory() as folder:
            write_model({"w": tensor}, f"{folder}/w{suffix}")
            return read(f"{folder}/w{suffix}")["w"]

    return passed


def in_torch_file(read):
    def passed(tensor):
        with TemporaryDirectory() as folder:
            try:
                torch.save({"w": tensor}, f"{folder}/w.pt")
            except Exception:  # torch cannot save every class
                raise errors.ArrayError("w") from None
            return read(f"{folder}/w.pt")["w"]

    return passed


def loaded(tensor):
    before = np.zeros(SHAPE, np.float32)
    with suppress(errors.ArrayError):
        before = in_float32(tensor)
    Server({"w": before + 1}, clients=1, lr=1.0).load_into({"w": tensor})
    return in_float32(tensor) - 1


def to_edge(tensor):
    edge = fedcore.EdgeAggregator({"w": np.zeros(SHAPE, np.float32)}, "FedAvg", [0], lr=1.0)
    with edge.open_round({"w": tensor}, round=0) as opened:
        opened.add(0, np.zeros(math.prod(SHAPE), np.float32), steps=1, kind="delta")
        opened.partial_sum()
    return edge._state.snapshot.x.reshape(SHAPE)


def stored(tensor):
    with fedcore.ClientStore(1, 1) as store:
        store.commit(0, {"w": tensor})
        return np.array(store.vector("w"))


def as_examples(tensor):
    try:
        rows = [*tensor]
    except Exception:  # torch cannot iterate over the tensor
        raise errors.ArrayError("train_x") from None
    whole, listed = (from_arrays(x, [0, 1], np.zeros((1, SHAPE[1])), [0]).train_x for x in (tensor, rows))
    np.testing.assert_array_equal(whole, listed)
    return listed


def in_totals(tensor):
    totals = fedcore.Totals({"w": np.zeros(SHAPE)}, 1)
    with totals.open_round() as round:
        round.add(0, {"w": tensor})
    return refused(round.report) or round.report.totals["w"]


def mixed(tensor):
    kernels.mix([flat(tensor)], [[1.0]])
    return tensor


DOORS = {
    "first model": lambda t: Server({"w": t}, clients=1, lr=1.0).tensors()["w"],
    "first array": lambda t: Server(t, clients=1, lr=1.0).x.reshape(-1, SHAPE[1]),
    "first list": lambda t: Server([t], clients=1, lr=1.0).tensors()[0],
    "first tree": lambda t: Server({"a": [t]}, clients=1, lr=1.0).tensors()["a"][0],
    "a group": lambda t: Server(Model({"w": t}, partial={"a": "w"}), clients=1, lr=1.0).tensors()["w"],
    "shards": lambda t: Server({"w": t}, clients=1, lr=1.0, compute=fedcore.Compute(shards=2)).tensors()["w"],
    "module": in_module,
    "add": lambda t: rounded(Update(0, {"w": t}, 1)),
    "add to shards": lambda t: rounded(Update(0, {"w": t}, 1), compute=fedcore.Compute(shards=2)),
    "vector": lambda t: rounded(Update(0, flat(t), 1)),
    "delta": lambda t: rounded(Update(0, {"w": t}, 1, kind="delta")),
    "gradient": lambda t: -rounded(Update(0, flat(t), 1, kind="gradient")),
    "control": as_control,
    "write": written,
    "scales": as_scales,
    "edge": to_edge,
    "aggregate": lambda t: fedcore.aggregate([{"w": t}, {"w": t}])["w"],
    "aggregate as the second": lambda t: fedcore.aggregate([{"w": torch.zeros(SHAPE)}, {"w": t}], [0, 1])["w"],
    "aggregate arrays": lambda t: fedcore.aggregate([t, t]),
    "aggregate an iterator": lambda t: fedcore.aggregate(iter([{"w": t}, {"w": t}]))["w"],
    "a median": lambda t: fedcore.aggregate([{"w": t}] * 3, rule="median")["w"],
    "flatten": lambda t: Layout.of({"w": t}).flatten({"w": t}).reshape(-1, SHAPE[1]),
    "network": lambda t: fedcore.Network([{"w": t}], [[1.0]], lr=1.0).tensors(0)["w"],
    "safetensors": in_file(".safetensors", fedcore.read_model),
    ".pt": in_file(".pt", fedcore.read_model),
    "a torch file": in_torch_file(fedcore.read_model),
    "aggregate torch files": in_torch_file(lambda path: fedcore.aggregate([path, path])),
    "load_into": loaded,
    "kernel": lambda t: kernels.weighted_sum([flat(t)], [1.0]).reshape(-1, SHAPE[1]),
    "store": stored,
    "totals": in_totals,
    "mix": mixed,
    "examples": as_examples,
}


BARE = {"vector", "gradient", "control", "scales", "kernel", "mix", "write", "safetensors", ".pt", "store", "load_into"}
BARE |= {"examples", "a torch file", "aggregate torch files"}
"""The doors that take contiguous tensors of some dtypes or of one library, without gradients."""
ACCEPTED = {"plain", "a parameter", "a buffer", "float64", "requires grad", "a view", "negated", "an imaginary part"}
ACCEPTED |= {"expanded", "memmap", "matrix", "recarray"}
NAMED = re.compile(
    r"(client \d+|w|update: parts|\S*w\.pt|a\.0|0|x|model|(model|row)s\[0\]|control"
    r"|gradient|scales|(train|test)_[xy]|vectors\['w'\]|tensors)(?!\w)"
)


def outcome(read):
    try:
        return read(), None
    except errors.FedcoreError as error:
        return None, str(error)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.endurance)])
def test_every_tensor_gives_its_numbers_or_an_error_that_names_it(door, seed):
    numbers = np.random.default_rng(seed).permutation(16)[:9] + 1
    x = torch.from_numpy(np.resize(np.float32(numbers), SHAPE))
    for name, make in MAKERS.items():
        check(door, name, make, x)


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.endurance)])
def test_every_view_at_an_offset_gives_its_numbers_or_an_error(stride):
    """In a separate process, since a tensor without memory has an address near 0 there; each door has some makers."""
    python("-m", __name__, stride, timeout=600)


def check(door, name, make, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tensor = make(x.clone())
        except Exception:  # no way to make this class
            return
        _ = [np.full(SHAPE, -7, np.float32) for _ in range(8)]  # memory that new arrays get
        got, error = outcome(lambda: in_float32(DOORS[door](tensor)))
    if error is not None:
        assert NAMED.match(error), (name, error)
        assert name not in ACCEPTED or door in BARE, (name, error)
        return
    due = {"expanded": x[:1].expand(*SHAPE), "of no elements": x[:0], "zero tensor": x * 0}.get(name, x)
    np.testing.assert_array_equal(got.ravel(), due.numpy().ravel(), err_msg=name)


ADVICE = {
    "meta": "load them",
    "fake": "plain tensor",
    "functional": "plain tensor",
    "nested": "to_padded_tensor",
    "jagged": "to_padded_tensor",
    "masked": "to_tensor",
    "csr": "to_dense",
    "mkldnn": "to_dense",
    "qint8": "dequantize",
    "an empty parameter": "call the module",
}


@pytest.mark.parametrize("name", ADVICE)
@pytest.mark.filterwarnings("ignore")
def test_the_error_has_the_class_and_the_way_out(name):
    tensor = MAKERS[name](torch.ones(SHAPE))
    with pytest.raises(errors.ArrayError, match=rf"^w: .*\b{type(tensor).__name__}\b.*{ADVICE[name]}"):
        Server({"w": tensor}, clients=1, lr=1.0)
    report = server().round([Update(0, {"w": tensor}, 1)])
    assert ADVICE[name] in report.rejected[0][1]


class Spread(torch.Tensor):
    """A quantised tensor as of torchao: its class knows the numbers, its memory has none."""

    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, *_, **__):
        raise NotImplementedError

    def dequantize(self):
        return self.codes.float()


def test_a_client_with_a_wrapper_is_rejected_and_the_others_count():
    made = Server(np.zeros(3, np.float32), clients=3, lr=1.0)
    for odd in (Spread(torch.ones(3)), torch._to_functional_tensor(torch.ones(3))):
        updates = [Update(0, odd, 1), *(Update(client, torch.full((3,), 2.0), 1) for client in (1, 2))]
        report = made.round(updates)
        assert report.accepted == (1, 2)
        assert report.rejected[0][1].startswith("model")
        np.testing.assert_array_equal(made.x, np.full(3, 2, np.float32))


def test_the_numbers_of_a_sharded_module_arrive():
    """DTensors of one process are read; of a mesh of two, they are refused without a collective call."""
    python("-c", SHARDED)


SHARDED = """
import os
import tempfile
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
import fedcore
from fedcore import Server, Update, errors

store = tempfile.NamedTemporaryFile()
dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))

def client(value):
    net = torch.nn.Linear(2, 4, bias=False)
    net.weight.data.fill_(value)
    fully_shard(net, mesh=mesh)
    return net

for sent in (client, lambda value: client(value).state_dict()):
    server = Server(sent(0.0), clients=2, lr=0.1)
    report = server.round([Update(number, sent(2.0 * number + 1), 1) for number in range(2)])
    assert report.accepted == (0, 1) and (server.x == 2).all(), report
    average = fedcore.aggregate([sent(1.0), sent(3.0)])["weight"]
    assert type(average) is torch.Tensor and (average == 2).all()
    net = client(0.0)
    server.load_into(net)
    assert (net.weight.to_local() == 2).all()
for placement in (Shard(0), Replicate(), Partial()):
    tensor = DTensor.from_local(torch.ones(4), mesh, [placement])
    assert (Server({"w": tensor}, clients=1, lr=1.0).x == 1).all()
try:
    Server({"w": DTensor.from_local(TwoTensor(torch.ones(4), torch.ones(4)), mesh, [Shard(0)])}, clients=1, lr=1.0)
except errors.ArrayError as error:
    assert "w: " in str(error) and "TwoTensor" in str(error)
else:
    raise AssertionError
dist.destroy_process_group()

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
replicated, *others = (DTensor.from_local(torch.ones(4), mesh, [one], run_check=False)
                       for one in (Replicate(), Shard(0), Partial()))
assert (Server({"w": replicated}, clients=1, lr=1.0).x == 1).all()
for tensor in others:
    for door in (lambda: Server({"w": tensor}, clients=1, lr=1.0), lambda: fedcore.aggregate([{"w": tensor}])):
        try:
            door()
        except errors.ArrayError as error:
            assert "w: " in str(error) and "DTensor" in str(error) and "full_tensor() on all ranks" in str(error)
        else:
            raise AssertionError
"""


WITHOUT_NUMBERS = {
    "functional": lambda array: torch._to_functional_tensor(torch.from_numpy(array)),
    "freed": lambda array: with_storage(0)(torch.from_numpy(array)),
    "masked": lambda array: np.ma.masked_less(array, array.max()),
}
HALVES, MODELS, PAIR = np.float64([0.5, 0.5]), [np.ones(2, np.float32)] * 2, np.array([0, 1])


def written_at(at, chunk=MODELS[0], **more):
    with server().open_round() as round:
        incoming = round.begin(0, steps=1, kind="delta")
        incoming.write("w", chunk, at=at, **more)


BESIDE = {
    "q": lambda odd: fedcore.Network(MODELS, [HALVES, HALVES], lr=1.0, q=odd(HALVES)),
    "W": lambda odd: fedcore.Network(MODELS, [odd(HALVES), odd(HALVES)], lr=1.0),
    "W of mix": lambda odd: kernels.mix([*np.ones((2, 2), np.float32)], [odd(HALVES), odd(HALVES)]),
    "weights": lambda odd: fedcore.aggregate(MODELS, odd(HALVES)),
    "w, at": lambda odd: written_at(odd(PAIR)),
    "scales": lambda odd: written_at(None, np.ones(2, np.int8), scales=[odd(HALVES)], block=1),
    "train_y": lambda odd: from_arrays(np.ones((2, 1)), odd(PAIR), np.ones((1, 1)), [0]),
    "clients": lambda odd: from_arrays(np.ones((2, 1)), PAIR, np.ones((1, 1)), [0], clients=odd(PAIR)),
    "labels": lambda odd: iid(odd(PAIR), 1, seed=0),
}


@pytest.mark.parametrize("odd", WITHOUT_NUMBERS)
@pytest.mark.parametrize("name", BESIDE)
def test_arrays_beside_the_models_are_checked_too(name, odd):
    with pytest.raises(errors.ArrayError, match=rf"^{name.removesuffix(' of mix')}: .*(of the class Tensor|mask)"):
        BESIDE[name](WITHOUT_NUMBERS[odd])


class OnlyDLPack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return 1, 0


class Failing:
    def __init__(self, **more):
        vars(self).update(more)

    def __dlpack__(self, **_):
        raise RuntimeError("gone")

    def __dlpack_device__(self):
        return 2, 0


class NullInterface:
    dtype, shape = np.dtype("f4"), SHAPE

    def __init__(self):
        self.__array_interface__ = dict(version=3, typestr="<f4", shape=SHAPE, data=(0, False))


@pytest.mark.parametrize("door", ["first model", "first array", "add", "aggregate", "aggregate an iterator", "store"])
def test_an_object_of_an_unknown_library_gives_its_numbers_or_an_error(door):
    x = np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    for odd in (Failing(), Failing(dtype="float32", shape=SHAPE), NullInterface()):
        _, error = outcome(lambda: DOORS[door](odd))  # noqa: B023
        assert NAMED.match(error or ""), (odd, error)
    if door != "store":
        np.testing.assert_array_equal(in_float32(DOORS[door](OnlyDLPack(x[::-1].copy()[::-1]))).reshape(SHAPE), x)


if __name__ == "__main__":
    x = torch.arange(math.prod(SHAPE)).remainder(16).add(1.0).reshape(SHAPE)
    views = {"a freed view": with_storage(0, offset=1), "a shrunk view": with_storage(8, offset=1)}
    stride = int(sys.argv[1])
    for place, door in enumerate(DOORS):
        for name, make in [*MAKERS.items()][place % stride :: stride]:
            check(door, name, lambda x, make=make: make(torch.cat([x[:1], x]))[1:], x)
        for name, make in views.items():
            check(door, name, make, x)
