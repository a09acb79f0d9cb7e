import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcore import Layout, Model, Server, errors


def batch_norm_net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def test_parameters_then_buffers_and_counters_outside():
    for model in (batch_norm_net(), batch_norm_net().state_dict()):
        layout = Layout.of(model)
        assert layout.n_parameters == 3 * 4 + 4 + 2 * 4 + 4 * 2 + 2
        assert layout.n == layout.n_parameters + 2 * 4
        assert layout.names[-2:] == ("1.running_mean", "1.running_var")
        assert [piece.name for piece in layout.counters] == ["1.num_batches_tracked"]


def test_buffers_of_a_mapping_are_found_by_pattern():
    mapping = {"w": np.zeros(2, np.float32), "ema": np.zeros(3, np.float32)}
    assert (Layout.of(mapping).n_parameters, Layout.of(mapping, buffers=["ema"]).n_parameters) == (5, 2)
    assert Layout.of(steps := {"steps": np.array(3)}).flatten(steps).shape == (0,)


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5))
def test_flatten_and_unflatten_are_inverse(shapes):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    layout = Layout.of(arrays)
    flat = layout.flatten(arrays)
    back = layout.unflatten(flat)
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(back[str(i)], array)
        assert back[str(i)].base is not None  # a view
    if layout.n:
        flat[:] = 7
        assert all((view == 7).all() for view in back.values())


def test_flatten_reads_modules_state_dicts_and_arrays():
    net = batch_norm_net()
    layout = Layout.of(net)
    numpy = {name: tensor.detach().numpy() for name, tensor in net.state_dict().items()}
    out = np.empty(layout.n, np.float32)
    assert layout.flatten(net, out=out) is out
    np.testing.assert_array_equal(layout.flatten(net.state_dict()), out)
    np.testing.assert_array_equal(layout.flatten(numpy), out)


def test_a_module_with_other_names_in_its_state_dict_keeps_its_buffers():
    net = torch.nn.Sequential(batch_norm_net())
    net[0].register_buffer("mask", torch.ones(3), persistent=False)
    net.state_dict = net[0].state_dict  # as some wrappers do
    layout = Layout.of(net)
    assert layout.names == tuple(f"0.{name}" for name in Layout.of(batch_norm_net()).names)
    assert len(layout.counters) == 1


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({"w": np.zeros(2, np.complex64)}, errors.DtypeError, r"^w\b"),
        ({"w": torch.zeros(2, dtype=torch.float8_e5m2)}, errors.DtypeError, r"^w\b"),
        ({"w": [1.0, 2.0]}, errors.ArrayError, r"^w.0\b"),
        ({1: np.float32([1]), "1": np.float32([2])}, errors.ArrayError, r"^model\b.*'1'"),
        (None, errors.ArrayError, r"^model\b"),
        ("weights.pt", errors.ArrayError, r"^model\b"),
    ],
)
def test_objects_that_are_no_models(model, error, message):
    with pytest.raises(error, match=message):
        Layout.of(model)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({"w": np.zeros((2, 1), np.float32)}, errors.ArrayError, r"^model\b.*\(t\)"),
        ({"w": np.zeros(2, np.float32), "t": np.array(3)}, errors.ShapeError, r"^w\b"),
        ({"w": np.zeros((2, 1), np.int32), "t": np.array(3)}, errors.DtypeError, r"^w\b"),
        ({"w": np.zeros((2, 1), np.float32), "t": np.array(3.0)}, errors.DtypeError, r"^t\b"),
    ],
)
def test_another_model_is_refused(model, error, message):
    layout = Layout.of({"w": np.zeros((2, 1), np.float32), "t": np.array(1)})
    with pytest.raises(error, match=message):
        layout.flatten(model)


