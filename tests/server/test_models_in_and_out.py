"""A model comes back in its library and dtypes."""

import copy
import itertools
import json
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_model

from fedcore import Layout, Model, RoundPolicy, Safetensors, Server, Update, errors, write_model
from tests.kit import python


def net_of(dtype=torch.float32):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return net.to(dtype)


def moved(net, by):
    """The model after a client's steps."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += by
        net[1].num_batches_tracked += 1
    return net


def same(one, other):
    assert list(one) == list(other)
    for name in one:
        assert type(one[name]) is type(other[name]), name
        assert one[name].dtype == other[name].dtype, name
        assert (one[name] == other[name]).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_torch_model_comes_back_as_torch(tmp_path, dtype):
    net = net_of(dtype)
    server = Server(net, "FedAvg", 2, lr=0.1)
    assert server.x.dtype == np.float32
    state = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    same(dict(sorted(server.tensors().items())), dict(sorted(state.items())))
    report = server.round([Update(i, moved(copy.deepcopy(net), 0.5 + i), 1) for i in range(2)])
    assert report.accepted == (0, 1), report.rejected
    server.save(tmp_path / "s")
    again = Server.load(tmp_path / "s")
    same(again.tensors(), server.tensors())
    assert all(isinstance(tensor, torch.Tensor) for tensor in again.tensors().values())
    into = net_of(dtype)
    storage = into[0].weight.data_ptr()
    again.load_into(into)
    same(dict(sorted(into.state_dict().items())), dict(sorted(server.tensors().items())))
    assert into[0].weight.data_ptr() == storage
    assert into[1].num_batches_tracked == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_numpy_model_comes_back_as_numpy(dtype):
    x0 = {"w": np.linspace(-1, 1, 6).astype(dtype).reshape(2, 3), "n": np.array(3, np.int32), "codes": np.int16([3, 4])}
    server = Server(x0, "MIFA", 1, lr=0.5)
    same(server.tensors(), x0)
    after = x0 | {"w": x0["w"] + dtype(1), "n": np.array(4, np.int32)}
    report = server.round([Update(0, after, 1)])
    assert report.accepted == (0,), report.rejected
    same(server.tensors(), after)
    into = {"w": np.zeros((2, 3), dtype), "n": np.array(0, np.int64), "codes": np.zeros(2, np.int16)}
    with pytest.raises(errors.DtypeError, match=r"^n\b"):
        server.load_into(into)
    assert not into["w"].any()
    into["n"] = np.array(0, np.int32)
    server.load_into(into)
    same(into, server.tensors())


def test_the_library_can_be_chosen():
    server = Server(net_of(torch.bfloat16), "FedAvg", 1, lr=0.1)
    arrays = server.tensors(library="numpy")
    assert {str(array.dtype) for array in arrays.values()} == {"bfloat16", "int64"}
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    numpy = Server({"w": np.ones(2, np.float32)}, "FedAvg", 1, lr=0.1)
    assert torch.equal(numpy.tensors(library="torch")["w"], torch.ones(2))
    assert np.shares_memory(numpy.tensors(copy=False)["w"], numpy.x)
    with pytest.raises(errors.UnknownNameError, match=r"^library\b.*'tensorflow'"):
        server.tensors(library="tensorflow")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["FedAvg", "MimiC", "MIFA", "SCAFFOLD"])
def test_an_update_is_measured_from_the_rounded_x(dtype, method):
    """x has more bits than the model's dtype: a client that returns its model has made no step."""
    server = Server(net_of(dtype), method, 2, lr=0.1, server_lr=0.1, policy=RoundPolicy(max_staleness=1))
    server.round([Update(i, moved(net_of(dtype), 0.1 * (i + 1)), 1) for i in range(2)])
    sent = server.broadcast([0, 1])
    finer = server.x[: server.layout.n_parameters]
    assert (sent.x[: server.layout.n_parameters] != finer).any()
    server.layout.load_into(net := net_of(dtype), sent.x, server.tensors(library="numpy"))
    assert all((tensor == server.tensors()[name]).all() for name, tensor in net.state_dict().items())
    for reply in (net, net.state_dict(), sent.x.copy()):
        report = copy.deepcopy(server).round([Update(0, reply, 1)])
        assert report.norms.tolist() == [0.0], report.rejected
    # A round later: from the x of then, as it was sent.
    server.round([])
    if method != "SCAFFOLD":
        assert server.round([Update(0, net, 1, round=server.round_number - 1)]).norms.tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_updates_of_a_narrow_model(dtype):
    server = Server({"w": torch.ones(3, dtype=torch.bfloat16)}, "FedAvg", 1, lr=0.1)
    assert server.round([Update(0, {"w": torch.full((3,), 1.001, dtype=dtype)}, 1)]).accepted == (0,)
    np.testing.assert_allclose(server.x, 1.001)
    assert (server.tensors()["w"] == 1).all()
    assert "expected bfloat16" in server.round([Update(0, {"w": torch.ones(3, dtype=torch.int32)}, 1)]).rejected[0][1]


