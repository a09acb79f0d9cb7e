"""One step with all that a round's minibatches hold."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcore.local_rules.minibatches import Indices, Table
from fedcore.local_rules.rule import LocalRule


@dataclass(frozen=True)
class OneMinibatch(LocalRule):
    """One step along all the examples that the minibatches would have.

    >>> [batch.tolist() for batch in OneMinibatch().along([np.array([0, 1]), np.array([2])], examples=3)]
    [[0, 1, 2]]
    """

    most_steps: ClassVar[int | None] = 1

    def along(self, batches: Iterable[Indices], examples: int) -> Iterator[Indices]:
        """All minibatches, as one."""
        yield np.concatenate(list(batches))

    def in_table(self, table: Table, examples: int) -> Table:
        """A table of one row, as wide as all rows of this one."""
        counted = np.arange(table.indices.shape[1]) < table.sizes[:, None]
        row = np.concatenate([table.indices[counted], table.indices[~counted]])
        return Table(row[None], table.sizes.sum(keepdims=True))
