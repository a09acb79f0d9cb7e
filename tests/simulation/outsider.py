"""A local rule of somebody's own."""

from dataclasses import dataclass

from fedcore.arguments import real
from fedcore.simulation.local_rules import LocalRule


@dataclass(frozen=True)
class Share(LocalRule):
    """Steps along the first examples of each minibatch alone."""

    of_examples: float = 0.5

    def __post_init__(self):
        real("of_examples", self.of_examples, "(0, 1]")

    def along(self, batches, examples):
        return (batch[: max(1, int(self.of_examples * len(batch)))] for batch in batches)


@dataclass(frozen=True)
class Other(Share):
    """Other examples of them."""


@dataclass(frozen=True)
class Unsendable(LocalRule):
    kept: object = None


class NoRule:
    pass
