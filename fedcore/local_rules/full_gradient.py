"""Local gradient descent."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedcore.errors import RangeError
from fedcore.local_rules.minibatches import Indices, Table
from fedcore.local_rules.rule import LocalRule


@dataclass(frozen=True)
class FullGradient(LocalRule):
    """Steps along the gradient over all examples of the client."""

    def batch(self, batch: int) -> int:
        """More than anybody has examples."""
        return sys.maxsize

    def along(self, batches: Iterable[Indices], examples: int) -> Iterator[Indices]:
        """The minibatches as they come, each of all examples."""
        for batch in batches:
            if len(batch) != examples:
                due = f"minibatches of all {examples} examples, since the local rule is the full gradient"
                raise RangeError(f"batches: expected {due}, got one of {len(batch)}")
            yield batch

    def in_table(self, table: Table, examples: int) -> Table:
        """The table as it is."""
        return table