def test_load_into_other_float_dtypes_and_models_that_do_not_fit():
    server = Server(net_of(), "FedAvg", 1, lr=0.1)
    into = net_of(torch.bfloat16)
    server.round([Update(0, moved(net_of(), 1.0), 1)])
    server.load_into(into)
    assert torch.equal(into[0].weight, server.tensors()["0.weight"].to(torch.bfloat16))
    locked = {name: tensor.detach().numpy() for name, tensor in net_of().state_dict().items()}
    locked["0.weight"].flags.writeable = False
    for tensors, error in (({"w": np.zeros(3)}, "missing"), (locked, r"^0.weight\b")):
        with pytest.raises(errors.ArrayError, match=error):
            server.load_into(tensors)


def tied_net():
    """A weight and a BatchNorm have two names each. Files keep ``head.weight``, and fedcore ``tokens.weight``."""
    norm, tokens, head = torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2)
    head.weight = tokens.weight
    return torch.nn.Sequential(OrderedDict(tokens=tokens, head=head, norm=norm, again=norm))


def of_one(model):
    return Server(model, "FedAvg", clients=1, lr=0.1)


def reply_of(server, model):
    with server.open_round() as opened:
        return opened.add(0, model, steps=1)


def test_tied_tensors_come_under_all_names():
    net, other = tied_net(), tied_net()
    server, state = of_one(net), {name: one.clone() for name, one in net.state_dict().items()}
    net.load_state_dict(server.tensors())
    older = Layout.of(net).to_state() | {"aliases": {"head.weight": "tokens.weight"}}
    assert Layout.from_state(older) == Layout.of(net) == Layout.of(Model(net)) != Layout.of(state)
    assert Layout.of(dict.fromkeys("ab", torch.ones(2))).n == 4  # a mapping may share memory by chance
    other.head.weight = torch.nn.Parameter(torch.full((2, 2), 9.0))
    server.load_into(other)
    assert all(torch.equal(other.state_dict()[name], one) for name, one in state.items())
    assert reply_of(server, {name: one + 1 for name, one in state.items()})
    assert torch.equal(server.tensors()["again.running_mean"], torch.ones(2))
    with pytest.raises(errors.ArrayError, match=r"head.weight: is tied to tokens.weight in the given model"):
        of_one(state | {"head.weight": torch.full((2, 2), 9.0)}).load_into(net)
    assert all(torch.equal(one, state[name]) for name, one in net.state_dict().items())


def test_tied_tensors_that_differ_are_refused():
    net = tied_net()
    state, parts = net.state_dict(), Model(net, partial={"head": "head.*"})
    assert Layout.of(parts).groups["head"] == ("tokens.weight", "head.bias")
    for model, name in itertools.product((net, parts), Layout.of(net).aliases):
        with pytest.raises(errors.ArrayError, match=f"{name}: is tied"):
            Layout.of(parts).split(state | {name: state[name] + 1})
        for value in (state[name] + 1, torch.ones(17), 3):
            assert name in reply_of(of_one(model), state | {name: value}).reason
            with pytest.raises(errors.FedcoreError, match=name):
                of_one(model).replace_x(state | {name: value})


