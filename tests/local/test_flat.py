import numpy as np
import pytest
import torch
from torch import nn

from fedcore.errors import ArrayError, DtypeError, ShapeError
from fedcore.layout import Layout
from fedcore.local import FlatModel, build, sgd
from tests.local.asked import asked


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
