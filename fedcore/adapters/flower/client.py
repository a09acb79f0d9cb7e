"""The client side of every method: the task that a ClientApp receives, and its reply."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedcore.adapters.flower.records import CONTROL, EXAMPLES, METHOD, Wire, read_vector, write_vector
from fedcore.algorithms.local_rules import name_of
from fedcore.arrays import F32, as_array, own_class, own_classes, to_host
from fedcore.errors import ArrayError, RangeError
from fedcore.model.layout import Layout, named_tensors
from fedcore.server.broadcast import Instructions
from fedcore.validation import describe_integers, is_integer


@dataclass(frozen=True, kw_only=True, eq=False)
class Task(Instructions):
    """One client's instructions for a round, and the server's message that contains them."""

    message: Message
    _arrays: str

    @classmethod
    def of(cls, message: Message, *, arrays: str = "arrays") -> "Task":
        """Return the task in a message of a fedcore strategy; ``arrays`` is the strategy's ``arrayrecord_key``.

        Raises:
            ArrayError: the message is not from a fedcore strategy, or lacks the ``x_prev`` that ``b`` needs.
            ConfigError: an instruction is missing or unknown; client and server must run the same version of fedcore.
        """
        content = message.content
        if METHOD not in content.config_records or arrays not in content.array_records:
            needed = f"{METHOD!r} and {arrays!r}; use a fedcore strategy with lr="
            raise ArrayError(f"message: has the records {[*content]}, but needs {needed}")
        beside = {name.removeprefix(f"{METHOD}."): name for name in content if name.startswith(f"{METHOD}.")}
        records = content.array_records
        vectors = {key: read_vector(name, records[name]) if name in records else None for key, name in beside.items()}
        return cls.read(content.config_records[METHOD], vectors, message=message, _arrays=arrays)

    @property
    def arrays(self) -> ArrayRecord:
        """The model in the message."""
        return self.message.content.array_records[self._arrays]

    @cached_property
    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The model's tensors by name, read-only: floats as float32, integers unchanged."""
        return Wire.of(self.arrays).read(self.arrays)

    @cached_property
    def layout(self) -> Layout:
        """The positions of the tensors in ``x``, ``offset`` and ``x_prev``."""
        return Layout.of(self.tensors)

    @cached_property
    def x(self) -> F32:
        """The model, float32[n]."""
        return self.layout.flatten(self.tensors)

    def correct(self, module: Any, previous: Any = None, own: F32 | None = None) -> None:
        """Replace the gradients of a torch module by the method's direction.

        grad <- a grad + b previous.grad + offset + mu (y - x). Call it between ``backward`` and a step of
        ``torch.optim.SGD(..., lr=task.lr)`` without momentum and weight decay.

        Args:
            module: a module whose parameters have the names of the model's arrays. A missing gradient counts as zero.
                Parameters that the message lacks, such as personal ones, keep their gradients.
            previous: if ``b`` is not 0, a module at ``x_prev`` with its gradients of the same minibatch.
            own: if ``keeps_row``, the part of the offset from the client's own row, float32[n_parameters]: -c_i for
                SCAFFOLD, zeros for MimiC, whose rows are added after the steps.
        """
        if self.b and previous is None:
            raise ArrayError(f"previous=None: must be a module at x_prev, since b is {self.b}")
        if self.keeps_row and own is None:
            raise ArrayError("own=None: must be the part of the offset from the client's own row")
        olds = dict(previous.named_parameters()) if self.b else {}
        pieces = {piece.name: piece for piece in self.layout.slices}
        if lacking := pieces.keys() - named_tensors(module).keys():
            raise ArrayError(f"module: lacks the tensor {min(lacking)!r} of the message")
        for name, parameter in module.named_parameters():
            if (piece := pieces.get(name)) is None:
                continue
            y = parameter.detach()
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
        loss: float | None = None,
    ) -> Message:
        """Return the reply to the server.

        Args:
            y: the model after the steps: a module; a ``state_dict`` or mapping with the names in the message; a list of
                arrays in the message's order; or a vector like ``x``. If the strategy has groups (``parts``), a
                mapping may lack the tensors of some groups.
            steps: K, the number of local steps.
            examples: the client's number of examples.
            metrics: further numbers, which the server averages.
            control: the second vector, float32[n_parameters], if ``second`` is set.
            lr: the rate of the steps. Default: the rate that the server sent.
            loss: the mean loss of ``x`` over the client's examples, if ``needs_loss`` is set.

        Raises:
            ArrayError, DtypeError, ShapeError, RangeError: ``y`` does not fit the model, or ``steps`` the local rule.
        """
        most = self.local_rule.most_steps
        if most is not None and not is_integer(steps, 1, most):
            rule = name_of(self.local_rule)
            raise RangeError(f"steps={steps!r}: must be {describe_integers(1, most)}, since the local rule is {rule!r}")
        model = Wire.of(self.arrays).write(self._named(y))
        numbers = MetricRecord({**(metrics or {}), EXAMPLES: examples})
        claims = {"steps": steps, "lr": lr, "loss": loss}
        done = ConfigRecord({name: value for name, value in claims.items() if value is not None})
        content = RecordDict({self._arrays: model, "metrics": numbers, METHOD: done})
        if control is not None:
            content[CONTROL] = write_vector(np.ascontiguousarray(own_class("control", control), np.float32))
        return Message(content, reply_to=self.message)

    def _named(self, y: Any) -> Mapping[str, npt.NDArray[Any]]:
        if hasattr(y, "state_dict"):
            y = y.state_dict()
        if isinstance(y, np.ndarray):
            return self.tensors | dict(self.layout.unflatten(own_class("y", y)))
        if not isinstance(y, Mapping):
            y = dict(zip(self.arrays, y, strict=True))
        leaves = {
            name: y[name] if hasattr(y[name], "dtype") else np.asarray(own_classes(name, y[name]))
            for name in self.arrays
            if name in y
        }
        return {name: as_array(name, to_host(own_class(name, leaf))) for name, leaf in leaves.items()}


def examples_reply(message: Message, examples: int) -> Message:
    """Return the reply to a strategy's query for the number of examples; see ``FlexibleFedAvg``."""
    return Message(RecordDict({"metrics": MetricRecord({EXAMPLES: examples})}), reply_to=message)
