"""The local work of one client."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedcore.algorithms.local_rules import minibatches
from fedcore.errors import ArrayError, DtypeError, RangeError, ShapeError
from fedcore.model import Layout
from fedcore.sim.nets import LeNet, build
from fedcore.sim.sgd import FlatModel, LocalOptions, seeded, sgd
from tests.sim.kit import instructions_of


def draw(*arguments, **options):
    with seeded(*arguments, **options):
        return torch.rand(3)


def test_seeded_numbers_depend_only_on_the_arguments_and_torch_s_state_stays():
    torch.manual_seed(1)
    first = draw(0, "a", round=1, client=2)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(draw(0, "a", round=1, client=2), first)
    assert torch.equal(torch.get_rng_state(), state)
    others = [draw(1, "a", round=1, client=2), draw(0, "b", round=1, client=2), draw(0, "a", client=2), draw(0, "a")]
    assert not any(torch.equal(other, first) for other in others)


def with_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def inside(view, flat):
    return view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_a_flat_model_has_the_module_s_values_in_the_layout_s_order():
    expected = Layout.of(with_norm()).flatten(with_norm())
    model = FlatModel(with_norm())
    np.testing.assert_array_equal(model.flat.numpy(), expected)
    np.testing.assert_array_equal(model.layout.flatten(model.module), expected)
    assert (model.layout.n, model.layout.n_parameters) == (42, 34)


def test_parameters_and_gradients_stay_views_in_training():
    model = FlatModel(with_norm())
    before = model.flat.clone()
    inputs, labels = torch.rand(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    sgd(model, inputs, labels, [np.arange(3), np.arange(3, 6)], instructions_of(0.5))

    np.testing.assert_array_equal(model.layout.flatten(model.module), model.flat.numpy())
    for parameter in model.module.parameters():
        assert inside(parameter, model.flat)
        assert parameter.grad is not None
        assert inside(parameter.grad, model.grad)
    gradients = [p.grad.flatten() for p in model.module.parameters() if p.grad is not None]
    assert torch.equal(torch.cat(gradients), model.grad)
    assert model.grad.abs().max() > 0
    norm = model.module[1]
    assert inside(norm.running_mean, model.flat)
    assert inside(norm.running_var, model.flat)
    assert not torch.equal(model.flat[34:], before[34:])  # The statistics changed.
    assert norm.num_batches_tracked == 2


def test_load_copies_the_vector_into_the_model():
    model = FlatModel(with_norm())
    model.module[1].num_batches_tracked += 3
    x = np.linspace(-1, 1, model.layout.n, dtype=np.float32)
    x.flags.writeable = False
    model.load(x)
    assert model.module[1].num_batches_tracked == 0
    model.load(x, {"1.num_batches_tracked": np.array(7)})
    assert model.module[1].num_batches_tracked == 7
    np.testing.assert_array_equal(model.layout.flatten(model.module), x)
    model.flat.zero_()
    assert x[0] == -1


def test_a_wrong_vector_is_rejected():
    model = FlatModel(build("mlp", seed=0))
    with pytest.raises(ShapeError, match=r"^x: .*float32\[4810\].*\(1,\)"):
        model.load(np.zeros(1, np.float32))
    with pytest.raises(DtypeError, match=r"^x: .*float32\[4810\].*float64"):
        model.load(np.zeros(4810))


@pytest.mark.parametrize(
    ("module", "error"),
    [
        (lambda: nn.Linear(2, 2).to(torch.float64), DtypeError),
        (lambda: nn.Linear(2, 2).to(torch.bfloat16), DtypeError),
        (lambda: nn.Linear(2, 2, device="meta"), ArrayError),
    ],
)
def test_other_dtypes_and_devices_are_rejected(module, error):
    with pytest.raises(error, match=r"^weight"):
        FlatModel(module())


SHAPES = {"lenet": (1, 28, 28), "mlp": (1, 8, 8)}


def problem(name="mlp"):
    random = torch.Generator().manual_seed(0)
    inputs = torch.rand(50, *SHAPES[name], generator=random)
    labels = torch.randint(10, (50,), generator=random)
    return inputs, labels, list(minibatches(50, 16, epochs=2, seed=1, round=2, client=3))


def torch_sgd(module, clip=None, **options):
    """Train a module by torch's optimiser on the problem."""
    inputs, labels, batches = problem("lenet" if isinstance(module, LeNet) else "mlp")
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, **options)
    for batch in batches:
        optimiser.zero_grad()
        cross_entropy(module(inputs[batch]), labels[batch]).backward()
        if clip is not None:
            assert nn.utils.clip_grad_norm_(module.parameters(), clip) > clip  # Every gradient is clipped.
        optimiser.step()
    return module


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lenet", {}),
        ("mlp", {}),
        ("mlp", {"momentum": 0.9}),
        ("mlp", {"weight_decay": 0.1}),
        ("mlp", {"momentum": 0.5, "weight_decay": 0.2}),
        ("mlp", {"clip": 0.05}),
    ],
)
def test_steps_equal_torch_s_sgd_except_for_rounding(name, options):
    """Torch rounds once where the kernel, which is the same on every machine, rounds twice."""
    inputs, labels, batches = problem(name)
    ours, theirs = build(name, seed=4), build(name, seed=4)
    for module in (ours, theirs) * ("weight_decay" in options):  # which does not change frozen parameters
        next(module.parameters()).requires_grad_(False)
    model = FlatModel(ours)
    start = model.flat.clone()
    work = sgd(model, inputs, labels, iter(batches), instructions_of(second=True), options=LocalOptions(**options))
    assert work.steps == 8
    assert (model.flat - start).abs().max() > 1e-3
    assert not work.control[model.frozen[0]].any() if model.frozen else work.control.all
    expected = model.layout.flatten(torch_sgd(theirs, **options))
    np.testing.assert_allclose(model.flat.numpy(), expected, rtol=1e-4, atol=1e-7 if not options else 1e-6)


