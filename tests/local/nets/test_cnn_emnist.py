import pytest

from fedcore.errors import RangeError
from fedcore.local.nets import CNNEMNIST


def test_the_papers_layers():
    kinds = [type(layer).__name__ for layer in CNNEMNIST()]
    assert kinds == ["Conv2d", "ReLU", "MaxPool2"] * 2 + ["Flatten", "Linear", "ReLU", "Linear"]
    assert sum(p.numel() for p in CNNEMNIST(classes=47).parameters()) == 1_682_351
    assert "1,682,351 for 47" in (CNNEMNIST.__doc__ or "")


def test_no_classes():
    with pytest.raises(RangeError, match="classes: expected an integer >= 1, got 0"):
        CNNEMNIST(classes=0)
