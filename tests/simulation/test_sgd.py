"""The local work of one client."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedcore.errors import ArrayError, DtypeError, RangeError, ShapeError
from fedcore.model import Layout
from fedcore.simulation.local_rules import minibatches
from fedcore.simulation.nets import build
from fedcore.simulation.sgd import FlatModel, LocalOptions, sgd
from fedcore.simulation.torch_device import seeded
from tests.simulation.asked import asked


def draw(*arguments, **options):
    with seeded(*arguments, **options):
        return torch.rand(3)


def test_numbers_depend_on_the_arguments_alone():
    torch.manual_seed(1)
    first = draw(0, "a", round=1, client=2)
    torch.manual_seed(2)
    assert torch.equal(draw(0, "a", round=1, client=2), first)
    others = [draw(1, "a", round=1, client=2), draw(0, "b", round=1, client=2), draw(0, "a", client=2), draw(0, "a")]
    assert not any(torch.equal(other, first) for other in others)


def test_torch_goes_on_as_before():
    torch.manual_seed(3)
    due = torch.rand(2)
    torch.manual_seed(3)
    draw(0, "a")
    assert torch.equal(torch.rand(2), due)


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def inside(view: torch.Tensor, flat: torch.Tensor) -> bool:
    return view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_the_values_stay_and_lie_in_the_layouts_order() -> None:
    due = Layout.of(with_norm()).flatten(with_norm())
    model = FlatModel(with_norm())
    np.testing.assert_array_equal(model.flat.numpy(), due)
    np.testing.assert_array_equal(model.layout.flatten(model.module), due)
    assert (model.layout.n, model.layout.n_parameters) == (42, 34)


def test_they_are_still_views_after_training() -> None:
    model = FlatModel(with_norm())
    before = model.flat.clone()
    inputs, labels = torch.rand(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    sgd(model, inputs, labels, [np.arange(3), np.arange(3, 6)], asked(0.5))

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
    assert not torch.equal(model.flat[34:], before[34:])  # the statistics moved, inside the flat vector
    assert norm.num_batches_tracked == 2


def test_load_changes_the_model_and_copies() -> None:
    model = FlatModel(build("mlp", seed=0))
    x = np.linspace(-1, 1, model.layout.n, dtype=np.float32)
    x.flags.writeable = False
    model.load(x)
    np.testing.assert_array_equal(model.layout.flatten(model.module), x)
    model.flat.zero_()
    assert x[0] == -1


def test_a_wrong_vector_is_refused() -> None:
    model = FlatModel(build("mlp", seed=0))
    with pytest.raises(ShapeError, match=r"x: expected float32\[4810\], got shape \(1,\)"):
        model.load(np.zeros(1, np.float32))
    with pytest.raises(DtypeError, match=r"x: expected float32\[4810\], got float64"):
        model.load(np.zeros(4810))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match="weight: expected float32"):
        FlatModel(nn.Linear(2, 2).to(dtype))


def test_other_devices_are_refused() -> None:
    with pytest.raises(ArrayError, match="weight: expected a tensor on the CPU, got one on meta"):
        FlatModel(nn.Linear(2, 2, device="meta"))


SHAPES = {"lenet": (1, 28, 28), "mlp": (1, 8, 8)}


def problem() -> tuple[torch.Tensor, torch.Tensor, list[np.ndarray]]:
    random = torch.Generator().manual_seed(0)
    inputs = torch.rand(50, *SHAPES["mlp"], generator=random)
    return (
        inputs,
        torch.randint(10, (50,), generator=random),
        list(minibatches(50, 16, epochs=2, seed=1, round=2, client=3)),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_equals_torchs_sgd_but_for_rounding(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = torch.rand(50, *SHAPES[name], generator=random)
    labels = torch.randint(10, (50,), generator=random)
    batches = list(minibatches(50, 16, epochs=2, seed=1, round=2, client=3))

    due = build(name, seed=4)
    optimiser = torch.optim.SGD(due.parameters(), lr=0.1)
    for batch in batches:
        optimiser.zero_grad()
        cross_entropy(due(inputs[batch]), labels[batch]).backward()
        optimiser.step()

    model = FlatModel(build(name, seed=4))
    start = model.flat.clone()
    assert sgd(model, inputs, labels, iter(batches), asked()).steps == 8
    assert (model.flat - start).abs().max() > 1e-3
    # Torch's step rounds once where the kernel, the same on every machine, rounds twice.
    np.testing.assert_allclose(model.flat.numpy(), model.layout.flatten(due), rtol=1e-4, atol=1e-7)


def test_a_step_by_hand() -> None:
    """Softmax regression from zero: the gradient of the scores is 1/2 - onehot."""
    linear = nn.Linear(1, 2)
    model = FlatModel(linear)
    model.flat.zero_()
    work = sgd(model, torch.tensor([[3.0]]), torch.tensor([1]), [np.array([0])], asked(0.5, second=True))
    assert work.steps == 1
    assert work.control.tolist() == [1.5, -1.5, 0.5, -0.5]
    assert linear.weight.flatten().tolist() == [-0.75, 0.75]
    assert linear.bias.tolist() == [-0.25, 0.25]


@pytest.mark.parametrize("options", [LocalOptions(), LocalOptions(weight_decay=0.1, clip=0.5)])
def test_a_rate_for_each_step_is_one_step_after_another(options: LocalOptions) -> None:
    inputs, labels, batches = problem()
    once, each = FlatModel(build("mlp", seed=4)), FlatModel(build("mlp", seed=4))
    rates = [0.3 / (k + 1) for k in range(len(batches))]
    work = sgd(once, inputs, labels, iter(batches), asked(rates.__getitem__), options=options)
    for batch, rate in zip(batches, rates, strict=True):
        sgd(each, inputs, labels, [batch], asked(rate), options=options)
    assert torch.equal(once.flat, each.flat)
    assert work.lr == pytest.approx(np.mean(rates), rel=1e-12)


def test_no_minibatches_no_steps() -> None:
    model = FlatModel(nn.Linear(1, 2))
    start = model.flat.clone()
    assert sgd(model, torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), [], asked(0.5)).steps == 0
    assert (
        sgd(model, torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), [], asked(lambda k: 0.5 / (k + 1))).lr == 0.5
    )
    assert torch.equal(model.flat, start)


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.5, "weight_decay": 0.2}])
def test_options_equal_torchs(options: dict[str, float]) -> None:
    inputs, labels, batches = problem()
    due = build("mlp", seed=4)
    optimiser = torch.optim.SGD(due.parameters(), lr=0.1, **options)
    for batch in batches:
        optimiser.zero_grad()
        cross_entropy(due(inputs[batch]), labels[batch]).backward()
        optimiser.step()
    model = FlatModel(build("mlp", seed=4))
    sgd(model, inputs, labels, iter(batches), asked(), options=LocalOptions(**options))
    np.testing.assert_allclose(model.flat.numpy(), model.layout.flatten(due), rtol=1e-4, atol=1e-6)


def test_clipping_equals_torchs() -> None:
    inputs, labels, batches = problem()
    due = build("mlp", seed=4)
    for batch in batches:
        due.zero_grad()
        cross_entropy(due(inputs[batch]), labels[batch]).backward()
        assert nn.utils.clip_grad_norm_(due.parameters(), 0.05) > 0.05  # it has something to do
        with torch.no_grad():
            for parameter in due.parameters():
                parameter -= 0.1 * parameter.grad
    model = FlatModel(build("mlp", seed=4))
    sgd(model, inputs, labels, iter(batches), asked(), options=LocalOptions(clip=0.05))
    np.testing.assert_allclose(model.flat.numpy(), model.layout.flatten(due), rtol=1e-4, atol=1e-6)


def test_the_corrected_direction_with_both_gradients_on_one_minibatch() -> None:
    """Against the formula written out: a grad(y) + b grad(x_prev) + offset + mu (y - x), and the mean raw gradient."""
    inputs, labels, batches = problem()
    model, previous = FlatModel(build("mlp", seed=4)), FlatModel(build("mlp", seed=5))
    x, x_prev = model.flat.numpy().copy(), previous.flat.numpy().copy()
    offset = np.random.default_rng(0).normal(size=len(x)).astype(np.float32)
    net = FlatModel(build("mlp", seed=4))

    def gradient(at: np.ndarray, batch: np.ndarray) -> np.ndarray:
        net.load(at)
        net.grad.zero_()
        cross_entropy(net.module(inputs[batch]), labels[batch]).backward()
        return net.grad.numpy() + np.float32(0.01) * at

    y, raw = x.copy(), []
    for batch in batches:
        raw.append(gradient(y, batch))
        direction = 0.7 * raw[-1] - 0.3 * gradient(x_prev, batch) + offset + 0.2 * (y - x)
        y = (y - 0.1 * direction).astype(np.float32)
    work = sgd(
        model,
        inputs,
        labels,
        iter(batches),
        asked(a=0.7, b=-0.3, mu=0.2, offset=offset, second=True),
        x=x,
        previous=previous,
        options=LocalOptions(weight_decay=0.01),
    )
    np.testing.assert_allclose(model.flat.numpy(), y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(work.control, np.mean(raw, axis=0), rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(previous.flat.numpy(), x_prev)


@pytest.mark.parametrize("wrong", [{"momentum": 1.0}, {"weight_decay": -1}, {"clip": 0.0}])
def test_options_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(RangeError, match=next(iter(wrong))):
        LocalOptions(**wrong)
