"""Limits of a client's claims and of the lengths of its vectors."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypedDict

from fedcore.arguments import real, whole
from fedcore.errors import UnknownNameError
from fedcore.rates import as_rate, rate_at

MEDIANS = 10
"""Times the median growth of a counter, up to which a counter grows in a round."""


class LimitOptions(TypedDict, total=False):
    """The arguments of ``Server`` that limit what a client may claim and send."""

    limits: Literal["open"] | None
    max_steps: int
    max_steps_ratio: float | None
    max_examples: int
    max_examples_ratio: float | None
    max_lr: float
    max_norm: float | None
    max_norm_ratio: float | None
    own_rates: bool


LIMITS = tuple(sorted(LimitOptions.__optional_keys__))


@dataclass(frozen=True)
class Limits:
    """Limits of a client's claims and of the lengths of its vectors; an update past one of these is rejected by name.

    Args:
        own_rates: whether clients may step at rates of their own, and report them as ``Update.lr``. Else a reply that
            reports another rate than it was sent is rejected.
        steps: (``max_steps``) the most local steps; best as many as the clients were asked to do. Methods that set the
            steps of a client themselves (``Algorithm.most_steps``) hold it to these.
        examples: (``max_examples``) the most examples.
        lr: (``max_lr``) the largest rate, where clients have their own.
        norm: (``max_norm``) the greatest length. What is measured is what the sums take in: |x - y| where models are
            averaged, so that a claim of many steps makes it no shorter; elsewhere the mean gradient |x - y| / (eta K),
            and a second vector's own length. Float buffers, whose unit is another, have no limit.
        norm_ratio: (``max_norm_ratio``) >= 1; an update is rejected that is so many times longer than the median of
            those accepted before it, the last 1,000 over all rounds (of an even number the lower one in the middle;
            zeros do not count). The first 8 updates wait for each other, at most until the round's end, and are judged
            by the median of them all. Parameters, float buffers and second vectors each have a median of their own.
            Where the buffers of none of them ever changed, their length in x stands for the median.

    These are caps: a claim past one counts up to it, and the log names the client and the option. All are off unless
    they are given:
        examples_ratio: (``max_examples_ratio``) >= 1; where weights follow examples that the server was not told, a
            claim counts up to so many times the median of the claims accepted, the last 1,000.
        steps_ratio: (``max_steps_ratio``) >= 1; in gamma, a client's steps count up to so many times the median of
            those accepted, the last 1,000.
        clips: (``limits="open"``) an update longer than the median that ``norm_ratio`` describes is scaled down to it.

    ``limits="open"`` is for a federation that strangers can join: it clips, and both caps are 2 medians unless given.
    """

    steps: int = 10**6
    examples: int = 2**53
    lr: float = 100.0
    norm: float | None = None
    norm_ratio: float | None = None
    own_rates: bool = False
    examples_ratio: float | None = None
    steps_ratio: float | None = None
    clips: bool = False

    @property
    def measures(self) -> bool:
        """Tell whether there is a limit of lengths."""
        return self.norm is not None or self.judges_by_medians

    @property
    def judges_by_medians(self) -> bool:
        """Tell whether the lengths of other updates limit an update's."""
        return self.clips or self.norm_ratio is not None

    @property
    def limits(self) -> str | None:
        """The preset that is on, as ``Server(limits=)`` takes it."""
        return "open" if self.clips else None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Limits":
        """The limits of ``Server``'s arguments; errors are those of ``changed``."""
        return cls().changed(options)

    def changed(self, options: Mapping[str, Any]) -> "Limits":
        """The limits with others of ``Server``'s arguments.

        Raises:
            RangeError, UnknownNameError: one is not what ``Server`` takes.
        """
        given = {name.removeprefix("max_"): _CHECKS[name](value) for name, value in options.items() if name != "limits"}
        preset = options.get("limits", self.limits)
        if preset not in (None, "open"):
            raise UnknownNameError.of("limits", preset, ("open",))
        if preset != self.limits:
            caps = dict.fromkeys(("examples_ratio", "steps_ratio"), 2.0 if preset else None)
            given |= {name: value for name, value in caps.items() if given.get(name) is None}
            given["clips"] = preset is not None
        return replace(self, **given)

    @classmethod
    def saved(cls, state: Mapping[str, Any]) -> "Limits":
        """The limits that a folder describes; those of older versions capped steps, and some have no lengths."""
        return cls(**{name: state[name] for name in ("steps", "examples", "lr")} | {"steps_ratio": 10.0, **state})

    def to_state(self) -> dict[str, Any]:
        """The limits as JSON can hold them."""
        return asdict(self)


def _ratio(name: str) -> Callable[[Any], float | None]:
    return lambda value: None if value is None else real(name, value, "[1, inf)")


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "max_steps": lambda value: whole("max_steps", value, 1, 2**53),
    "max_steps_ratio": _ratio("max_steps_ratio"),
    "max_examples": lambda value: whole("max_examples", value, 1, 2**53),
    "max_examples_ratio": _ratio("max_examples_ratio"),
    "max_lr": lambda value: rate_at(as_rate(value), 0),
    "max_norm": lambda value: None if value is None else real("max_norm", value, "(0, inf)"),
    "max_norm_ratio": _ratio("max_norm_ratio"),
    "own_rates": bool,
}