def test_a_step_of_softmax_regression():
    """Softmax regression from zero: the gradient of the scores is 1/2 - onehot."""
    linear = nn.Linear(1, 2)
    model = FlatModel(linear)
    model.flat.zero_()
    work = sgd(model, torch.tensor([[3.0]]), torch.tensor([1]), [np.array([0])], instructions_of(0.5, second=True))
    assert work.steps == 1
    assert work.control.tolist() == [1.5, -1.5, 0.5, -0.5]
    assert linear.weight.flatten().tolist() == [-0.75, 0.75]
    assert linear.bias.tolist() == [-0.25, 0.25]


@pytest.mark.parametrize("options", [LocalOptions(), LocalOptions(weight_decay=0.1, clip=0.5)])
def test_a_rate_for_each_step_equals_single_steps(options):
    inputs, labels, batches = problem()
    once, each = FlatModel(build("mlp", seed=4)), FlatModel(build("mlp", seed=4))
    rates = [0.3 / (k + 1) for k in range(len(batches))]
    work = sgd(once, inputs, labels, iter(batches), instructions_of(rates.__getitem__), options=options)
    for batch, rate in zip(batches, rates, strict=True):
        sgd(each, inputs, labels, [batch], instructions_of(rate), options=options)
    assert torch.equal(once.flat, each.flat)
    assert work.lr == pytest.approx(np.mean(rates), rel=1e-12)


def test_without_minibatches_the_model_stays():
    model, examples = FlatModel(nn.Linear(1, 2)), (torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    start = model.flat.clone()
    assert sgd(model, *examples, [], instructions_of(0.5)).steps == 0
    assert sgd(model, *examples, [], instructions_of(lambda k: 0.5 / (k + 1))).lr == 0.5
    assert torch.equal(model.flat, start)


def test_the_direction_equals_its_formula():
    """a grad(y) + b grad(x_prev) + offset + mu (y - x), and the mean raw gradient."""
    inputs, labels, batches = problem()
    model, previous = FlatModel(build("mlp", seed=4)), FlatModel(build("mlp", seed=5))
    x, x_prev = model.flat.numpy().copy(), previous.flat.numpy().copy()
    offset = np.random.default_rng(0).normal(size=len(x)).astype(np.float32)
    net = FlatModel(build("mlp", seed=4))

    def gradient(at, batch):
        net.load(at)
        net.grad.zero_()
        cross_entropy(net.module(inputs[batch]), labels[batch]).backward()
        return net.grad.numpy() + np.float32(0.01) * at

    y, raw = x.copy(), []
    for batch in batches:
        raw.append(gradient(y, batch))
        direction = 0.7 * raw[-1] - 0.3 * gradient(x_prev, batch) + offset + 0.2 * (y - x)
        y = (y - 0.1 * direction).astype(np.float32)
    instructions = instructions_of(a=0.7, b=-0.3, mu=0.2, offset=offset, second=True)
    options = LocalOptions(weight_decay=0.01)
    work = sgd(model, inputs, labels, iter(batches), instructions, x=x, previous=previous, options=options)
    np.testing.assert_allclose(model.flat.numpy(), y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(work.control, np.mean(raw, axis=0), rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(previous.flat.numpy(), x_prev)


@pytest.mark.parametrize("wrong", [{"momentum": 1.0}, {"weight_decay": -1}, {"clip": 0.0}])
def test_options_out_of_range_are_rejected(wrong):
    with pytest.raises(RangeError, match=next(iter(wrong))):
        LocalOptions(**wrong)
