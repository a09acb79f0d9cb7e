"""Limits of a client's claims and of the lengths of its vectors."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from fedcore.arguments import real, whole
from fedcore.rates import as_rate, rate_at

MEDIANS = 10
"""Times the median of what others claim, of steps, examples and a counter's growth, up to which a claim counts."""


class LimitOptions(TypedDict, total=False):
    """The arguments of ``Server`` that limit what a client may claim and send."""

    max_steps: int
    max_examples: int
    max_examples_ratio: float | None
    max_lr: float
    max_norm: float | None
    max_norm_ratio: float | None
    own_rates: bool


LIMITS = tuple(sorted(LimitOptions.__optional_keys__))


@dataclass(frozen=True)
class Limits:
    """Limits of a client's claims and of the lengths of its vectors; an update past it is refused by name.

    Args:
        own_rates: whether clients may step at rates of their own, and say them as ``Update.lr``. Else a reply that says
            another rate than it was sent is refused.
        steps: (``max_steps``) the most local steps; best as many as the clients were asked to do. Methods that say
            themselves how many a client does (``Algorithm.most_steps``) hold it to these. Where clients do epochs,
            their steps are as many as their own examples make them, which is for nobody here to know: then a claim
            counts in gamma, and what a counter grows by, up to 10 times a median, and the client's own mean
            gradient is as many times shorter.
        examples: (``max_examples``) the most examples.
        lr: (``max_lr``) the largest rate, where clients have their own.
        norm: (``max_norm``) the greatest length. What is measured is what the sums take in: |x - y| where models are
            averaged, so that a claim of many steps makes it no shorter; elsewhere the mean gradient |x - y| / (eta K),
            and a second vector's own length. Float buffers, whose unit is another, have no limit.
        norm_ratio: (``max_norm_ratio``) >= 1; an update is refused that is so many times longer than the median of
            those heard before it, the last 1,000 over all rounds (of an even number the lower one in the middle; zeros
            say nothing). Until 8 were heard, updates wait, at most until the round's end, and are judged by the median
            of them all. Parameters, float buffers and second vectors each have a median of their own. Where the buffers
            of none of them ever changed, their length in x stands for the median.
        examples_ratio: (``max_examples_ratio``) >= 1; where weights follow examples that the server was not told, a
            claim counts up to so many times the median of those heard, the last 1,000; None for any claim.
    """

    steps: int = 10**6
    examples: int = 10**9
    lr: float = 100.0
    norm: float | None = None
    norm_ratio: float | None = None
    own_rates: bool = False
    examples_ratio: float | None = MEDIANS

    @property
    def measures(self) -> bool:
        """Tell whether there is a limit of lengths."""
        return self.norm is not None or self.norm_ratio is not None

    @classmethod
    def of(
        cls,
        steps: int,
        examples: int,
        lr: float,
        norm: float | None = None,
        norm_ratio: float | None = None,
        own_rates: bool = False,
        examples_ratio: float | None = MEDIANS,
    ) -> "Limits":
        """The limits of ``Server``'s arguments, ``max_steps`` and so on.

        Raises:
            RangeError: one is not what is said there.
        """
        return cls(
            whole("max_steps", steps, 1, 2**53),
            whole("max_examples", examples, 1, 2**53),
            rate_at(as_rate(lr), 0),
            None if norm is None else real("max_norm", norm, "(0, inf)"),
            None if norm_ratio is None else real("max_norm_ratio", norm_ratio, "[1, inf)"),
            bool(own_rates),
            None if examples_ratio is None else real("max_examples_ratio", examples_ratio, "[1, inf)"),
        )

    def changed(self, options: Mapping[str, Any]) -> "Limits":
        """The limits with others of ``Server``'s arguments, ``max_steps`` and so on; errors are those of ``of``."""
        return self.of(**asdict(self) | {name.removeprefix("max_"): value for name, value in options.items()})
