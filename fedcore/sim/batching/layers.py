"""Layers of a network as slices of its flat vector, and networks whose clients can be trained together."""

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fedcore.model import Layout
from fedcore.sim.sgd import CPU, copy_of, has_hooks, repeatable

DEVICE_BYTES = 2 << 30
"""The maximum memory of one call on a GPU, in bytes. The value is not measured."""


@dataclass(frozen=True)
class Linear:
    """A fully connected layer. ``weight`` and ``bias`` are the starts of weights and biases in the flat vector."""

    outputs: int
    inputs: int
    weight: int
    bias: int | None
    relu: bool


class Net(Protocol):
    """A network of n parameters, whose clients can be trained together, with its layers from the input on."""

    layers: tuple[Linear, ...]
    n: int

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """Return the maximum number of clients of one call, at least 1, for minibatches of b examples."""

    def gradients(self, m: int, b: int, device: torch.device = CPU) -> "Gradients":
        """Return the function that computes the gradients of m models on minibatches of b examples on the device."""


class Layered:
    """A network of n parameters whose layers, from the input on, are slices of its flat vector."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self.layers = tuple(layers)
        self.n = sum(layer.outputs * (layer.inputs + (layer.bias is not None)) for layer in layers)

    def covers(self, module: nn.Module) -> bool:
        """Whether the layers hold all parameters and float buffers of a module."""
        return self.n == Layout.of(module).n


class Block:
    """m vectors of a network's parameters, layer by layer: all first weights, then all first biases, and so on.

    The weights of a layer in all models are one contiguous tensor, as a batched product needs. An elementwise operation
    on all vectors is one operation on ``flat``.

    Attributes:
        flat: float32[m n].
        weights: float32[m, outputs, inputs] for each layer, views of ``flat``.
        biases: float32[m, outputs] or None for each layer, views of ``flat``.
        parts: all weights and biases, float32[m, length] each.
    """

    def __init__(self, net: Net, m: int, device: torch.device = CPU) -> None:
        self.flat = torch.zeros(m * net.n, device=device)
        self.parts: list[Tensor] = []
        self._columns: list[slice] = []
        self.weights: list[Tensor] = []
        self.biases: list[Tensor | None] = []
        for layer in net.layers:
            self.weights.append(self._part(m, layer.weight, layer.outputs * layer.inputs).view(m, layer.outputs, -1))
            self.biases.append(None if layer.bias is None else self._part(m, layer.bias, layer.outputs))

    def _part(self, m: int, start: int, length: int) -> Tensor:
        part = self.flat[m * start : m * (start + length)].view(m, length)
        self.parts.append(part)
        self._columns.append(slice(start, start + length))
        return part

    def fill(self, rows: Tensor) -> "Block":
        """Copy vectors from the rows of float32[m, n]."""
        for columns, part in zip(self._columns, self.parts, strict=True):
            part.copy_(rows[:, columns])
        return self

    def empty_into(self, rows: Tensor) -> None:
        """Copy the vectors into the rows of float32[m, n]."""
        for columns, part in zip(self._columns, self.parts, strict=True):
            rows[:, columns] = part


Gradients = Callable[[Block, Tensor, Tensor, Tensor, Block], None]
"""Writes the gradient of each model's mean cross entropy on its minibatch into the last argument.

The other arguments are only read: m models, inputs float32[m, b, features], labels int64[m, b, 1], and weights
float32[m, b, 1]. A weight is 1 / (the size of the minibatch), or 0 for padding."""


def plain_sequence(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the layers of an ``nn.Sequential`` by name.

    Return None for another module, and if a parameter is frozen, or a module or parameter has hooks, or an object its
    own ``forward``.
    """
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    if any(has_hooks(part) or "forward" in vars(part) for part in (*module.modules(), *module.parameters())):
        return None
    children = [(name, part) for name, part in module.named_modules(remove_duplicate=False) if name and "." not in name]
    return children if all(tensor.requires_grad for tensor in module.parameters()) else None


def linear_layers(children: Sequence[tuple[str, nn.Module]], width: int, starts: dict[str, int]) -> list[Linear] | None:
    """Return fully connected layers, each with or without ReLU; None if ``children`` has other modules."""
    layers: list[Linear] = []
    for name, child in children:
        if type(child) is nn.ReLU and layers and not layers[-1].relu:
            layers.append(replace(layers.pop(), relu=True))
        elif type(child) is nn.Linear and child.in_features == width and f"{name}.weight" in starts:
            bias = None if child.bias is None else starts[f"{name}.bias"]
            layers.append(Linear(child.out_features, width, starts[f"{name}.weight"], bias, relu=False))
            width = child.out_features
        else:
            return None
    return layers


