from fedcore.local.nets import LeNet


def test_it_is_the_papers_network():
    kinds = [type(layer).__name__ for layer in LeNet()]
    assert kinds == ["Conv2d", "ReLU", "MaxPool2"] * 2 + ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
