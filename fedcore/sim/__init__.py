"""The simulator: participation, data, local rules, attacks, and engines. This module needs only NumPy."""

MODELS: tuple[str, ...] = ("cnn-cifar10", "cnn-emnist", "lenet", "logistic", "mlp", "mlp-cifar10", "mlp-mnist")
MODELS += ("relu-mnist", "resnet18", "vgg11")
"""The names in ``nets.REGISTRY``, for code that must not import torch."""
