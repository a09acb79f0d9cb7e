"""Layers of a network as slices of its flat vector, and networks that many clients can train at once."""

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
from fedcore.simulation.torch_device import CPU, repeatable

DEVICE_BYTES = 2 << 30
"""The most memory of one call on a GPU. A choice, not measured yet."""


@dataclass(frozen=True)
class Linear:
    """A fully connected layer: its sizes, the start of its weights and biases in the flat vector, and whether ReLU
    follows."""

    outputs: int
    inputs: int
    weight: int
    bias: int | None
    relu: bool


class Net(Protocol):
    """A network whose clients can be trained together."""

    @property
    def layers(self) -> Sequence[Linear]:
        """The layers, from the input on."""

    @property
    def n(self) -> int:
        """The number of its parameters."""

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """The most clients for one call on a device, whose minibatches have b examples; at least 1."""

    def gradients(self, m: int, b: int, device: torch.device = CPU) -> "Gradients":
        """Return the function that computes the gradients of m models on minibatches of b examples, all on the
        device."""


class Layered:
    """A network of layers, as slices of its flat vector.

    Attributes:
        layers: from the input on.
        n: its parameters.
    """

    def __init__(self, layers: Sequence[Linear]) -> None:
        self.layers = tuple(layers)
        self.n = sum(layer.outputs * (layer.inputs + (layer.bias is not None)) for layer in layers)

    def is_whole(self, module: nn.Module) -> bool:
        """Whether the layers are all of a module's parameters and float buffers."""
        return self.n == Layout.of(module).n


