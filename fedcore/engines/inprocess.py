"""Client work in this process, one client after another on one model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedcore.data import Dataset
from fedcore.errors import RangeError, UnknownClientError, UnknownNameError
from fedcore.local import RULES, FlatModel, minibatches
from fedcore.server import Broadcast, Update

EVALUATION_BATCH = 500
"""Test examples at a time: enough to hide the cost of a call, few enough for LeNet's activations to stay in cache
(10,000 images on one core: 0.33 s; with 1,000 at a time 0.54 s)."""


@dataclass(frozen=True)
class Evaluation:
    """How a model does on the test set: the share of right answers, and the mean cross entropy."""

    accuracy: float
    loss: float


class InProcess:
    """Trains the clients of a round on their parts of a data set.

    Args:
        module: the model, on the CPU; it is taken over (see ``FlatModel``).
        dataset: its training examples are the clients', its test examples are for ``evaluate``.
        parts: client i holds the training examples ``parts[i]``, int64[m_i].
        batch: the size of a minibatch.
        epochs: local passes over the client's examples, or
        steps: local steps. One of the two.
        seed: the run's seed, on which the minibatches depend.

    Attributes:
        initial: float32[n], a copy of the module's values as they came: x_0.

    Raises:
        RangeError: there is no part, one is empty or points outside the training examples, or a number is out
            of range.
        DtypeError, ArrayError: the module is none that ``FlatModel`` takes.

    Determinism: an update depends on the seed, the broadcast and the client alone, not on who trained before,
    as long as the module has no integer counters.
    """

    def __init__(
        self,
        module: nn.Module,
        dataset: Dataset,
        parts: Sequence[npt.NDArray[np.int64]],
        *,
        batch: int,
        epochs: int | None = None,
        steps: int | None = None,
        seed: int,
    ) -> None:
        if not len(parts):
            raise RangeError("parts: expected at least one client's, got none")
        for client, part in enumerate(parts):
            if not len(part):
                raise RangeError(f"parts: expected at least one example, got none for client {client}")
            if not 0 <= part.min() <= part.max() < len(dataset.train_y):
                raise RangeError(
                    f"parts: expected indices 0 .. {len(dataset.train_y) - 1}, "
                    f"got {part.min()} .. {part.max()} for client {client}"
                )
        self._model = FlatModel(module)
        self._parts = list(parts)
        self._train = torch.from_numpy(dataset.train_x), torch.from_numpy(dataset.train_y)
        self._test = torch.from_numpy(dataset.test_x), torch.from_numpy(dataset.test_y)
        self._batch, self._epochs, self._steps, self._seed = batch, epochs, steps, seed
        self._minibatches(0, 0)  # refuses wrong sizes now and not in the first round
        self.initial: npt.NDArray[np.float32] = self._model.flat.numpy().copy()

    def updates(self, broadcast: Broadcast) -> Iterator[Update]:
        """Train the clients of a broadcast, each when its update is asked for.

        All updates share one buffer: ``y`` is a view of the model itself, and the next client's training
        overwrites it. It is writable, by which the server knows to fold it at once; whoever keeps an update
        longer must copy ``y``.

        Args:
            broadcast: what the server sent; its ids are indices into ``parts``.

        Yields:
            An ``Update`` for each id, in their order: y float32[n], the steps done, the examples that the
            client holds, and the rate.

        Raises:
            UnknownNameError: there is no such local rule.
            UnknownClientError: an id is no index into ``parts``.
        """
        if broadcast.local_rule not in RULES:
            raise UnknownNameError.of("local_rule", broadcast.local_rule, RULES)
        rule = RULES[broadcast.local_rule]
        for client in broadcast.ids:
            if not isinstance(client, int) or not 0 <= client < len(self._parts):
                raise UnknownClientError(f"ids: expected 0 .. {len(self._parts) - 1}, got {client!r}")
            self._model.load(broadcast.x)
            self._model.module.train()
            part = self._parts[client]
            batches = (part[chosen] for chosen in self._minibatches(broadcast.round, client))
            steps = rule(self._model, *self._train, batches, lr=broadcast.lr)
            yield Update(client, self._model.flat.numpy(), steps, examples=len(part), lr=broadcast.lr)

    def evaluate(self, x: npt.NDArray[np.float32]) -> Evaluation:
        """Accuracy and loss of a model on the test set.

        Args:
            x: float32[n], read-only.

        Raises:
            DtypeError, ShapeError: ``x`` is not float32[n].

        Determinism: the same bits for the same x and number of torch threads.
        """
        self._model.load(x)
        self._model.module.eval()
        all_inputs, all_labels = self._test
        right, loss = 0, 0.0
        with torch.inference_mode():
            for start in range(0, len(all_labels), EVALUATION_BATCH):
                labels = all_labels[start : start + EVALUATION_BATCH]
                scores = self._model.module(all_inputs[start : start + EVALUATION_BATCH])
                right += int((scores.argmax(1) == labels).sum())
                loss += float(cross_entropy(scores, labels, reduction="sum"))
        return Evaluation(right / len(all_labels), loss / len(all_labels))

    def _minibatches(self, round: int, client: int) -> Iterator[npt.NDArray[np.int64]]:
        return minibatches(
            len(self._parts[client]),
            self._batch,
            epochs=self._epochs,
            steps=self._steps,
            seed=self._seed,
            round=round,
            client=client,
        )
