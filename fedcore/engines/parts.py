"""The clients' parts of a data set, and how they work through them: what every engine checks and counts alike."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fedcore.arguments import whole
from fedcore.engines.engine import check_asked
from fedcore.engines.orders import Orders
from fedcore.errors import RangeError, UnknownClientError
from fedcore.local import LocalOptions
from fedcore.local_rules import Indices, LocalRule, Sgd, Table, minibatch_table, minibatches
from fedcore.participation import Active
from fedcore.server import Broadcast


class Parts:
    """The parts of a training set that the clients hold, with the sizes and seed of their minibatches.

    Args:
        held: client i holds the training examples ``held[i]``, int64[m_i].
        examples: of the training set.
        batch, epochs, steps, seed, options: as for ``InProcess``.

    Raises:
        RangeError: there is no part, one is empty or points outside the training examples, or a number is out of range.
    """

    def __init__(
        self,
        held: Sequence[npt.NDArray[np.int64]],
        examples: int,
        *,
        batch: int,
        epochs: int | None,
        steps: int | None,
        seed: int,
        options: LocalOptions,
    ) -> None:
        if not len(held):
            raise RangeError("parts: expected at least one client's, got none")
        for client, part in enumerate(held):
            if not len(part):
                raise RangeError(f"parts: expected at least one example, got none for client {client}")
            if not 0 <= part.min() <= part.max() < examples:
                raise RangeError(
                    f"parts: expected indices 0 .. {examples - 1}, got {part.min()} .. {part.max()} for client {client}"
                )
        self._held = list(held)
        self.largest = max(map(len, held))
        self.seed, self.options = seed, options
        self._batch, self._epochs, self._steps = batch, epochs, steps
        self.minibatches(0, 0, Sgd())  # refuses wrong sizes now and not in the first round

    def __len__(self) -> int:
        """The number of clients."""
        return len(self._held)

    def __getitem__(self, client: int) -> npt.NDArray[np.int64]:
        """The training examples that a client holds."""
        return self._held[client]

    def orders(self, broadcast: Broadcast, active: Active | None, *, minibatches: int | None = None) -> Orders:
        """The orders that a broadcast is to its clients.

        Args:
            broadcast: its vectors in host memory.
            active: as for ``Engine.updates``.
            minibatches: how many make complete work; None is the parts' own number.

        Raises:
            UnknownClientError: an id is no index into the parts.
            RangeError: ``active`` is of other clients; or the method asks for what simulated clients cannot do.
        """
        check_asked(broadcast.keeps_row, broadcast.second_vector)
        if broadcast.plain and not self.options.plain:
            raise RangeError(
                "options: expected no momentum and no clip, since the server derives gradients from plain steps, got"
                f" {self.options}"
            )
        ids = [self._known(client) for client in broadcast.ids]
        due, counts = self._full_steps(ids, broadcast.local_rule), np.ones(len(ids), np.int64)
        due = due if minibatches is None else np.full_like(due, whole("minibatches", minibatches, 1))
        if active is not None:
            if active.clients.tolist() != ids:
                raise RangeError(f"active: expected the clients {ids}, got {active.clients.tolist()}")
            due = active.steps(due)
            counts = counts if active.counts is None else active.counts
        return Orders(ids, due.tolist(), counts.tolist(), broadcast)

    def most_steps(self, local_rule: LocalRule) -> int:
        """The most local steps that a client's complete work has, of all clients."""
        return int(self._full_steps(range(len(self)), local_rule).max())

    def batch(self, local_rule: LocalRule) -> int:
        """The size of a minibatch under a rule."""
        return local_rule.batch(self._batch)

    def minibatches(
        self, round: int, client: int, local_rule: LocalRule, steps: int | None = None
    ) -> Iterator[Indices]:
        """A client's minibatches in a round, as indices into its own part: so many, or those of complete work."""
        return minibatches(
            len(self[client]),
            self.batch(local_rule),
            epochs=self._epochs if steps is None else None,
            steps=self._steps if steps is None else steps,
            seed=self.seed,
            round=round,
            client=client,
        )

    def table(self, round: int, client: int, local_rule: LocalRule, steps: int) -> Table:
        """A client's minibatches; as wide as its own size makes it, so that its bits are no matter of the others."""
        part = self[client]
        power = 1 << (len(part) - 1).bit_length()
        size = self.batch(local_rule)
        table = minibatch_table(
            len(part),
            size,
            steps=steps,
            width=max(2, min(size, power)),  # one column of one client is another product to torch
            seed=self.seed,
            round=round,
            client=client,
        )
        table = local_rule.in_table(table, len(part))
        return Table(part[table.indices], table.sizes)

    def _known(self, client: object) -> int:
        if not isinstance(client, int) or not 0 <= client < len(self):
            raise UnknownClientError(f"ids: expected 0 .. {len(self) - 1}, got {client!r}")
        return client

    def _full_steps(self, clients: Sequence[int], local_rule: LocalRule) -> Indices:
        """The steps of each client's complete work."""
        due = [
            local_rule.full_steps(len(self[client]), self._batch, epochs=self._epochs, steps=self._steps)
            for client in clients
        ]
        return np.array(due, np.int64)