class Block:
    """m vectors of a network's parameters, layer by layer: all first weights, then all first biases, and so on.

    So every layer's weights of all models are one contiguous tensor for a batched product, and an elementwise operation
    is one operation on ``flat``.

    Attributes:
        flat: float32[m n].
        weights: float32[m, outputs, inputs] for each layer, views of ``flat``.
        biases: float32[m, outputs] or None for each layer, views of ``flat``.
        parts: all of them, float32[m, length] each.
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
        """Copy the vectors float32[m, n], a row each."""
        for columns, part in zip(self._columns, self.parts, strict=True):
            part.copy_(rows[:, columns])
        return self

    def empty_into(self, rows: Tensor) -> None:
        """Write the vectors into float32[m, n], a row each."""
        for columns, part in zip(self._columns, self.parts, strict=True):
            rows[:, columns] = part


Gradients = Callable[[Block, Tensor, Tensor, Tensor, Block], None]
"""A function of m models, inputs float32[m, b, features], labels int64[m, b, 1], and weights float32[m, b, 1]: 1 / (the
size of the minibatch), or 0 for a padding example. It writes the gradient of each model's mean cross entropy on its own
minibatch into the last argument, and reads the others."""


def plain_sequence(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers of an ``nn.Sequential`` by name if all are trained and none has hooks, else None."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    if any(has_hooks(part) for part in module.modules()):
        return None
    return list(module._modules.items()) if all(tensor.requires_grad for tensor in module.parameters()) else None


def linear_layers(children: Sequence[tuple[str, nn.Module]], width: int, starts: dict[str, int]) -> list[Linear] | None:
    """Fully connected layers, each with or without ReLU after it; None if there is another layer.

    Args:
        children: modules by name.
        width: the inputs of the first layer.
        starts: the start of each tensor in the flat vector.
    """
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
    """The start of each tensor of a module in its flat vector."""
    return {piece.name: piece.start for piece in Layout.of(module).slices}


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, kind) for kind in kinds)


BYTES = 4 << 20
"""The most memory of the models and gradients of one call, so that they stay in cache from step to step, and of the
examples of one step. With 32 clients the time is least at 3 to 6 MiB: 50,890 parameters take 159, 148 and 182 us a
client and step at 1.5, 3 and 6 MiB; 199,210 take 338, 328 and 380 at 3, 6 and 12 MiB."""


class Perceptron(Layered):
    """A multi-layer perceptron, trained by hand-written batched products."""

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, ...]) -> "Perceptron | None":
        """Return the perceptron of a module, or None if it is another network.

        A perceptron is an ``nn.Sequential`` of ``Flatten`` (optional if examples are flat), and of ``Linear`` layers,
        each with or without ``ReLU`` after it: no dropout, no normalisation, no shared or frozen weights, no hooks.

        Args:
            module: of float32 tensors.
            shape: an example's.
        """
        children = plain_sequence(module)
        if not children:
            return None
        if is_flatten(children[0][1]):
            children.pop(0)
        elif len(shape) != 1:
            return None
        layers = linear_layers(children, math.prod(shape), starts(module))
        return net if layers and (net := cls(layers)).is_whole(module) else None

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """The most clients for one call, whose minibatches have b examples: as many as fit into ``BYTES``."""
        room = BYTES if device.type == "cpu" else DEVICE_BYTES
        return max(1, min(room // (8 * self.n), room // (4 * b * self.layers[0].inputs)))

    def gradients(self, m: int, b: int, device: torch.device = CPU) -> Gradients:
        """Return the function that computes the gradients of m models on minibatches of b examples.

        Determinism: a model's gradient depends only on its own rows and on b, as far as torch's batched products do.
        Cost: three batched products a layer, two for the first.
        """
        return self._gradients

    def _gradients(self, models: Block, inputs: Tensor, labels: Tensor, weights: Tensor, out: Block) -> None:
        reached = [inputs]
        for layer, weight, bias in zip(self.layers, models.weights, models.biases, strict=True):
            a = reached[-1]
            if layer.outputs >= a.shape[1] and layer is not self.layers[-1]:
                z = torch.bmm(a, weight.transpose(1, 2))
            else:  # a product with short rows takes twice the time, a softmax along them twenty times
                z = torch.bmm(weight, a.transpose(1, 2)).transpose(1, 2)
            if bias is not None:
                z += bias.unsqueeze(1)
            reached.append(z.relu_() if layer.relu else z)
        d = torch.softmax(reached[-1].transpose(1, 2), 1).transpose(1, 2)
        d.scatter_add_(2, labels, d.new_full((1, 1, 1), -1.0).expand_as(labels))
        d *= weights
        for i in reversed(range(len(self.layers))):
            if self.layers[i].relu:
                d = torch.ops.aten.threshold_backward(d, reached[i + 1], 0)
            torch.bmm(d.transpose(1, 2), reached[i], out=out.weights[i])
            if (bias_gradient := out.biases[i]) is not None:
                torch.sum(d, 1, out=bias_gradient)
            if i:
                d = torch.bmm(d, models.weights[i])


LOGGER = logging.getLogger("fedcore.simulation.sgd")
TRIAL = 3
"""Examples of the trial; the last one is padding."""


class Functional:
    """A stateless network whose clients are trained by torch's vmap over functional_call.

    Attributes:
        layers: its tensors, each as a layer of its rows without a bias.
        n: its parameters.
    """

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        self._module, self._shape = _same_parameters(module).train(), shape
        self._shapes = {name: tensor.shape for name, tensor in module.named_parameters()}
        starts = {piece.name: piece.start for piece in Layout.of(module).slices}
        self.layers = tuple(
            Linear(math.prod(size[:1]), math.prod(size[1:]), starts[name], None, relu=False)
            for name, size in self._shapes.items()
        )
        self.n = Layout.of(module).n
        self._reached = _numbers_reached(module, shape)

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, ...], device: torch.device = CPU) -> "Functional | None":
        """Return the network of a module, or None if torch cannot batch it.

        The module has no buffers, no hooks, and no shared or frozen weights; it draws no random numbers, and its scores
        of an example do not depend on the minibatch. A trial of two clients, one with a padded minibatch, verifies that
        their gradients are those of each client by itself.

        Args:
            module: of float32 tensors, on the CPU or the device; not changed.
            shape: an example's.
            device: the device of the trial.

        Cost: the time of some steps of two clients; the first call in a process loads torch's batching rules, five
            seconds of CPU.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        if len(parameters) > len(dict(module.named_parameters())) or any(True for _ in module.buffers()):
            return None
        if not parameters or not all(tensor.requires_grad for tensor in parameters.values()):
            return None
        if any(has_hooks(part) for part in module.modules()):
            return None
        try:
            net = cls(module, shape)
            return net if _is_each_ones_own(net, copy.deepcopy(module).to(device).train(), shape, device) else None
        except Exception as error:  # of torch or of the module's code
            LOGGER.info("clients are not trained by vmap: %s: %s", type(error).__name__, error)
            return None

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """The most clients for one call, whose minibatches have b examples: as many as fit into ``DEVICE_BYTES``."""
        return max(1, DEVICE_BYTES // (4 * (4 * self.n + 3 * b * self._reached)))

    def gradients(self, m: int, b: int, device: torch.device = CPU) -> Gradients:
        """Return the function that computes the gradients of m models on minibatches of b examples."""
        module = _same_parameters(self._module)  # a call puts tensors into it, so each thread has another copy

        def loss(parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            scores: Tensor = functional_call(module, parameters, (inputs,))
            return (cross_entropy(scores, labels, reduction="none") * weights).sum()

        take: Any = vmap(grad(loss), randomness="error")

        def gradients(models: Block, inputs: Tensor, labels: Tensor, weights: Tensor, out: Block) -> None:
            found = take(self._named(models), inputs.view(m, b, *self._shape), labels.squeeze(2), weights.squeeze(2))
            for name, part in self._named(out).items():
                part.copy_(found[name])

        return gradients

    def _named(self, models: Block) -> dict[str, Tensor]:
        """The parameters of m models by name, float32[m, ...], views of a block."""
        pairs = zip(self._shapes.items(), models.parts, strict=True)
        return {name: part.view(len(part), *size) for (name, size), part in pairs}


def _numbers_reached(module: nn.Module, shape: tuple[int, ...]) -> int:
    """The number of elements of an example and of all modules' outputs."""
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
    """A copy of a module with the same parameters, whose memory is not copied."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in module.parameters()})


def _is_each_ones_own(net: Functional, module: nn.Module, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether two clients' batched gradients are those that torch computes for each client by itself."""
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
            for name, part in net._named(models).items():
                part.copy_(tensors[name].expand_as(part))
            net.gradients(2, TRIAL, device)(models, inputs.flatten(2), labels, weights, out)
        for client, size in enumerate(sizes):
            module.zero_grad()
            with torch.enable_grad():
                loss = cross_entropy(module(inputs[client, :size]), labels[client, :size, 0])
                loss.backward()  # type: ignore[no-untyped-call]
            for name, part in net._named(out).items():
                due = tensors[name].grad
                if due is None or not bool((part[client] - due).norm() <= 1e-3 * due.norm() + 1e-6):
                    return False
    return True
