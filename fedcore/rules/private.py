"""Differential privacy at the level of clients: accounting by ``dp_accounting``, the ledger, and ``PrivateMean``."""

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcore import kernels
from fedcore.arrays import F64, copy_into, to_host
from fedcore.errors import MissingDependencyError, RangeError, RoundError
from fedcore.rules.base import Combine, Group, Scale
from fedcore.validation import Checked, check_integer, check_number

Entry = tuple[int, float, float]
"""A number of rounds, the rate q with which they sampled each client, and their noise multiplier z."""
LEAST_NOISE, MOST_NOISE = 0.05, 1000.0
"""The interval in which ``noise_for`` searches."""
MOST_LOSS = 2e4
"""The largest sum of (rate / noise)^2 over the rounds that is given to the accountant; epsilon is about half of it."""


def _accounting() -> Any:
    try:
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
        RangeError: an entry or delta is out of range, or dp_accounting cannot compute so large an epsilon, or so small
            a delta: below about 1e-15 times the number of different entries.

    Cost: .1 to 5 s, mostly independent of the number of rounds, for an epsilon below 30; more seconds for a larger one.
    Source: the accountant of privacy loss distributions of dp_accounting; its estimate is an upper bound.
    """
    delta, entries = check_number("delta", delta, "(0, 1)"), _checked(entries)
    dp = _accounting()
    accountant = dp.pld.PLDAccountant()
    try:
        if sum(rounds * (rate / noise) ** 2 for rounds, rate, noise in entries) > MOST_LOSS:
            raise OverflowError  # the distribution would take gigabytes
        for rounds, rate, noise in entries:
            gaussian = dp.GaussianDpEvent(noise)
            accountant.compose(gaussian if rate == 1 else dp.PoissonSampledDpEvent(rate, gaussian), rounds)
        found = float(accountant.get_epsilon(delta)) if entries else 0.0
    except (ArithmeticError, MemoryError, ValueError):
        raise RangeError("epsilon: is too large to compute; use more noise, fewer rounds or a lower rate") from None
    if math.isinf(found):  # for dp_accounting, tails of about 1e-15 have an infinite loss
        raise RangeError(f"delta={delta:g}: is too small; use {2 * accountant.get_delta(math.inf):.1g} or more")
    return found


def _checked(entries: Iterable[Sequence[Any]]) -> tuple[Entry, ...]:
    return tuple(
        (check_integer("rounds", n, 1), check_number("rate", q, "(0, 1]"), check_number("noise", z, "(0, inf)"))
        for n, q, z in entries
    )


def noise_for(epsilon: float, delta: float, *, rounds: int, rate: float = 1.0) -> float:
    """Return the least noise multiplier z with which ``epsilon_of`` these rounds is at most ``epsilon``.

    It is at most .1 % above the least.

    Raises:
        MissingDependencyError: ``dp_accounting`` is missing (extra ``dp``).
        RangeError: z would be outside [0.05, 1000], or delta is too small for ``epsilon_of``.

    Cost: about 9 times that of ``epsilon_of``.
    """
    epsilon, delta = check_number("epsilon", epsilon, "(0, inf)"), check_number("delta", delta, "(0, 1)")
    rounds, rate = check_integer("rounds", rounds, 1), check_number("rate", rate, "(0, 1]")

    def excess(noise: float) -> float:
        try:
            return math.log(max(epsilon_of([(rounds, rate, noise)], delta), 1e-300) / epsilon)
        except RangeError:
            return math.inf

    if epsilon_of([(rounds, rate, MOST_NOISE)], delta) > epsilon:
        raise RangeError(f"epsilon={epsilon:g}: needs a noise above {MOST_NOISE:g}; use fewer rounds or a lower rate")
    guess = rate * math.sqrt(2 * rounds * math.log(2 / delta)) / epsilon  # of many rounds
    low = high = min(max(guess, LEAST_NOISE), MOST_NOISE)
    above = below = excess(high)
    while below > 0:
        low, above, high = high, below, min(2 * high, MOST_NOISE)
        below = excess(high)
    while above <= 0:
        if low == LEAST_NOISE:
            raise RangeError(f"epsilon={epsilon:g}: needs a noise below {low:g}, which protects little")
        high, below, low = low, above, max(low / 2, LEAST_NOISE)
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


@dataclass(frozen=True)
class Ledger(Checked):
    """The finished private rounds of a server. It is part of the transaction of each round.

    Attributes:
        entries: the rounds, in order.
        clip: the clipping norm of the next round; None if the rule has not changed its own.
    """

    entries: tuple[Entry, ...] = ()
    clip: float | None = None

    _intervals, _converts = (("clip", "(0, inf)", None),), True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "entries", _checked(self.entries))

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
        return cls() if state is None else cls(state["entries"], state["clip"])


GRID_BITS = 24
"""The noise has a standard deviation of at least 2^24 steps of its grid."""
SLACK = 2.0**-12
"""Relative bound of the errors of norms (below 1e-5), of clipping, and of float64 sums of up to 2^19 updates."""
MOST_PRIVATE = 2**19
"""The maximum number of updates in a private round."""
DRAWN = "[1e-30, 1e30]"
"""The interval of numbers with which noise can be drawn: no product of them overflows, or is 0."""
SEEDED = "the noise is reproducible (seed=), so this round is not private"


@dataclass(frozen=True)
class PrivateMean(Scale, Combine):
    """The only rule of a chain: (sum of h_i min(1, C / |h_i|) + noise) / m, with noise of standard deviation z C.

    Each client counts once, whatever its number of examples. m is fixed. A client thus changes the sum by at most C.
    The noise is a discrete Gaussian on a grid of 2^-24 z C. Its key is 32 random bytes of the operating system for
    each round. The sum is rounded to the grid first, and z is raised by at most .1 % for the rounding of the sum and of
    the norms; then no bit of the result depends on a client except through the sum with its noise.

    Args:
        clip: C, the greatest norm of an update that counts fully: |x - y| where models are averaged, else the norm of
            the mean gradient. C and m are in [1e-30, 1e30].
        noise: z, the standard deviation of the noise as a multiple of C, in [1e-30, 1000]; see ``for_budget`` and
            ``fedcore privacy``.
        expected: m, the expected number of clients in a round: rate times the number of clients.
        rate: q, the probability with which each client takes part in a round, independently of the others (Poisson
            sampling). Default: 1, all clients may take part in every round.
        rounds: the budget, as a number of rounds. The server opens no round after them. Default: no limit.
        quantile: adapts C so that this share of the updates is not clipped, in (0, 1) (Andrew et al., NeurIPS 2021,
            1905.03871): C <- C exp(-clip_rate (b - quantile)), b the share of unclipped updates with noise; C stays in
            [1e-30, 1e30]. Default: C is fixed.
        clip_rate: the rate of that change, > 0.
        count_noise: the standard deviation of the noise of the number of unclipped updates, from .6 z to 1e30. Default:
            the greater of m / 20 and z. The noise of the sum is (z^-2 - (2 count_noise)^-2)^-1/2 C in place of z C, so
            that both together have the privacy of z.
        seed: makes the noise a function of the seed and the round, for tests. Such rounds are not private: each report
            states it, and ``rounds`` is not accepted.
    """

    clip: float
    noise: float
    expected: float
    rate: float = 1.0
    rounds: int | None = None
    quantile: float | None = None
    clip_rate: float = 0.2
    count_noise: float | None = None
    seed: int | None = None

    _intervals = (
        *(("clip", DRAWN), ("expected", DRAWN), ("clip_rate", "(0, inf)"), ("noise", "[1e-30, 1000]")),
        *(
            ("rate", "(0, 1]"),
            ("rounds", (1, None), None),
            ("quantile", "(0, 1)", None),
            ("seed", (0, 2**64 - 1), None),
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantile is not None:
            given = max(self.expected / 20, self.noise) if self.count_noise is None else self.count_noise
            counted = check_number("count_noise", given, f"[{0.6 * self.noise!r}, 1e30]")
            object.__setattr__(self, "count_noise", counted)
        elif self.count_noise is not None:
            raise RangeError("count_noise: only an adaptive clip counts updates; pass quantile, or leave it out")
        if self.seed is not None and self.rounds is not None:
            raise RangeError("seed: reproducible noise protects no one, so it has no budget; leave rounds out")

    @classmethod
    def for_budget(
        cls, epsilon: float, delta: float, *, clip: float, expected: float, rounds: int, rate: float = 1.0, **more: Any
    ) -> "PrivateMean":
        """Return the rule with the least noise with which ``rounds`` rounds are (epsilon, delta)-private.

        Args:
            epsilon, delta: the budget, > 0 and in (0, 1).
            clip, expected, rounds, rate, more: the fields of the rule.

        Raises:
            MissingDependencyError: ``dp_accounting`` is missing (extra ``dp``).

        Cost: that of ``noise_for``, a few seconds.
        """
        noise = noise_for(epsilon, delta, rounds=rounds, rate=rate)
        return cls(clip, noise, expected, rate, rounds, **more)

    def epsilon(self, delta: float) -> float:
        """Return epsilon of the whole budget, ``rounds`` rounds; see ``epsilon_of``."""
        if self.rounds is None:
            raise RangeError("rounds=None: without a number of rounds, epsilon has no bound; pass rounds")
        return epsilon_of([(self.rounds, self.rate, self.noise)], delta)

    def weights(self, group: Group) -> F64:
        """The factor that clips each update to the norm C."""
        return np.array([min(1.0, self.clip / max(norm, self.clip)) for norm in group.norms["parameters"]])

    def at(self, ledger: Ledger) -> "PrivateMean":
        """Return the rule with the C of the next round."""
        return self if ledger.clip is None else replace(self, clip=ledger.clip)

    def require_budget(self, ledger: Ledger) -> None:
        """Raise RoundError if the budget is spent."""
        if self.rounds is not None and ledger.rounds >= self.rounds:
            raise RoundError(f"PrivateMean: the budget of {self.rounds} rounds is spent; stop, or pass a higher one")

    def add_noise(
        self, sum: F64, factors: F64, ledger: Ledger, round: int, *, n: int | None = None, first: int = 0
    ) -> Ledger:
        """Add the noise to the sum of the clipped updates, float64[n], in place; return the ledger after the round.

        Args:
            factors: float64[k], the factors by which the rule scaled the updates.
            ledger: the ledger before the round; this rule is ``at`` it.
            round: the round's number, for ``seed``.
            n, first: the length of the whole sum, if this is a slice of it, and the index of the first element. Each
                slice has a different key. With ``seed`` all have one, and draw the numbers before ``first`` too.

        Raises:
            RangeError: the round has more than 2^19 updates.

        Cost: reads and writes 8 n bytes; about 10 ns an element on one thread. The noise of a sum on a device is added
            in host memory, 8 n bytes more.
        """
        if len(factors) > MOST_PRIVATE:
            raise RangeError(f"updates: a private round has at most {MOST_PRIVATE}, got {len(factors)}")
        z = self.noise if self.count_noise is None else (self.noise**-2 - (2 * self.count_noise) ** -2) ** -0.5
        grid = _grid(z * self.clip)
        sensitivity = self.clip * (1 + SLACK) + math.sqrt(len(sum) if n is None else n) * grid
        whole: Any = to_host(sum)
        whole = whole if self.seed is None or not first else np.concatenate([np.zeros(first), whole])
        sigma = math.ceil(z * sensitivity / grid)
        kernels.add_discrete_gaussian(whole, grid, sigma, self._key(round, "sum"), out=whole)
        if whole is not sum:
            copy_into(sum, whole[first:])
        clip = ledger.clip
        if self.quantile is not None and self.count_noise is not None:
            # Of +1/2 or -1/2 for each update, one client changes the sum by 1/2.
            count, grid = np.array([((factors == 1) - 0.5).sum()]), _grid(self.count_noise)
            sigma = math.ceil(self.count_noise / grid)
            kernels.add_discrete_gaussian(count, grid, sigma, self._key(round, "count"), out=count)
            share = float(count[0]) / self.expected + 0.5
            growth = math.exp(min(-self.clip_rate * (share - self.quantile), 700))
            clip = min(max(self.clip * growth, 1e-30), 1e30)
        return ledger.after(self.rate, self.noise, clip)

    def shown(self, ledger: Ledger) -> dict[str, Any]:
        """Return the entries of a report's ``privacy``; ``ledger`` is the one after the round."""
        shown: dict[str, Any] = {"rounds": ledger.rounds, "of": self.rounds, "rate": self.rate}
        shown |= {"noise": self.noise, "clip": self.clip}
        return shown if self.seed is None else shown | {"warning": SEEDED}

    def _key(self, round: int, purpose: str) -> bytes:
        if self.seed is None:
            return os.urandom(32)
        return hashlib.blake2b(f"{self.seed} {round} {purpose}".encode(), digest_size=32).digest()


def _grid(deviation: float) -> float:
    """Return the grid of a noise: a power of two."""
    return math.ldexp(1.0, math.frexp(deviation)[1] - 1 - GRID_BITS)
