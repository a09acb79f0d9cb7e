"""The client's side of every method: what a ClientApp was sent, and what it sends back."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedcore.adapters.flower.records import CONTROL, EXAMPLES, METHOD, Wire, read_vector, write_vector
from fedcore.arguments import due_whole, is_whole
from fedcore.arrays import F32
from fedcore.errors import ArrayError, RangeError
from fedcore.model import Layout
from fedcore.server.instructions import Instructions
from fedcore.simulation.local_rules import name_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Task(Instructions):
    """A round's work for one client: instructions, and the message that it came in.

    Attributes:
        message: what came.
    """

    message: Message
    _arrays: str

    @classmethod
    def of(cls, message: Message, *, arrays: str = "arrays") -> "Task":
        """The task in a message of one of fedcore's strategies.

        Args:
            arrays: the strategy's ``arrayrecord_key``.

        Raises:
            ArrayError: the message is of another strategy, or has no ``x_prev`` where ``b`` asks for it.
            ConfigError: a field of the order is missing or unknown, as between two versions of fedcore.
        """
        content = message.content
        if METHOD not in content.config_records or arrays not in content.array_records:
            due = f"expected the records {METHOD!r} and {arrays!r} of a fedcore strategy that was told lr="
            raise ArrayError(f"message: {due}, got {[*content]}")
        beside = [name for name in content if name.startswith(f"{METHOD}.")]
        vectors = {
            name.removeprefix(f"{METHOD}."): read_vector(name, content.array_records[name])
            if name in content.array_records
            else None
            for name in beside
        }
        return cls.read(content.config_records[METHOD], vectors, message=message, _arrays=arrays)

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
        """The places of the tensors in ``x``, ``offset`` and ``x_prev``."""
        return Layout.of(self.tensors)

    @cached_property
    def x(self) -> F32:
        """The model, float32[n]."""
        return self.layout.flatten(self.tensors)

    def correct(self, module: Any, previous: Any = None, own: F32 | None = None) -> None:
        """Turn the gradients of a torch module into the method's direction, between ``backward`` and a plain SGD step.

        grad <- a grad + b previous.grad + offset + mu (y - x). A step of ``torch.optim.SGD(..., lr=task.lr)`` without
        momentum and weight decay is then the method's.

        Args:
            module: whose parameters are named as the model's arrays; a parameter without a gradient has one of zero.
            previous: where ``b`` is not 0, a module at ``x_prev`` with its gradients of the same minibatch.
            own: where ``keeps_row``, float32[n_parameters]: what the client's own row adds to the offset,
                -c_i for SCAFFOLD; zeros for MimiC, whose rows come in after the steps.

        Raises:
            ArrayError: ``previous`` or ``own`` is missing.
        """
        if self.b and previous is None:
            raise ArrayError(f"previous: expected a module at x_prev, since b is {self.b}, got None")
        if self.keeps_row and own is None:
            raise ArrayError(
                "own: expected what the client's row adds to the offset, since the client keeps it, got None"
            )
        olds = dict(previous.named_parameters()) if self.b else {}
        pieces = {piece.name: piece for piece in self.layout.slices}
        for name, parameter in module.named_parameters():
            piece, y = pieces[name], parameter.detach()
            grad = y.new_zeros(y.shape) if parameter.grad is None else parameter.grad.mul_(self.a)
            if self.b and olds[name].grad is not None:
                grad.add_(olds[name].grad, alpha=self.b)
            for part in (self.offset, own if self.keeps_row else None):
                if part is not None:
                    grad.add_(y.new_tensor(part[piece.start : piece.stop]).view(y.shape))
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
        """Make the message that goes back to the server.

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
            RangeError: ``steps`` is more than the local rule allows, or none.
        """
        most = self.local_rule.most_steps
        if most is not None and not is_whole(steps, 1, most):
            due = f"{due_whole(1, most)}, since the local rule is {name_of(self.local_rule)!r}"
            raise RangeError(f"steps: expected {due}, got {steps!r}")
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
