import pytest
import torch

from fedcore.errors import RangeError
from fedcore.layout import Layout
from fedcore.local.nets import ResNet18


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    return ResNet18()


def test_batchnorm_statistics_are_buffers_and_its_counters_stay_outside(resnet):
    layout = Layout.of(resnet)
    assert (layout.n_parameters, layout.n - layout.n_parameters, len(layout.counters)) == (11_173_962, 9_600, 20)
    assert "11,173,962 parameters and 9,600 BatchNorm statistics" in (ResNet18.__doc__ or "")


def test_eighteen_layers_with_weights(resnet):
    weights = [m for m in resnet.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    shortcuts = [m for m in weights if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (1, 1)]
    assert (len(weights) - len(shortcuts), len(shortcuts)) == (18, 3)


def test_images_shrink_to_a_quarter_of_a_quarter(resnet):
    with torch.no_grad():
        features = resnet.blocks(resnet.conv(torch.zeros(1, 3, 32, 32)))
    assert features.shape == (1, 512, 4, 4)


def test_a_block_is_the_identity_plus_a_correction(resnet):
    """With its last normalisation at zero a block without a change of shape gives relu(x)."""
    block = resnet.blocks[1].eval()
    torch.nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 64, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(block(x), x.relu())
    torch.nn.init.ones_(block.bn2.weight)


def test_no_classes():
    with pytest.raises(RangeError, match="classes: expected an integer >= 1, got 0"):
        ResNet18(classes=0)
