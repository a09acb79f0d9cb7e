"""Local stochastic gradient descent."""

from dataclasses import dataclass
from typing import ClassVar

from fedcore.local_rules.minibatches import Table
from fedcore.local_rules.rule import LocalRule


@dataclass(frozen=True)
class Sgd(LocalRule):
    """One step along each minibatch: what every training loop does."""

    ordinary: ClassVar[bool] = True

    def in_table(self, table: Table, examples: int) -> Table:
        """The table as it is."""
        return table
