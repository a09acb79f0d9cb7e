"""A torch model whose parameters, float buffers and gradients are views of flat vectors."""

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedcore.errors import ArrayError, DtypeError, ShapeError
from fedcore.layout import Layout
from fedcore.local.torch_device import CPU, moved


class FlatModel:
    """A module that is loaded with one copy, stepped with one operation, and never has to be flattened.

    The module is taken over: its parameters and float buffers become views of ``flat``, and their gradients
    views of ``grad``, into which the backward pass adds. ``module.zero_grad()``, which drops the gradients by
    default, and ``module.to(...)`` would undo that; use ``grad.zero_()``.

    Args:
        module: on the CPU, or on the device already; its tensors float32 or integer.
        device: where the model is to lie.

    Attributes:
        module: the module itself.
        layout: ``Layout.of(module)``.
        flat: torch.float32[n], the parameters and behind them the float buffers.
        parameters: torch.float32[n_parameters], the first part of ``flat``.
        grad: torch.float32[n_parameters].

    Raises:
        DtypeError: a tensor is neither float32 nor an integer.
        ArrayError: a tensor is neither on the CPU nor on the device.
    """

    def __init__(self, module: nn.Module, device: torch.device = CPU) -> None:
        self.module = module
        self.layout = Layout.of(module)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        for name in self.layout.names:
            if tensors[name].dtype != torch.float32:
                raise DtypeError(f"{name}: expected float32 or an integer dtype, got {tensors[name].dtype}")
            if tensors[name].device not in (CPU, device):
                raise ArrayError(f"{name}: expected a tensor on the CPU, got one on {tensors[name].device}")
        if device.type != "cpu":
            module.to(device)
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self.flat = torch.empty(self.layout.n, device=device)
        self.parameters = self.flat[: self.layout.n_parameters]
        self.grad = torch.zeros(self.layout.n_parameters, device=device)
        for piece in self.layout.slices:
            tensor, view = tensors[piece.name], self.flat[piece.start : piece.stop].view(piece.shape)
            view.copy_(tensor.detach())
            tensor.data = view
            if piece.kind == "parameter":
                tensor.grad = self.grad[piece.start : piece.stop].view(piece.shape)

    @property
    def device(self) -> torch.device:
        """The device on which the model lies."""
        return self.flat.device

    def load(self, x: npt.NDArray[np.float32]) -> None:
        """Copy a flat vector into the model.

        Args:
            x: float32[n] in host memory, read-only.

        Raises:
            DtypeError, ShapeError: ``x`` is not float32[n].

        Cost: reads and writes 4 n bytes.
        """
        if x.dtype != np.float32:
            raise DtypeError(f"x: expected float32[{self.layout.n}], got {x.dtype}")
        if x.shape != (self.layout.n,):
            raise ShapeError(f"x: expected float32[{self.layout.n}], got shape {x.shape}")
        if self.device.type == "cpu":
            np.copyto(self.flat.numpy(), x)
        else:
            self.flat.copy_(moved(x, self.device))
