"""The client side, which a client's script imports: read the instructions in an FLModel, train and reply."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel

from fedcore.algorithms.local_rules import along
from fedcore.arrays import F32, as_array
from fedcore.errors import ArrayError
from fedcore.model import Layout
from fedcore.server.broadcast import VECTORS, Instructions
from fedcore.sim.sgd import FlatModel, LocalOptions, carry, mean_loss, sgd

KEY = "fedcore"
"""The key of the instructions in ``FLModel.meta``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Order(Instructions):
    """Instructions for a client's steps, with the layout of the model that was sent.

    Attributes:
        layout: the order of the parameters in ``offset`` and ``x_prev``.
    """

    layout: Layout

    def named(self, vector: F32 | None) -> dict[str, F32]:
        """Return views of ``offset`` or ``x_prev`` by parameter name; an empty dictionary for None."""
        if vector is None:
            return {}
        pieces = [piece for piece in self.layout.slices if piece.stop <= len(vector)]
        return {piece.name: vector[piece.start : piece.stop].reshape(piece.shape) for piece in pieces}


def order(model: FLModel) -> Order:
    """Return the instructions in a model that ``flare.receive()`` returned.

    Raises:
        ArrayError: the model is not from a fedcore ``Controller``.
        ConfigError: an instruction is missing or unknown; client and server must run the same version of fedcore.
    """
    sent = (model.meta or {}).get(KEY)
    if not isinstance(sent, Mapping):
        raise ArrayError(f"model: meta[{KEY!r}] is missing; only fedcore's Controller sends it")
    numbers = {name: value for name, value in sent.items() if name not in VECTORS}
    return Order.read(numbers, {name: sent.get(name) for name in VECTORS}, layout=Layout.of(model.params))


def reply(
    params: Any,
    *,
    steps: int,
    examples: float | None = None,
    lr: float | None = None,
    control: F32 | None = None,
    loss: float | None = None,
    **more: Any,
) -> FLModel:
    """Return a client's reply.

    Args:
        params: the model after the local steps, by name.
        steps: K_i, the number of local steps.
        examples: n_i, the client's number of examples. Default: ``steps`` is the weight, as in NVFlare.
        lr: the rate of the steps. Default: the rate that the server sent.
        control: the mean of the raw gradients, float32[n_parameters], if ``Order.second`` is set.
        loss: the mean loss of the received model over the client's examples, if ``Order.needs_loss`` is set.
        more: further arguments of FLModel, such as ``metrics``.
    """
    own = {"examples": examples, "lr": lr, "control": control, "loss": loss}
    return FLModel(params=params, meta={FLMetaKey.NUM_STEPS_CURRENT_ROUND: steps, KEY: own}, **more)


class Trainer:
    """Local training of a torch module on the CPU, by y -= lr (a grad(y) + b grad(x_prev) + offset + mu (y - x)).

    Args:
        module: a module whose tensors the trainer moves into one vector (see ``fedcore.sim.sgd.FlatModel``).
        options: weight decay, momentum and clipping of the steps.
    """

    def __init__(self, module: Any, options: LocalOptions | None = None) -> None:
        self.model, self._options = FlatModel(module), options
        self._previous: FlatModel | None = None

    def train(
        self, received: FLModel, inputs: Any, labels: Any, batches: Iterable[npt.ArrayLike], **more: Any
    ) -> FLModel:
        """Start from the received model, take a step per minibatch, and return the reply.

        Args:
            received: the model that ``flare.receive()`` returned.
            inputs, labels: the client's examples, torch.float32[m, ...] and torch.int64[m].
            batches: the examples' indices in each minibatch, int64[b]: arrays, tensors or lists. The local rule
                ``OneMinibatch`` merges them; ``FullGradient`` requires that each holds all examples.
            more: further arguments of ``reply``, such as ``metrics``.

        Raises:
            ArrayError: the model is not from a fedcore ``Controller``, or its tensors differ from the module's.
            ConfigError: an instruction is missing or unknown; client and server must run the same version of fedcore.
            RangeError: momentum or clipping is set, but the method derives gradients from plain steps; the method's
                clients keep their own rows, which needs a custom training loop; or a minibatch lacks examples.
        """
        work, layout = order(received), self.model.layout
        work.require_followed(plain=self._options is None or self._options.plain)
        named = {layout.aliases.get(name, name): one for name, one in received.params.items()}
        self.model.load(layout.flatten(named), layout.read_counters(named))
        self.model.module.train()
        previous = None
        if work.x_prev is not None:
            previous = self._previous = self._previous or FlatModel(copy.deepcopy(self.model.module))
            carry(work.x_prev, work.layout, layout, previous.flat.numpy())
            previous.module.train()
        loss = mean_loss(self.model, inputs, labels) if work.needs_loss else None
        start = self.model.parameters.numpy().copy() if work.mu else None
        batches = along(work.local_rule, map(np.asarray, batches), len(labels))
        task = replace(work, offset=carry(work.offset, work.layout, layout))
        result = sgd(self.model, inputs, labels, batches, task, x=start, previous=previous, options=self._options)
        is_torch = any(hasattr(tensor, "detach") for tensor in received.params.values())
        tensors = {name: tensor.detach().clone() for name, tensor in self.model.module.state_dict().items()}
        params = tensors if is_torch else {name: as_array(name, tensor) for name, tensor in tensors.items()}
        control = carry(result.control, layout, work.layout)
        return reply(params, steps=result.steps, examples=len(labels), control=control, loss=loss, **more)
