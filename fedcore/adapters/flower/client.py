"""The client's side of every method: what a ClientApp was sent, and what it sends back."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedcore.adapters.flower.instructions import METHOD, OFFSET, X_PREV
from fedcore.adapters.flower.population import EXAMPLES
from fedcore.adapters.flower.records import CONTROL, Wire, read_vector, write_vector
from fedcore.errors import ArrayError
from fedcore.layout import Layout

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Task:
    """A round's work for one client: K steps y -= lr (a grad(y) + b grad(x_prev) + offset + mu (y - x)).

    Attributes:
        message: what came.
        round: the server's number of the round.
        lr, a, b, mu: the rate and the coefficients above.
        second: whether to send the mean of the gradients at the y's, before any correction, as ``control``.
        local_rule: "sgd", "full gradient" for steps along the gradient over all examples, or "one minibatch" for one
            step along all that its minibatches hold.
        offset: float32[n_parameters], or None for zero.
        x_prev: float32[n], the model of the round before; None where ``b`` is 0.
    """

    message: Message
    round: int
    lr: float
    a: float
    b: float
    mu: float
    second: bool
    local_rule: str
    offset: F32 | None
    x_prev: F32 | None
    _arrays: str

    @classmethod
    def of(cls, message: Message, *, arrays: str = "arrays") -> "Task":
        """The task in a message of one of fedcore's strategies.

        Args:
            arrays: the strategy's ``arrayrecord_key``.

        Raises:
            ArrayError: the message is of another strategy.
        """
        content = message.content
        if METHOD not in content.config_records or arrays not in content.array_records:
            raise ArrayError(f"message: expected the records {METHOD!r} and {arrays!r}, got {[*content]}")
        says: Mapping[str, Any] = content.config_records[METHOD]
        vectors = content.array_records
        return cls(
            message,
            round=says["round"],
            lr=says["lr"],
            a=says["a"],
            b=says["b"],
            mu=says["mu"],
            second=says["second"],
            local_rule=says["local-rule"],
            offset=read_vector(OFFSET, vectors[OFFSET]) if OFFSET in vectors else None,
            x_prev=read_vector(X_PREV, vectors[X_PREV]) if X_PREV in vectors else None,
            _arrays=arrays,
        )

    @property
    def arrays(self) -> ArrayRecord:
        """The model as it came."""
        return self.message.content.array_records[self._arrays]

    @cached_property
    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The model by name: float32, and integers as they are. Read-only."""
        return Wire.of(self.arrays).read(self.arrays)

    @cached_property
    def layout(self) -> Layout:
        """Where the tensors lie in ``x``, ``offset`` and ``x_prev``."""
        return Layout.of(self.tensors)

    @cached_property
    def x(self) -> F32:
        """The model, float32[n]."""
        return self.layout.flatten(self.tensors)

    def correct(self, module: Any, previous: Any = None) -> None:
        """Turn the gradients of a torch module into the method's direction, between ``backward`` and a plain SGD step.

        grad <- a grad + b previous.grad + offset + mu (y - x). A step of ``torch.optim.SGD(..., lr=task.lr)`` without
        momentum and weight decay is then the method's.

        Args:
            module: whose parameters are named as the model's arrays; a parameter without a gradient has one of zero.
            previous: where ``b`` is not 0, a module at ``x_prev`` with its gradients of the same minibatch.

        Raises:
            ArrayError: ``previous`` is missing.
        """
        if self.b and previous is None:
            raise ArrayError(f"previous: expected a module at x_prev, since b is {self.b}, got None")
        olds = dict(previous.named_parameters()) if self.b else {}
        pieces = {piece.name: piece for piece in self.layout.slices}
        for name, parameter in module.named_parameters():
            piece, y = pieces[name], parameter.detach()
            grad = y.new_zeros(y.shape) if parameter.grad is None else parameter.grad.mul_(self.a)
            if self.b and olds[name].grad is not None:
                grad.add_(olds[name].grad, alpha=self.b)
            if self.offset is not None:
                grad.add_(y.new_tensor(self.offset[piece.start : piece.stop]).view(y.shape))
            if self.mu:
                grad.add_(y - y.new_tensor(self.x[piece.start : piece.stop]).view(y.shape), alpha=self.mu)
            parameter.grad = grad

    def reply(
        self,
        y: Any,
        *,
        steps: int,
        examples: int,
        metrics: Mapping[str, Any] | None = None,
        control: F32 | None = None,
        lr: float | None = None,
    ) -> Message:
        """What goes back to the server.

        Args:
            y: the model after the steps: a module, a ``state_dict`` or a mapping of arrays by the names that came; a
                list of arrays in their order; or a vector like ``x``.
            steps: K, how many steps were really done.
            examples: how many examples the client has.
            metrics: further numbers, of which the server takes the mean.
            control: float32[n_parameters], where ``second`` asks for it.
            lr: the rate of the steps, if it was another than ``lr``.

        Raises:
            ArrayError, DtypeError, ShapeError: ``y`` is no such model.
        """
        wire = Wire.of(self.arrays)
        done: dict[str, Any] = {"steps": steps, **({} if lr is None else {"lr": lr})}
        content = RecordDict(
            {
                self._arrays: wire.write(self._named(y)),
                "metrics": MetricRecord({**(metrics or {}), EXAMPLES: examples}),
                METHOD: ConfigRecord(done),
            }
        )
        if control is not None:
            content[CONTROL] = write_vector(np.ascontiguousarray(control, np.float32))
        return Message(content, reply_to=self.message)

    def _named(self, y: Any) -> Mapping[str, npt.NDArray[Any]]:
        if hasattr(y, "state_dict"):
            y = y.state_dict()
        if isinstance(y, np.ndarray):
            return self.tensors | dict(self.layout.unflatten(y))
        if not isinstance(y, Mapping):
            y = dict(zip(self.arrays, y, strict=True))
        return {name: _as_numpy(y[name]) for name in self.arrays}


def examples_reply(message: Message, examples: int) -> Message:
    """The answer to a strategy's query for the number of examples; see ``FlexibleFedAvg``."""
    return Message(RecordDict({"metrics": MetricRecord({EXAMPLES: examples})}), reply_to=message)


def _as_numpy(leaf: Any) -> npt.NDArray[Any]:
    """An array, or a torch tensor on any device; bfloat16 as float32."""
    if not hasattr(leaf, "detach"):
        return np.asarray(leaf)
    leaf = leaf.detach().cpu()
    array: npt.NDArray[Any] = (leaf.float() if "bfloat16" in str(leaf.dtype) else leaf).numpy()
    return array
