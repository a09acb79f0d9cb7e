"""The contract of a local rule: how many examples a minibatch has, and along which minibatches a client steps."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcore.local_rules.minibatches import Indices, Table


@dataclass(frozen=True)
class LocalRule:
    """A local rule: what a client makes of its minibatches before it takes a step along each.

    A rule of one's own is a frozen dataclass over this one, at the top of a module that clients can import too: its
    fields are its options, numbers or strings, and travel by name. Without methods of its own it is ``Sgd``.
    """

    most_steps: ClassVar[int | None] = None
    """The most local steps that it allows in a round; None where that is the client's own affair."""
    ordinary: ClassVar[bool] = False
    """True if a training loop that has never heard of rules follows it: a step along each minibatch."""

    def batch(self, batch: int) -> int:
        """The size of a minibatch, where the client's is ``batch``; more than it has examples means all of them."""
        return batch

    def along(self, batches: Iterable[Indices], examples: int) -> Iterator[Indices]:
        """The minibatches to step along, each when it is asked for.

        Args:
            batches: int64[b] each, of the size that ``batch`` says.
            examples: how many the client holds.

        Raises:
            RangeError: a minibatch is not of that size.
        """
        return iter(batches)

    def in_table(self, table: Table, examples: int) -> Table:
        """The same of minibatches that lie in a table, whose width then depends on its own shape alone."""
        came = (row[:size] for row, size in zip(table.indices, table.sizes, strict=True))
        batches = list(self.along(came, examples))
        sizes = np.array([len(batch) for batch in batches], np.int64)
        width = -(-int(sizes.max(initial=1)) // table.indices.shape[1]) * table.indices.shape[1]
        indices = np.stack([np.pad(batch, (0, width - len(batch)), mode="edge") for batch in batches])
        return Table(indices, sizes)

    def full_steps(self, examples: int, batch: int, *, epochs: int | None = None, steps: int | None = None) -> int:
        """The minibatches of a client's complete work, of which a participation pattern may take a share.

        Args:
            examples: how many the client holds.
            batch: the size of its minibatches.
            epochs, steps: passes over its examples, or steps. One of the two.
        """
        return (epochs or 0) * -(-examples // self.batch(batch)) if steps is None else steps
