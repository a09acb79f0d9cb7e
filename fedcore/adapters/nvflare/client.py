"""The client's side: the order in an FLModel, the reply, and the local work; a client's script imports this."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel

from fedcore.arrays import F32
from fedcore.errors import ArrayError
from fedcore.model import Layout
from fedcore.server.instructions import VECTORS, Instructions
from fedcore.simulation.sgd import FlatModel, LocalOptions, sgd

KEY = "fedcore"
"""Where in ``FLModel.meta`` it stands."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Order(Instructions):
    """The order of a client's steps: instructions, and the layout of the parameters that came with them.

    Attributes:
        layout: of the parameters; the two vectors are in its order.
    """

    layout: Layout

    def named(self, vector: F32 | None) -> dict[str, F32]:
        """``offset`` or ``x_prev`` by the parameters' names, as views; nothing for None."""
        pieces = [piece for piece in self.layout.slices if vector is not None and piece.stop <= len(vector)]
        return {piece.name: vector[piece.start : piece.stop].reshape(piece.shape) for piece in pieces}  # type: ignore[index]


def order(model: FLModel) -> Order:
    """The order in what ``flare.receive()`` returned.

    Raises:
        ArrayError: there is none; the model is not of a fedcore ``Controller``.
        ConfigError: a term is missing or unknown, as between two versions of fedcore.
    """
    sent = (model.meta or {}).get(KEY)
    if not isinstance(sent, Mapping):
        raise ArrayError(f"model: expected meta[{KEY!r}], as fedcore's Controller sends it, got none")
    vectors = {name: sent.get(name) for name in VECTORS}
    numbers = {name: value for name, value in sent.items() if name not in VECTORS}
    return Order.read(numbers, vectors, layout=Layout.of(model.params))


def reply(
    params: Any,
    *,
    steps: int,
    examples: float | None = None,
    lr: float | None = None,
    control: F32 | None = None,
    **more: Any,
) -> FLModel:
    """Make the message that a client sends back.

    Args:
        params: its model after the local steps, by name.
        steps: K_i, those steps.
        examples: n_i, its number of examples; None weighs it by its steps, as NVFlare does.
        lr: the rate of its steps, if it is not the one that it was told.
        control: float32[n_parameters], the mean of its raw gradients, where ``Order.second`` is set.
        more: ``metrics``, say, and FLModel's other arguments.
    """
    said = {"examples": examples, "lr": lr, "control": control}
    return FLModel(params=params, meta={FLMetaKey.NUM_STEPS_CURRENT_ROUND: steps, KEY: said}, **more)


class Trainer:
    """The steps y -= lr (a grad(y) + b grad(x_prev) + offset + mu (y - x)) of a torch module, on the CPU.

    Args:
        module: it is taken over (see ``fedcore.simulation.sgd.FlatModel``).
        options: weight decay, momentum and clipping of the steps.
    """

    def __init__(self, module: Any, options: LocalOptions | None = None) -> None:
        self.model, self._options = FlatModel(module), options
        self._previous: FlatModel | None = None

    def train(
        self, received: FLModel, inputs: Any, labels: Any, batches: Iterable[npt.NDArray[np.int64]], **more: Any
    ) -> FLModel:
        """Start from what ``flare.receive()`` returned, step along the minibatches, and return what to send.

        Args:
            inputs, labels: torch.float32[m, ...] and torch.int64[m], the client's examples.
            batches: indices into them, int64[b] each; the method's local rule may take them as one
                (``OneMinibatch``), or each must be of all examples (``FullGradient``).
            more: as for ``reply``: ``metrics``, say.

        Raises:
            ArrayError: the model is not of a fedcore ``Controller``, or not of this module's tensors.
            ConfigError: a term is missing or unknown, as between two versions of fedcore.
            RangeError: the method derives gradients from plain steps, and there is momentum or clipping; it has clients
                keep their own rows, which is left to a loop of one's own; or a minibatch is not of all examples.
            UnknownNameError: there is no such local rule.
        """
        told, layout = order(received), self.model.layout
        told.require_followed(plain=self._options is None or self._options.plain)
        self.model.load(layout.flatten(received.params))
        self.model.module.train()
        previous = None
        x_prev = _reordered(told.x_prev, told.layout, layout)
        if x_prev is not None:
            previous = self._previous = self._previous or FlatModel(copy.deepcopy(self.model.module))
            previous.load(x_prev)
            previous.module.train()
        work = sgd(
            self.model,
            inputs,
            labels,
            told.local_rule.along(batches, len(labels)),
            replace(told, offset=_reordered(told.offset, told.layout, layout)),
            x=self.model.parameters.numpy().copy() if told.mu else None,
            previous=previous,
            options=self._options,
        )
        torch_tensors = any(hasattr(tensor, "detach") for tensor in received.params.values())
        tensors = {name: tensor.detach().clone() for name, tensor in self.model.module.state_dict().items()}
        params = tensors if torch_tensors else {name: tensor.numpy() for name, tensor in tensors.items()}
        control = _reordered(work.control, layout, told.layout)
        return reply(params, steps=work.steps, examples=len(labels), control=control, **more)


def _reordered(vector: F32 | None, came: Layout, due: Layout) -> F32 | None:
    """The same tensors in the order of another layout: names need not come in the order of the module's own."""
    if vector is None or came.slices == due.slices:
        return vector
    places = {piece.name: piece for piece in came.slices}
    ordered = np.zeros(due.n if len(vector) == came.n else due.n_parameters, np.float32)
    for piece in due.slices:
        if piece.name in places and piece.stop <= len(ordered):
            ordered[piece.start : piece.stop] = vector[places[piece.name].start : places[piece.name].stop]
    return ordered
