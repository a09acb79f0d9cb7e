"""Custom local rules."""

from dataclasses import dataclass

from fedcore.algorithms.local_rules import LocalRule
from fedcore.validation import check_number


@dataclass(frozen=True)
class Share(LocalRule):
    """Steps along the first examples of each minibatch."""

    of_examples: float = 0.5

    def __post_init__(self):
        check_number("of_examples", self.of_examples, "(0, 1]")

    def along(self, batches, examples):
        return (batch[: max(1, int(self.of_examples * len(batch)))] for batch in batches)


@dataclass(frozen=True)
class Other(Share):
    """A subclass of a custom rule."""


@dataclass(frozen=True)
class Unsendable(LocalRule):
    kept: object = None


class NoRule:
    pass