def test_outputs_are_checked():
    layout = Layout.of(np.zeros(3, np.float32))
    with pytest.raises(errors.DtypeError, match=r"^out\b"):
        layout.flatten(np.ones(3, np.float32), out=np.zeros(3))
    with pytest.raises(errors.ShapeError, match=r"^out\b"):
        layout.flatten(np.ones(3, np.float32), out=np.zeros(4, np.float32))
    with pytest.raises(errors.ShapeError, match=r"^flat\b"):
        layout.unflatten(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("name", "tensor", "error"),
    [
        ("w", np.zeros((3, 2), np.float32), errors.ShapeError),
        ("w", np.zeros((2, 3), np.int32), errors.DtypeError),
        ("w", [1.0], errors.ArrayError),
        ("seen", np.zeros((), np.float32), errors.DtypeError),
        ("seen", np.zeros(2, np.int64), errors.ShapeError),
        ("more", np.zeros(2, np.int64), errors.ArrayError),
    ],
)
def test_pieces_share_the_models_memory_or_are_rejected(name, tensor, error):
    model = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32), "seen": np.array(3)}
    layout = Layout.of(model)
    w, b = layout.pieces(model)
    w[4], b[0] = 7, 8
    assert model["w"][1, 1] == 7
    assert model["b"][0] == 8
    for turned in (model, {**model, "w": np.asfortranarray(model["w"])}, dict(reversed(model.items()))):
        assert [piece.tolist() for piece in layout.pieces(turned)] == [[1, 1, 1, 1, 7, 1], [8, 1, 1]]
    with pytest.raises(error, match=name):
        layout.pieces({**model, name: tensor})


def test_personal_and_frozen_tensors_are_ignored():
    """A client's whole state_dict fits; its personal and frozen tensors have no effect."""
    net = batch_norm_net()
    net[0].requires_grad_(False)
    model = Model(net, personal="2.*", frozen=("0.*", "nothing.*"))
    layout = Layout.of(model)
    assert layout.names == ("1.weight", "1.bias", "1.running_mean", "1.running_var")
    assert Layout.from_state(layout.to_state()) == layout
    server = Server(model, "FedAvg", clients=2, lr=0.1)
    own = {name: tensor.detach().clone() + 1 for name, tensor in net.state_dict().items()}
    own["2.weight"][:] = np.nan
    with server.open_round() as opened:
        assert opened.add(0, own, steps=1)
        assert not opened.add(1, {name: tensor for name, tensor in own.items() if name != "1.bias"}, steps=1)
    assert server.tensors().keys() == {*layout.names, "1.num_batches_tracked"}
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    server.load_into(net)
    after = net.state_dict()
    assert all(torch.equal(after[name], own[name] if name[0] == "1" else before[name]) for name in after)


def test_a_module_does_not_fit_a_server_of_one_vector():
    net = torch.nn.Linear(2, 1)
    with pytest.raises(errors.ArrayError, match="without names of tensors"):
        Server(np.zeros(3, np.float32), "FedAvg", clients=1, lr=0.1).load_into(net)


def test_groups_partition_the_tensors():
    x = {name: np.zeros(2, np.float32) for name in ("a.w", "b.w", "a.k", "c", "own")}
    x["a.k"] = np.int64(1)
    layout = Layout.of(Model(x, {"A": "a.*", "B": ("b.*", "a.w")}, personal=["own"]))
    assert layout.groups == {"A": ("a.w", "a.k"), "B": ("b.w",), "rest": ("c",)}
    assert Layout.from_state(layout.to_state()) == layout != Layout.of(Model(x, personal=["own"]))
    assert layout.split({"c": x["c"], "own": 1}) == {"rest": {"c": x["c"]}}
    for sent, named in (({"a.w": 1}, "a.k"), ({"d": 1}, "unknown .d."), ({}, "A, B, rest"), ({"own": 1}, "A, B, rest")):
        with pytest.raises(errors.ArrayError, match=named):
            layout.split(sent)
    with pytest.raises(errors.UnknownNameError, match="'typo'"):
        Layout.of(Model(x, {"typo": "A.*"}))
    with pytest.raises(errors.ArrayError, match="partial"):
        Layout.of(Model([x["c"]], {"A": "0"}))


@pytest.mark.parametrize(
    ("shape", "pad"), [((2, 5), "[(0, 2), (0, 0)]"), ((4, 1), "[(0, 0), (0, 4)]"), ((5, 5), None), ((4,), None)]
)
def test_a_lower_rank_gets_an_example_of_padding(shape, pad):
    with pytest.raises(errors.ShapeError) as raised:
        Layout.of({"lora_A": np.zeros((4, 5), np.float32)}).flatten({"lora_A": np.zeros(shape, np.float32)})
    assert (str(raised.value).partition("np.pad(tensor, ")[2] or None) == (pad and f"{pad})")


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict"])
def test_checkpoint_with_other_entries_is_rejected_with_the_entry_to_pass(key):
    with pytest.raises(errors.ArrayError, match=f"^epoch: .*got int; pass the entry '{key}'$"):
        Layout.of({"epoch": 3, key: {"w": np.ones(3, np.float32)}})
    with pytest.raises(errors.ArrayError, match=r"got int$"):
        Layout.of({"epoch": 3, "w": np.ones(3, np.float32)})