def is_flatten(module: nn.Module) -> bool:
    """Whether a module flattens each example."""
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def starts(module: nn.Module) -> dict[str, int]:
    """Return the start of each tensor of a module in its flat vector."""
    return {piece.name: piece.start for piece in Layout.of(module).slices}


BYTES = 4 << 20
"""The maximum memory, in bytes, of the models and gradients of one call, and of the examples of one step. Models and
gradients should stay in cache between steps. With 32 clients, 3 to 6 MiB are fastest: a step of one client with 50,890
parameters takes 159, 148 and 182 us at 1.5, 3 and 6 MiB; with 199,210 it takes 338, 328 and 380 at 3, 6 and 12 MiB."""


class Perceptron(Layered):
    """A multi-layer perceptron, trained by hand-written batched products."""

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, ...]) -> "Perceptron | None":
        """Return the perceptron of a module, or None if it is a different network.

        A perceptron is an ``nn.Sequential`` of ``Flatten`` (optional if examples are flat) and ``Linear`` layers, each
        with or without ``ReLU``. It has no dropout, normalisation, shared or frozen weights, hooks, or objects with
        their own ``forward``.
        """
        children = plain_sequence(module)
        if not children:
            return None
        if is_flatten(children[0][1]):
            children.pop(0)
        elif len(shape) != 1:
            return None
        layers = linear_layers(children, math.prod(shape), starts(module))
        return net if layers and (net := cls(layers)).covers(module) else None

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """Return the maximum number of clients of one call, for minibatches of b examples, within ``BYTES``."""
        room = BYTES if device.type == "cpu" else DEVICE_BYTES
        return max(1, min(room // (8 * self.n), room // (4 * b * self.layers[0].inputs)))

    def gradients(self, m: int, b: int, device: torch.device = CPU) -> Gradients:
        """Return the function that computes the gradients of m models on minibatches of b examples.

        Determinism: a model's gradient depends only on its own rows and on b, if torch's batched products do.
        Cost: three batched products a layer, two for the first.
        """
        return self._gradients

    def _gradients(self, models: Block, inputs: Tensor, labels: Tensor, weights: Tensor, out: Block) -> None:
        activations = [inputs]
        for layer, weight, bias in zip(self.layers, models.weights, models.biases, strict=True):
            a = activations[-1]
            if layer.outputs >= a.shape[1] and layer is not self.layers[-1]:
                z = torch.bmm(a, weight.transpose(1, 2))
            else:  # A product with short rows takes twice the time, a softmax along them twenty times.
                z = torch.bmm(weight, a.transpose(1, 2)).transpose(1, 2)
            if bias is not None:
                z += bias.unsqueeze(1)
            activations.append(z.relu_() if layer.relu else z)
        d = torch.softmax(activations[-1].transpose(1, 2), 1).transpose(1, 2)
        d.scatter_add_(2, labels, d.new_full((1, 1, 1), -1.0).expand_as(labels))
        d *= weights
        for i in reversed(range(len(self.layers))):
            if self.layers[i].relu:
                d = torch.ops.aten.threshold_backward(d, activations[i + 1], 0)
            torch.bmm(d.transpose(1, 2), activations[i], out=out.weights[i])
            if (bias_gradient := out.biases[i]) is not None:
                torch.sum(d, 1, out=bias_gradient)
            if i:
                d = torch.bmm(d, models.weights[i])


LOGGER = logging.getLogger("fedcore.sim.sgd")
TRIAL = 3
"""The number of examples in the trial; the last one is padding for the first client."""


class Functional:
    """A stateless network, trained by torch's vmap over functional_call. Each tensor is a layer without biases."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        self._module, self._shape = _same_parameters(module).train(), shape
        self._shapes = {name: tensor.shape for name, tensor in module.named_parameters()}
        start_of = starts(module)
        self.layers = tuple(
            Linear(math.prod(size[:1]), math.prod(size[1:]), start_of[name], None, relu=False)
            for name, size in self._shapes.items()
        )
        self.n = Layout.of(module).n
        self._activations = _count_activations(module, shape)

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, ...], device: torch.device = CPU) -> "Functional | None":
        """Return the network of a module, or None if torch cannot batch it.

        The module must have no buffers, hooks, or shared or frozen weights. It must draw no random numbers, and its
        scores of an example must not depend on the minibatch. A trial with two clients, one with a padded minibatch,
        compares the batched gradients with those of separate calls.

        Cost: the time of some steps of two clients. The first call in a process also loads torch's batching rules: five
            seconds of CPU time.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        is_plain = parameters and all(tensor.requires_grad for tensor in parameters.values())
        is_shared = len(parameters) > len(dict(module.named_parameters()))
        has_more = any(True for _ in module.buffers()) or any(map(has_hooks, module.modules()))
        if not is_plain or is_shared or has_more:
            return None
        try:
            net = cls(module, shape)
            return net if _is_separable(net, copy_of(module).to(device).train(), shape, device) else None
        except Exception as error:  # from torch or from the module's code
            LOGGER.info("clients are not trained by vmap: %s: %s", type(error).__name__, error)
            return None

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """Return the maximum number of clients of one call, for minibatches of b examples, within ``DEVICE_BYTES``."""
        return max(1, DEVICE_BYTES // (4 * (4 * self.n + 3 * b * self._activations)))

    def gradients(self, m: int, b: int, device: torch.device = CPU) -> Gradients:
        """Return the function that computes the gradients of m models on minibatches of b examples."""
        module = _same_parameters(self._module)  # each thread needs a copy, since a call changes the module

        def loss(parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            scores: Tensor = functional_call(module, parameters, (inputs,))
            return (cross_entropy(scores, labels, reduction="none") * weights).sum()

        take: Any = vmap(grad(loss), randomness="error")

        def gradients(models: Block, inputs: Tensor, labels: Tensor, weights: Tensor, out: Block) -> None:
            inputs = inputs.view(m, b, *self._shape)
            grads = take(self.by_name(models), inputs, labels.squeeze(2), weights.squeeze(2))
            for name, part in self.by_name(out).items():
                part.copy_(grads[name])

        return gradients

    def by_name(self, models: Block) -> dict[str, Tensor]:
        """Return the parameters of m models by name, float32[m, ...], as views of a block."""
        pairs = zip(self._shapes.items(), models.parts, strict=True)
        return {name: part.view(len(part), *size) for (name, size), part in pairs}


def _count_activations(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the number of elements of an example and of all modules' outputs."""
    numbers = [math.prod(shape)]

    def count(_: nn.Module, __: Any, out: Any) -> None:
        numbers.append(out.numel() if isinstance(out, Tensor) else 0)

    probe = _same_parameters(module).eval()
    for part in probe.modules():
        part.register_forward_hook(count)
    with torch.no_grad():
        probe(torch.zeros(1, *shape, device=next(probe.parameters()).device))
    return sum(numbers)


def _same_parameters(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its parameters' memory."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in module.parameters()})


def _is_separable(net: Functional, module: nn.Module, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether two clients' batched gradients are close to those of separate calls."""
    random = np.random.default_rng(0)
    inputs = torch.from_numpy(random.standard_normal((2, TRIAL, *shape), np.float32)).to(device)
    labels = torch.zeros(2, TRIAL, 1, dtype=torch.int64, device=device)
    sizes, weights = (TRIAL - 1, TRIAL), torch.zeros(2, TRIAL, 1, device=device)
    for client, size in enumerate(sizes):
        weights[client, :size] = 1 / size
    tensors = dict(module.named_parameters())
    models, out = Block(net, 2, device), Block(net, 2, device)
    with repeatable(device):
        with torch.no_grad():
            for name, part in net.by_name(models).items():
                part.copy_(tensors[name].expand_as(part))
            net.gradients(2, TRIAL, device)(models, inputs.flatten(2), labels, weights, out)
        for client, size in enumerate(sizes):
            module.zero_grad()
            with torch.enable_grad():
                loss = cross_entropy(module(inputs[client, :size]), labels[client, :size, 0])
                loss.backward()  # type: ignore[no-untyped-call]
            for name, part in net.by_name(out).items():
                exact = tensors[name].grad
                if exact is None or not bool((part[client] - exact).norm() <= 1e-3 * exact.norm() + 1e-6):
                    return False
    return True
