"""Accounting of differential privacy by the package ``dp_accounting``, and the ledger of a server's private rounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedcore.errors import MissingDependencyError, RangeError
from fedcore.validation import check_integer, check_number

Entry = tuple[int, float, float]
"""A number of rounds, the rate q with which they sampled each client, and their noise multiplier z."""
LEAST_NOISE, MOST_NOISE = 0.05, 1000.0
"""The interval in which ``noise_for`` searches."""


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
    except ImportError:
        raise MissingDependencyError.of("accounting of privacy", "dp_accounting", extra="dp") from None
    return dp_accounting


def epsilon_of(entries: Sequence[Entry], delta: float) -> float:
    """Return epsilon of rounds that each release a sum with Gaussian noise, for a client that takes part or does not.

    Args:
        entries: the rounds. A rate below 1 requires Poisson sampling: each client is drawn independently of the others,
            and the cohort stays secret.
        delta: in (0, 1).

    Raises:
        MissingDependencyError: ``dp_accounting`` is missing (extra ``dp``).

    Cost: .1 to 2 s, mostly independent of the number of rounds.
    Source: the accountant of privacy loss distributions of dp_accounting; its estimate is an upper bound.
    """
    delta = check_number("delta", delta, "(0, 1)")
    dp = _accounting()
    accountant = dp.pld.PLDAccountant()
    for rounds, rate, noise in entries:
        accountant.compose(_event(dp, noise, rate), rounds)
    return float(accountant.get_epsilon(delta)) if entries else 0.0


def noise_for(epsilon: float, delta: float, *, rounds: int, rate: float = 1.0) -> float:
    """Return the least noise multiplier z with which ``epsilon_of`` these rounds is at most ``epsilon``.

    It is at most .1 % above the least.

    Raises:
        MissingDependencyError: ``dp_accounting`` is missing (extra ``dp``).
        RangeError: z would be outside [0.05, 1000].

    Cost: about 8 times that of ``epsilon_of``.
    """
    epsilon, delta = check_number("epsilon", epsilon, "(0, inf)"), check_number("delta", delta, "(0, 1)")
    rounds, rate = check_integer("rounds", rounds, 1), check_number("rate", rate, "(0, 1]")

    def excess(noise: float) -> float:
        return math.log(max(epsilon_of([(rounds, rate, noise)], delta), 1e-300) / epsilon)

    low = high = 1.0
    above = below = excess(1.0)
    while below > 0:
        low, above, high = high, below, 2 * high
        if high > MOST_NOISE:
            raise RangeError(f"epsilon={epsilon:g}: needs a noise above {low:g}; use fewer rounds or a lower rate")
        below = excess(high)
    while above <= 0:
        high, below, low = low, above, low / 2
        if low < LEAST_NOISE:
            raise RangeError(f"epsilon={epsilon:g}: needs a noise below {high:g}, which protects little")
        above = excess(low)
    # In logarithms, epsilon is nearly a line. Guesses are moved to the other side of the last one.
    turn, moved = 0, 1.0004
    while high / low > 1.001:
        turn += 1
        share = above / (above - below) if turn % 4 and math.isfinite(above) else 0.5
        middle = min(max(low * (high / low) ** share * moved, low * 1.0001), high / 1.0001)
        if (found := excess(middle)) > 0:
            low, above, moved = middle, found, 1.0004
        else:
            high, below, moved = middle, found, 1 / 1.0004
    return high


def _event(dp: Any, noise: float, rate: float) -> Any:
    gaussian = dp.GaussianDpEvent(noise)
    return gaussian if rate == 1 else dp.PoissonSampledDpEvent(rate, gaussian)


@dataclass(frozen=True)
class Ledger:
    """The finished private rounds of a server. It is part of the transaction of each round.

    Attributes:
        entries: the rounds, in order.
        clip: the clipping norm of the next round; None if the rule has not changed its own.
    """

    entries: tuple[Entry, ...] = ()
    clip: float | None = None

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return sum(rounds for rounds, _, _ in self.entries)

    def epsilon(self, delta: float) -> float:
        """Return ``epsilon_of`` the rounds."""
        return epsilon_of(self.entries, delta)

    def after(self, rate: float, noise: float, clip: float | None) -> "Ledger":
        """Return the ledger after one more round."""
        *before, last = self.entries or [(0, rate, noise)]
        if last[1:] != (rate, noise):
            before, last = [*before, last], (0, rate, noise)
        return Ledger((*before, (last[0] + 1, rate, noise)), clip)

    def to_state(self) -> dict[str, Any]:
        """Return the ledger as JSON."""
        return {"entries": [list(entry) for entry in self.entries], "clip": self.clip}

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> "Ledger":
        """Return the ledger of ``to_state``; raise ValueError or TypeError if it is malformed."""
        if state is None:
            return cls()
        entries = tuple(
            (check_integer("rounds", n, 1), check_number("rate", q, "(0, 1]"), check_number("noise", z, "(0, inf)"))
            for n, q, z in state["entries"]
        )
        clip = state["clip"]
        return cls(entries, None if clip is None else check_number("clip", clip, "(0, inf)"))