def test_any_name_of_a_tied_tensor_stands_for_all(tmp_path):
    net = tied_net()
    save_model(net, str(tmp_path / "m.safetensors"))
    file = Safetensors(tmp_path / "m.safetensors")
    assert "tokens.weight" not in file
    assert all(reply_of(of_one(one), other) for one, other in ((net, file), (file, net)))
    for pattern in ("head.*", "tokens.*"):
        server = of_one(Model(net, personal=pattern))
        assert not server.tensors().keys() & {"head.weight", "tokens.weight"}
        assert all(reply_of(server, model) for model in (net, net.state_dict()))
    server = of_one(Model(net, partial={"tokens": "tokens.*", "head": "head.*"}))
    assert reply_of(server, {f"head.{name}": one + 1 for name, one in net.head.state_dict().items()})
    assert torch.equal(server.tensors()["tokens.weight"], net.head.weight + 1)


def test_layouts_are_equal_whatever_the_library():
    net = net_of()
    arrays = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    same = {Layout.of(net), Layout.of(arrays), Layout.from_state(Layout.of(net).to_state())}
    assert same == {Layout.of(net)} != {Layout.of(net_of(torch.bfloat16))}


def test_a_torch_model_where_torch_is_missing(tmp_path):
    Server(net_of(), "FedAvg", 1, lr=0.1).save(tmp_path / "s")
    program = f"""
import sys
sys.modules["torch"] = None
from fedcore import Server, errors
server = Server.load({str(tmp_path / "s")!r})
assert server.tensors(library="numpy")["0.weight"].shape == (4, 3)
try:
    server.tensors()
except errors.MissingDependencyError as error:
    assert 'library="numpy"' in str(error), error
    print("said")
"""
    assert python("-c", program).stdout == "said\n"


def test_frozen_parameters_of_a_module_are_a_warning(caplog):
    module = torch.nn.Linear(2, 1)
    Server(module, "FedAvg", clients=1, lr=0.1)
    assert not caplog.records
    module.bias.requires_grad_(False)
    Server(module, "FedAvg", clients=1, lr=0.1)
    assert "1 of 2 parameters" in caplog.text
    caplog.clear()
    Server(Model(module, frozen="bias"), "FedAvg", clients=1, lr=0.1)
    assert not caplog.records


@pytest.mark.parametrize(
    "parts", [{"personal": "head.*"}, {"frozen": ("head.*", "n")}, {"partial": {"body": "body.*"}}]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_of_files_is_written_over_their_bytes(tmp_path, parts, sharded):
    rng, base = np.random.default_rng(0), tmp_path / "base"
    base.mkdir()
    tensors = {
        "body.w": rng.normal(size=(70, 3)).astype(ml_dtypes.bfloat16),
        "body.b": np.ones(3, np.float32),
        "head.w": np.float32([1, 2 if "partial" in parts else np.nan, -0.0]).astype(ml_dtypes.bfloat16),
        "n": np.array(3),
    }
    files = dict(zip(tensors, ["a", "b", "a", "b"] if sharded else "aaaa", strict=True))
    for file in set(files.values()):
        write_model({name: tensors[name] for name in tensors if files[name] == file}, base / f"{file}.safetensors")
    if sharded:
        named = {name: f"{file}.safetensors" for name, file in files.items()}
        (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    (base / "config.json").write_text("{}")  # for from_pretrained
    server = Server(Model(Safetensors(base), **parts), "FedAvg", 1, lr=0.1)
    server.write(tmp_path / "new" / "same")
    for path in base.iterdir():
        assert (tmp_path / "new" / "same" / path.name).read_bytes() == path.read_bytes()
    update = {name: tensor + np.ones((), tensor.dtype) for name, tensor in tensors.items()}
    assert server.round([Update(0, update, 1)]).accepted == (0,)
    server.write(tmp_path / "next")
    found = Safetensors(tmp_path / "next")
    assert list(found) == list(Safetensors(base))
    for name in tensors:
        kept = "partial" not in parts and (name == "head.w" or name in parts.get("frozen", ()))
        due = tensors[name] if kept else update[name]
        assert np.asarray(found[name]).tobytes() == due.tobytes(), name


def test_a_server_of_one_shard_writes_a_folder_that_can_be_read(tmp_path):
    shard = tmp_path / "model-00001-of-00005.safetensors"
    write_model({"w": np.ones(2, np.float32)}, shard)
    Server(Safetensors(shard), "FedAvg", 1, lr=0.1).write(tmp_path / "out")
    assert list(Safetensors(tmp_path / "out")) == ["w"]
