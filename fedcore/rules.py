"""Aggregation rules: a chain that rejects, caps or scales the updates of a round, and then combines them.

A rule is a class. It decides on updates after the server has measured them and before it adds them::

    Server(model, "FedAvg", lr=0.1, aggregation=[CapExamples(2), ClipToMedian(), Mean()])

The last rule combines the updates: ``Mean``, a ``RobustRule`` such as ``Median`` that tolerates dishonest clients, or
``PrivateMean``, which adds noise for differential privacy::

    Server(model, "FedAvg", lr=0.1, aggregation=[NearestNeighborMixing(2), TrimmedMean(2)])

To write a rule, derive a frozen dataclass from ``Rule`` and implement ``decide``. Pass an object of the class, or its
path ``"mypackage.rules:RejectFewSteps"``. ``decide`` sees norms and numbers, no vectors. A rule that compares
directions is a ``RobustRule``, with ``combine``.
"""

import hashlib
import math
import os
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from inspect import isclass
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Claims
from fedcore.algorithms.privacy import Ledger, epsilon_of, noise_for
from fedcore.arrays import F32, F64, core, empty_beside, ieee
from fedcore.errors import AlgorithmError, RangeError, RoundError, UnknownNameError
from fedcore.sampling import permutation
from fedcore.store.registry import ClientId
from fedcore.validation import (
    Registry,
    check_integer,
    check_number,
    describe_interval,
    failed,
    in_interval,
    is_integer,
    name_of,
    short_repr,
)

Weights: TypeAlias = Mapping[ClientId, float] | Callable[[Claims], F64]
"""Weights that replace the numbers of examples: by client, or computed from one client's claims."""
Norms: TypeAlias = Mapping[str, Sequence[float]]
"""Norms of the updates' parts: "parameters", "buffers" and "controls" (the second vector)."""

WINDOW = 1000
"""The number of accepted updates in the window of a median."""
FAR = 10.0
"""Claims up to this multiple of the median are usual among honest clients; if they are capped, no log has them."""
FEW = 8
"""The least number of updates for a median; until then, medians include the updates to decide on."""


@dataclass(slots=True)
class Group:
    """Measured updates on which the rules decide together, in the order of ``add``; before a robust rule, of the ids.

    Usually a group is one update. Until the server has accepted 8 updates, updates wait for a group of 8 or the end of
    the round. Rules change ``examples``, ``factors`` and ``rejected``; other changes have no effect.

    Attributes:
        clients: the updates' clients.
        steps: float64[k], the reported local steps.
        examples: float64[k], the counted examples; rules may lower them (``cap_examples``). It has an effect where the
            method weights by examples and the caller gave no weight.
        norms: the float32 norm of each update, by part: |x - y| where the server averages models, else that of the mean
            gradient. With ``needs_medians``, "parameters" is the norm without the offset that the server sent.
        medians: the median norm of the last 1,000 accepted updates, by part, or None; until 8 were accepted, the
            group's norms are included. Empty unless a rule of the chain ``needs_medians``.
        most_examples: a function that returns the median number of examples times a ratio.
        factors: float64[k], the factor of each update; rules may lower it (``scale``).
        rejected: the reasons, by index of the update.
    """

    clients: Sequence[ClientId]
    steps: F64
    examples: F64
    norms: Norms
    medians: Mapping[str, float | None]
    most_examples: Callable[[float], float]
    factors: F64
    rejected: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.clients)

    def reject(self, i: int, reason: str) -> None:
        """Reject update ``i``. Only its first reason is kept."""
        self.rejected.setdefault(i, reason)

    def scale(self, i: int, factor: float) -> None:
        """Multiply update ``i`` by ``factor``, in [0, 1], unless its factor is smaller already."""
        if not factor >= self.factors[i]:  # also a NaN, which ends the round
            self.factors[i] = factor

    def cap_examples(self, most: float) -> None:
        """Count each update with at most ``most`` examples."""
        self.examples = np.minimum(self.examples, most)


class Rule(ABC):
    """A rule of the chain. A subclass is a frozen dataclass; its fields are options that a server's folder stores.

    Attributes:
        needs_medians: whether ``decide`` reads ``Group.medians``. The first 8 updates are then decided as a group.
    """

    needs_medians: ClassVar[bool] = False

    @abstractmethod
    def decide(self, group: Group) -> None:
        """Reject or scale updates of the group, or cap their examples."""


@dataclass(frozen=True)
class RatioRule(Rule):
    """A rule with a ratio to a median, at least 1. It does not change single updates."""

    ratio: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_number("ratio", self.ratio, "[1, inf)"))

    def decide(self, group: Group) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class RejectLong(RatioRule):
    """Reject an update whose norm exceeds ``ratio`` times the median of the last 1,000 accepted updates.

    Parameters, float buffers and second vectors have separate medians, without zeros. If no accepted update changed the
    buffers, their norm in x replaces the median. If clients add an offset to their gradients (SCAFFOLD, FedAvgM), the
    norm is that of the update without it, the client's own part. For methods that average models (FedDyn), this needs
    ``CapSteps`` in the chain; the offset then has the length of the median number of steps.

    Rejected updates have no effect while they are the minority. If more than half of the last 1,000 accepted and
    rejected updates (at least 8) exceed the limit, these 1,000 replace the accepted ones, so that the median follows
    norms that rise at once. With S updates per round and a full window, this takes 501 / S rounds, rounded up. In a
    round, a client counts with its accepted updates or, if it has none, with its last rejected one; the round of a
    journal that continues after a crash has lost those that were rejected before. An attacker needs more than half of
    the updates, with which it could also raise the median by accepted ones, but more slowly.
    """

    ratio: float = 10.0
    needs_medians: ClassVar[bool] = True

    def decide(self, group: Group) -> None:
        """Compare each norm with the median of its part."""
        for name, median in group.medians.items():
            if median is None:
                continue
            most = as_float32(self.ratio * median)
            for i, norm in enumerate(group.norms[name]):
                if norm > most:
                    group.reject(
                        i, f"{PARTS[name]} {norm:g} exceeds {self.ratio:g} x the median {median:g} (RejectLong)"
                    )


@dataclass(frozen=True)
class ClipToMedian(Rule):
    """Scale an update by one factor, so that no part has a norm above its median; see ``RejectLong`` for medians.

    The window stores norms before clipping; otherwise the median could only fall. If clients add an offset to their
    gradients, h_i becomes offset + factor (h_i - offset). So rows and the momentum get at most a median gradient of a
    client. Late updates count with the offset of the open round.

    Cost: with offsets, another pass over updates, rows and the offset; n elements of memory per clipped update.
    """

    needs_medians: ClassVar[bool] = True

    def decide(self, group: Group) -> None:
        """Scale each update by the smallest ratio median / norm below 1."""
        for name, median in group.medians.items():
            length = median or 0.0  # without a median, most updates are zero
            for i, norm in enumerate(group.norms[name]):
                if norm > as_float32(length):
                    group.scale(i, length / norm)


@dataclass(frozen=True)
class CapExamples(RatioRule):
    """Count at most ``ratio`` times the median number of examples of the last 1,000 accepted updates.

    The rule applies if weights follow reported examples that the server cannot check. A warning lists clients that
    report more than the cap and more than 10 times the median.
    """

    def decide(self, group: Group) -> None:
        """Cap the examples."""
        group.cap_examples(group.most_examples(self.ratio))

    @property
    def least_logged(self) -> float:
        """The multiple of the cap from which a claim is logged."""
        return max(1.0, FAR / self.ratio)


@dataclass(frozen=True)
class CapSteps(RatioRule):
    """In gamma, count at most ``ratio`` times the median number of steps of the last 1,000 accepted updates.

    The rule applies if gamma is the mean of eta_i K_i. It acts on the whole cohort at the end of the round. A larger
    median of the cohort replaces that of the window if the cohort has at least 8 draws.
    """


@dataclass(frozen=True)
class CountOnce(Rule):
    """In a buffer (``RoundPolicy(buffer=)``), count one update of each client; reject its further ones by name.

    Without the rule, a client that sends more often counts more. A rejected update does not count towards K, so each
    fold has K different clients, and one dishonest client has the weight that it has in a synchronous round. If fewer
    than K clients are registered, a buffer is full once each of them has an update. In synchronous rounds the rule
    does nothing.
    """

    def decide(self, group: Group) -> None:
        """Do nothing; the round rejects a second update before it is read."""


@dataclass(frozen=True)
class Mean(Rule):
    """The last rule of every chain: the method's weighted sum of the accepted updates.

    Args:
        weights: numbers >= 0 that replace the numbers of examples, for methods that weight by examples: by client, or a
            function of one client's ``fedcore.algorithms.Claims``, such as ``lambda claims: np.sqrt(claims.examples)``.
            A folder does not store them; pass them to ``Server.load`` again.
    """

    weights: Weights | None = None

    def __post_init__(self) -> None:
        weights: Any = self.weights
        if not isinstance(weights, Mapping) and hasattr(weights, "__len__"):  # entry i of a list belongs to client i
            object.__setattr__(self, "weights", dict(enumerate(weights)))

    def decide(self, group: Group) -> None:
        """Do nothing."""


# Differential privacy at the level of clients.


GRID_BITS = 24
"""The noise has a standard deviation of at least 2^24 steps of its grid."""
SLACK = 2.0**-12
"""Relative bound of the errors of norms (below 1e-5), of clipping, and of float64 sums of up to 2^19 updates."""
MOST_PRIVATE = 2**19
"""The maximum number of updates in a private round."""
SEEDED = "the noise is reproducible (seed=), so this round is not private"


@dataclass(frozen=True)
class PrivateMean(Rule):
    """The only rule of a chain: (sum of h_i min(1, C / |h_i|) + noise) / m, with noise of standard deviation z C.

    Each client counts once, whatever its number of examples. m is fixed. A client thus changes the sum by at most C.
    The noise is a discrete Gaussian on a grid of 2^-24 z C. Its key is 32 random bytes of the operating system for
    each round. The sum is rounded to the grid first, and z is raised by at most .1 % for the rounding of the sum and of
    the norms; then no bit of the result depends on a client except through the sum with its noise.

    Args:
        clip: C, the greatest norm of an update that counts fully, > 0: |x - y| where models are averaged, else the norm
            of the mean gradient.
        noise: z, the standard deviation of the noise as a multiple of C, in (0, 1000]; see ``for_budget`` and
            ``fedcore privacy``.
        expected: m, the expected number of clients in a round, > 0: rate times the number of clients.
        rate: q, the probability with which each client takes part in a round, independently of the others (Poisson
            sampling). Default: 1, all clients may take part in every round.
        rounds: the budget, as a number of rounds. The server opens no round after them. Default: no limit.
        quantile: adapts C so that this share of the updates is not clipped, in (0, 1) (Andrew et al., NeurIPS 2021,
            1905.03871): C <- C exp(-clip_rate (b - quantile)), b the share of unclipped updates with noise. Default:
            C is fixed.
        clip_rate: the rate of that change, > 0.
        count_noise: the standard deviation of the noise of the number of unclipped updates, at least .6 z. Default:
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

    def __post_init__(self) -> None:
        positive = ("clip", "expected", "clip_rate")
        checked: dict[str, Any] = {name: check_number(name, getattr(self, name), "(0, inf)") for name in positive}
        checked["noise"] = check_number("noise", self.noise, "(0, 1000]")
        checked["rate"] = check_number("rate", self.rate, "(0, 1]")
        if self.rounds is not None:
            checked["rounds"] = check_integer("rounds", self.rounds, 1)
        if self.quantile is not None:
            checked["quantile"] = check_number("quantile", self.quantile, "(0, 1)")
            z = checked["noise"]
            given = max(checked["expected"] / 20, z) if self.count_noise is None else self.count_noise
            checked["count_noise"] = check_number("count_noise", given, f"[{0.6 * z!r}, inf)")
        elif self.count_noise is not None:
            raise RangeError("count_noise: only an adaptive clip counts updates; pass quantile, or leave it out")
        if self.seed is not None:
            checked["seed"] = check_integer("seed", self.seed, 0, 2**64 - 1)
            if self.rounds is not None:
                raise RangeError("seed: reproducible noise protects no one, so it has no budget; leave rounds out")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

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

        Cost: that of ``fedcore.algorithms.privacy.noise_for``, a few seconds.
        """
        noise = noise_for(epsilon, delta, rounds=rounds, rate=rate)
        return cls(clip, noise, expected, rate, rounds, **more)

    def epsilon(self, delta: float) -> float:
        """Return epsilon of the whole budget, ``rounds`` rounds; see ``fedcore.algorithms.privacy.epsilon_of``."""
        if self.rounds is None:
            raise RangeError("rounds=None: without a number of rounds, epsilon has no bound; pass rounds")
        return epsilon_of([(self.rounds, self.rate, self.noise)], delta)

    def decide(self, group: Group) -> None:
        """Clip each update to the norm C."""
        for i, norm in enumerate(group.norms["parameters"]):
            if norm > self.clip:
                group.scale(i, self.clip / norm)

    def at(self, ledger: Ledger) -> "PrivateMean":
        """Return the rule with the C of the next round."""
        return self if ledger.clip is None else replace(self, clip=ledger.clip)

    def require_budget(self, ledger: Ledger) -> None:
        """Raise RoundError if the budget is spent."""
        if self.rounds is not None and ledger.rounds >= self.rounds:
            raise RoundError(
                f"PrivateMean: the budget of {self.rounds} rounds is spent; stop here, or change the rule with more "
                "rounds and report the higher epsilon"
            )

    def add_noise(self, sum: F64, factors: F64, ledger: Ledger, round: int) -> Ledger:
        """Add the noise to the sum of the clipped updates, float64[n], in place; return the ledger after the round.

        Args:
            factors: float64[k], the factors by which ``decide`` scaled the updates.
            ledger: the ledger before the round; this rule is ``at`` it.
            round: the round's number, for ``seed``.

        Raises:
            RangeError: the round has more than 2^19 updates.

        Cost: reads and writes 8 n bytes; about 10 ns an element on one thread.
        """
        if len(factors) > MOST_PRIVATE:
            raise RangeError(f"updates: a private round has at most {MOST_PRIVATE}, got {len(factors)}")
        z = self.noise if self.count_noise is None else (self.noise**-2 - (2 * self.count_noise) ** -2) ** -0.5
        grid = _grid(z * self.clip)
        sensitivity = self.clip * (1 + SLACK) + math.sqrt(len(sum)) * grid
        kernels.add_discrete_gaussian(sum, grid, math.ceil(z * sensitivity / grid), self._key(round, "sum"), out=sum)
        clip = ledger.clip
        if self.quantile is not None and self.count_noise is not None:
            # Of +1/2 or -1/2 for each update, one client changes the sum by 1/2.
            count, grid = np.array([_sum(np.append((factors == 1) - 0.5, 0.0))]), _grid(self.count_noise)
            sigma = math.ceil(self.count_noise / grid)
            kernels.add_discrete_gaussian(count, grid, sigma, self._key(round, "count"), out=count)
            share = float(count[0]) / self.expected + 0.5
            clip = self.clip * math.exp(-self.clip_rate * (share - self.quantile))
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


# Robust rules. They see the vectors of the whole cohort, h_1 ... h_k, in the order of the clients' ids, so the order of
# arrival has no effect. A rule is a weighted sum whose weights follow from the inner products of the h_i, or an order
# statistic of each column.


@dataclass(frozen=True)
class Combination:
    """A cohort's vectors in one: a weighted sum, or a statistic of each column.

    Attributes:
        weights: float64[r], the weights of the sum; None for a statistic.
        trim: the values to leave out at each end of a column.
        nearest: if positive, the number of values nearest the column's median to average, in place of ``trim``.
        chosen: the vectors whose columns count. Default: all.
        mixing: float64[r, k], which makes the r vectors of k updates. Default: the updates themselves.
    """

    weights: F64 | None = None
    trim: int = 0
    nearest: int = 0
    chosen: npt.NDArray[np.int64] | None = None
    mixing: F64 | None = None

    @ieee
    def write(self, bases: Sequence[Any], ys: Sequence[Any], scales: F64, out: F32) -> None:
        """Write the combination of h_i = (bases[i] - ys[i]) scales[i], as for ``kernels.accumulate``.

        Cost: reads all updates once.
        """
        mixing = self.mixing
        if self.weights is not None:
            weights = self.shares(len(ys))
            assert weights is not None
            used = np.flatnonzero(weights)
            bases, ys = _chosen(used, bases, ys)
            kernels.accumulate(None, bases, ys, scales[used], weights[used], out=out)
            return
        if self.chosen is not None and mixing is not None:
            mixing = np.ascontiguousarray(mixing[self.chosen])
        elif self.chosen is not None:
            bases, ys = _chosen(self.chosen, bases, ys)
            scales = scales[self.chosen]
        to = out if out.dtype == np.float32 else empty_beside(out, len(out))
        if self.nearest:
            kernels.mean_near_median(bases, ys, scales, self.nearest, out=to, mixing=mixing)
        else:
            kernels.trimmed_mean(bases, ys, scales, self.trim, out=to, mixing=mixing)
        if to is not out:
            kernels.combine([to], [1.0], out)

    def shares(self, k: int) -> F64 | None:
        """Return the weights of k updates, float64[k]; equal ones for a statistic of some updates, None of all."""
        if self.weights is not None:
            return self.weights if self.mixing is None else _product(self.weights[None], self.mixing)[0]
        if self.chosen is None:
            return None
        mixing = np.eye(k) if self.mixing is None else self.mixing
        used = mixing[self.chosen].any(axis=0)
        return np.asarray(used / np.count_nonzero(used))


def _chosen(at: npt.NDArray[np.int64], *columns: Sequence[Any]) -> list[list[Any]]:
    return [[column[i] for i in at] for column in columns]


class RobustRule(Rule):
    """The last rule of a chain in place of ``Mean``: it combines the whole cohort, of which f clients may lie.

    Numbers of examples and weights have no effect: each client counts once. The server holds the round's updates until
    ``finish``: k n bytes times the size of their dtype.

    Attributes:
        needs_previous: whether the result of the last round, or zero, is the last vector of ``combine``.
        needs_base: whether the result depends on the model before the round, from which the updates are differences.
    """

    needs_previous: ClassVar[bool] = False
    needs_base: ClassVar[bool] = False

    def decide(self, group: Group) -> None:
        """Do nothing."""

    @property
    def least(self) -> int:
        """The least number of updates, or of mixed vectors, that the rule can combine."""
        return 1

    @abstractmethod
    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """Return the combination of k vectors; ``products()`` returns their inner products, float64[k, k].

        With ``needs_previous``, k counts the previous result, which is the last vector.
        """


@dataclass(frozen=True)
class ByzantineRule(RobustRule):
    """A robust rule that tolerates ``f`` dishonest clients of a cohort."""

    f: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "f", check_integer("f", self.f, 0, 2**31))

    @property
    def least(self) -> int:
        """2 f + 1."""
        return 2 * self.f + 1


# Order statistics of each column.


@dataclass(frozen=True)
class Median(RobustRule):
    """The median of each coordinate; for even k, the mean of the two middle values (Yin et al., ICML 2018).

    It tolerates fewer than half of the clients.
    """

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """All but the middle is trimmed."""
        return Combination(trim=(k - 1) // 2)


@dataclass(frozen=True)
class TrimmedMean(ByzantineRule):
    """The mean of each coordinate without its f smallest and its f largest values (Yin et al., ICML 2018)."""

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """f are trimmed at each end."""
        return Combination(trim=self.f)


@dataclass(frozen=True)
class MeaMed(ByzantineRule):
    """The mean of the k - f values of each coordinate that are nearest its median (Xie et al., 2018, 1802.10116)."""

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """The k - f nearest."""
        return Combination(nearest=k - self.f)


# Choices by distances.


@dataclass(frozen=True)
class Krum(ByzantineRule):
    """The update with the least score, the sum of its k - f - 2 smallest |h_i - h_j|^2 (Blanchard et al., NIPS 2017).

    Of equal scores, the first client's by id wins. A round needs 2 f + 3 updates.
    """

    @property
    def least(self) -> int:
        """2 f + 3."""
        return 2 * self.f + 3

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """The mean of the best one."""
        return _mean_of(self._ranked(k, products)[:1], k)

    def _ranked(self, k: int, products: Callable[[], F64]) -> npt.NDArray[np.int64]:
        """Return the vectors by their scores."""
        return np.argsort(_scores(squared_distances(products()), self.f), kind="stable")


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the ``m`` updates with the least scores of ``Krum`` (Blanchard et al., NIPS 2017).

    Args:
        m: the number of updates, at least 1. Default: k - f. It is at most k - f.
    """

    m: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m is not None:
            object.__setattr__(self, "m", check_integer("m", self.m, 1))

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """The mean of the m best."""
        return _mean_of(self._ranked(k, products)[: min(self.m or k, k - self.f)], k)


@dataclass(frozen=True)
class Bulyan(ByzantineRule):
    """k - 2 f updates by repeated ``Krum``, then the mean of the k - 4 f values of each coordinate nearest the median.

    Each repetition removes the winner; scores then sum over as many neighbors less, but at least one. A round needs
    4 f + 3 updates. Source: El Mhamdi, Guerraoui, Rouault, ICML 2018.
    """

    @property
    def least(self) -> int:
        """4 f + 3."""
        return 4 * self.f + 3

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """The k - 4 f nearest of the chosen."""
        distances, left = squared_distances(products()), np.arange(k)
        chosen = []
        for _ in range(k - 2 * self.f):
            best = int(np.argmin(_scores(distances[np.ix_(left, left)], self.f)))
            chosen.append(left[best])
            left = np.delete(left, best)
        return Combination(nearest=k - 4 * self.f, chosen=np.sort(chosen))


# Weights by distances from a center.


@dataclass(frozen=True)
class GeometricMedian(RobustRule):
    """The point z with the least sum of |h_i - z|, by the smoothed Weiszfeld algorithm (RFA, Pillutla et al., 2022).

    It starts from the mean; a pass is z <- sum w_i h_i / sum w_i with w_i = 1 / max(nu m, |h_i - z|), m the median of
    the distances. It tolerates fewer than half of the clients. A pass divides the error from a far outlier by about
    k - 1, and from f of them by (k - f) / f. The passes use inner products only, so they cost k^2 operations each.

    Args:
        passes: the number of passes, at least 1.
        nu: the smallest distance, as a share of the median distance, in (0, 1].
    """

    passes: int = 100
    nu: float = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", check_integer("passes", self.passes, 1, 10**6))
        object.__setattr__(self, "nu", check_number("nu", self.nu, "(0, 1]"))

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """The passes over the weights."""
        G, weights = products(), np.full(k, 1 / k)
        for _ in range(self.passes):
            distances = _distances(G, weights)
            floor = self.nu * median(distances)
            inverse = 1 / np.maximum(distances, floor) if floor > 0 else (distances == 0).astype(np.float64)
            weights = inverse / _sum(inverse)
        return Combination(weights)


@dataclass(frozen=True)
class CentredClipping(RobustRule):
    """z <- z + (1/k) sum of clip(h_i - z, tau), from the last round's z (Karimireddy, He, Jaggi, ICML 2021).

    The first round starts from zero, that is, from the server's model. The server stores z: 4 n bytes.

    Args:
        tau: the greatest length of h_i - z, > 0, in the unit of h.
        passes: the number of passes, at least 1.
    """

    tau: float
    passes: int = 1
    needs_previous: ClassVar[bool] = True
    needs_base: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", check_number("tau", self.tau, "(0, inf)"))
        object.__setattr__(self, "passes", check_integer("passes", self.passes, 1, 10**6))

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """The passes over the weights; the last vector is z of the last round."""
        G, weights = products(), np.eye(k)[-1]
        for _ in range(self.passes):
            shares = _clipping(_distances(G, weights)[:-1], self.tau) / (k - 1)
            weights = (1 - _sum(shares)) * weights
            weights[:-1] += shares
        return Combination(weights)


@dataclass(frozen=True)
class ClipNorm(RobustRule):
    """The mean of the h_i, each clipped to a norm.

    In contrast to ``ClipToMedian``, the median is that of this round's cohort.

    Args:
        most: the greatest norm, > 0, in the unit of h; or "median" for the lower median of the cohort's norms.
    """

    most: float | str = "median"
    needs_base: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.most != "median":
            object.__setattr__(self, "most", check_number("most", self.most, "(0, inf)"))

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """Clipped weights."""
        norms = np.sqrt(np.diag(products()))
        most = median(norms) if isinstance(self.most, str) else self.most
        return Combination(_clipping(norms, most) / k)


# Mixing before a robust rule.


class MixingRule(Rule):
    """A rule that replaces the cohort's vectors by means of some of them, before a robust rule."""

    def decide(self, group: Group) -> None:
        """Do nothing."""

    def size(self, k: int) -> int:
        """Return the number of new vectors that k vectors make."""
        return k

    @abstractmethod
    def matrix(self, k: int, products: Callable[[], F64], round: int) -> F64:
        """Return the weights of k vectors in each new vector, float64[r, k]."""


@dataclass(frozen=True)
class NearestNeighborMixing(MixingRule):
    """Replace each h_i by the mean of the k - f vectors nearest to it, itself included (NNM, Allouah et al., 2023).

    Source: Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS 2023. Of equally near
    vectors, the first clients' by id count.
    """

    f: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "f", check_integer("f", self.f, 0, 2**31))

    def size(self, k: int) -> int:
        """k, more than f."""
        if k <= self.f:
            raise RangeError(f"f={self.f}: NearestNeighborMixing needs more than f updates, got {k}; add updates")
        return k

    def matrix(self, k: int, products: Callable[[], F64], round: int) -> F64:
        """Rows with k - f equal weights."""
        nearest = np.argsort(squared_distances(products()), axis=1, kind="stable")[:, : k - self.f]
        weights = np.zeros((k, k))
        np.put_along_axis(weights, nearest, 1 / (k - self.f), axis=1)
        return weights


@dataclass(frozen=True)
class Bucketing(MixingRule):
    """Replace the vectors by the means of random buckets of ``s`` (Karimireddy, He, Jaggi, ICLR 2022).

    A dishonest client affects one bucket, so the rule after it keeps its f.

    Args:
        s: the number of vectors in a bucket, at least 1; the last bucket may be smaller.
        seed: the buckets are a function of the seed, the round and the cohort.
    """

    s: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "s", check_integer("s", self.s, 1, 2**31))
        object.__setattr__(self, "seed", check_integer("seed", self.seed, 0, 2**63 - 1))

    def size(self, k: int) -> int:
        """The number of buckets."""
        return -(-k // self.s)

    def matrix(self, k: int, products: Callable[[], F64], round: int) -> F64:
        """A row for each bucket."""
        order, weights = permutation(k, seed=self.seed, round=round, purpose="buckets"), np.zeros((self.size(k), k))
        for bucket, row in enumerate(weights):
            members = order[bucket * self.s : (bucket + 1) * self.s]
            row[members] = 1 / len(members)
        return weights


# Sums over a cohort are sequential, so that they have the same bits on every processor.


def _sum(values: F64) -> float:
    return float(np.cumsum(values)[-1])


def _product(a: F64, b: F64) -> F64:
    """Return the matrix product a b."""
    return np.array([np.cumsum(row[:, None] * b, axis=0)[-1] for row in a])


def squared_distances(products: F64) -> F64:
    """Return |h_i - h_j|^2 of vectors with these inner products, float64[k, k]; zero for equal vectors."""
    squares = np.diag(products)
    distances: F64 = np.maximum(squares[:, None] + squares[None] - 2 * products, 0.0)
    return distances


def _distances(products: F64, weights: F64) -> F64:
    """Return |h_i - sum_j weights[j] h_j| of each vector."""
    to_center = _product(products, weights[:, None])[:, 0]
    squares = np.diag(products) - 2 * to_center + _sum(weights * to_center)
    distances: F64 = np.sqrt(np.maximum(squares, 0.0))
    return distances


def _scores(distances: F64, f: int) -> F64:
    """Return Krum's scores."""
    k = len(distances)
    others = np.sort(distances + np.diag(np.full(k, np.inf)), axis=1)
    scores: F64 = np.cumsum(others, axis=1)[:, max(k - f - 2, 1) - 1] if k > 1 else np.zeros(k)
    return scores


def _mean_of(chosen: npt.NDArray[np.int64], k: int) -> Combination:
    weights = np.zeros(k)
    weights[chosen] = 1 / len(chosen)
    return Combination(weights)


def _clipping(norms: F64, most: float) -> F64:
    """Return the factors that clip vectors with these norms."""
    return most / np.maximum(norms, most) if most > 0 else (norms == 0).astype(np.float64)


OPEN = (CountOnce(), CapSteps(2.0), CapExamples(1.0), ClipToMedian(), Mean())
"""The chain "open", for a federation that anyone can join."""
NAMED: dict[str, tuple[Rule, ...]] = {"mean": (Mean(),), "open": OPEN, "median": (Median(),)}
"""The chains that have a name."""

_RULES: tuple[type[Rule], ...] = (
    *(CapExamples, CapSteps, ClipToMedian, CountOnce, Mean, RejectLong),
    *(Median, TrimmedMean, MeaMed, Krum, MultiKrum, Bulyan, GeometricMedian, CentredClipping, ClipNorm),
    *(NearestNeighborMixing, Bucketing, PrivateMean),
)


def decide(rule: Rule, group: Group) -> None:
    """Let a rule decide; raise AlgorithmError if a user's rule fails or leaves invalid numbers in the group."""
    if type(rule) in _RULES:
        rule.decide(group)
        return
    try:
        rule.decide(group)
    except Exception as error:
        failed(rule, "decide", error)
    k = len(group)
    for name, interval in (("factors", "[0, 1]"), ("examples", "[0, inf)")):
        column = getattr(group, name)
        is_column = isinstance(column, np.ndarray) and column.dtype == np.float64 and column.shape == (k,)
        if not is_column or not all(in_interval(value, interval) for value in column.tolist()):
            must = f"must be float64[{k}], each {describe_interval(interval)}"
            raise AlgorithmError(f"{name_of(rule)}: after decide, {name} {must}, got {short_repr(column)}")
    for i, reason in group.rejected.items():
        if not is_integer(i, 0, k - 1) or not isinstance(reason, str):
            raise AlgorithmError(
                f"{name_of(rule)}: reject({short_repr(i)}, {short_repr(reason)}): must have an index of one of the "
                f"{k} updates and a reason"
            )


def _checked(rule: RobustRule, k: int, found: Combination) -> Combination:
    """Return what a user's robust rule makes of k vectors; raise AlgorithmError if it is no combination of them."""
    must = None
    if not isinstance(found, Combination):
        must = "a Combination"
    elif found.weights is not None and not _is_column(found.weights, np.float64, k):
        must = f"weights float64[{k}] of finite numbers"
    elif found.mixing is not None:
        must = "no mixing"
    elif found.weights is None:
        chosen = np.arange(k) if found.chosen is None else found.chosen
        r = len(chosen) if isinstance(chosen, np.ndarray) else 0
        if not r or not _is_column(chosen, np.int64, r) or not 0 <= chosen.min() <= chosen.max() < k:
            must = f"chosen int64[r] of numbers in 0..{k - 1}, r >= 1"
        elif not (is_integer(found.trim, 0, (r - 1) // 2) and is_integer(found.nearest, 0, r)):
            must = f"trim in 0..{(r - 1) // 2} and nearest in 0..{r}"
    if must:
        raise AlgorithmError(f"{name_of(rule)}: combine must return {must}, got {short_repr(found)}")
    return found


def _number_of(rule: Rule, name: str, read: Callable[[], int]) -> int:
    """Return a number of vectors of a rule; raise AlgorithmError if a user's rule fails or returns no such number."""
    try:
        number = read()
    except Exception as error:
        failed(rule, name, error)
    if not is_integer(number, 0):
        raise AlgorithmError(f"{name_of(rule)}: {name} must be an integer >= 0, got {short_repr(number)}")
    return number


def _is_column(column: Any, dtype: Any, *shape: int) -> bool:
    """Whether an object is an array of finite numbers of this dtype and shape."""
    is_array = isinstance(column, np.ndarray) and column.dtype == dtype and column.shape == shape
    return is_array and bool(np.isfinite(column).all())


REGISTRY: Registry[type[Rule]] = Registry(
    "rule",
    {rule.__name__: rule for rule in _RULES},
    expected="a subclass of fedcore.rules.Rule",
    fits=lambda row: isclass(row) and issubclass(row, Rule) and row is not Rule,
    group="fedcore.rules",
)

LAST = (Mean, RobustRule, PrivateMean)
"""The rules that combine the updates."""

R = TypeVar("R", bound=Rule)


def spelled(name: str) -> str:
    """Return the name of a rule's class in ``REGISTRY`` for another spelling, such as "trimmed-mean" and "krum".

    >>> spelled("trimmed-mean"), spelled("Unknown")
    ('TrimmedMean', 'Unknown')
    """
    plain = name.replace("-", "").replace("_", "").lower()
    return next((known for known in REGISTRY if known.lower() == plain), name)


@dataclass(frozen=True)
class Chain:
    """The rules of a server, in order; the last rule is a ``Mean``, a ``RobustRule`` or a ``PrivateMean``."""

    rules: tuple[Rule, ...] = (Mean(),)

    @classmethod
    def of(cls, aggregation: "str | Rule | Sequence[Rule | str] | Chain | None") -> "Chain":
        """Return the chain of ``Server``'s argument ``aggregation``; a missing ``Mean`` is added."""
        if isinstance(aggregation, Chain):
            return aggregation
        if aggregation is None:
            return PLAIN
        if isinstance(aggregation, str) and aggregation in NAMED:
            return cls(NAMED[aggregation])
        if isinstance(aggregation, str) and ":" not in aggregation and spelled(aggregation) not in REGISTRY:
            raise UnknownNameError.of("aggregation", aggregation, (*NAMED, *REGISTRY))
        entries = [aggregation] if isinstance(aggregation, str | Rule) else list(aggregation)
        rules = [REGISTRY.find(spelled(entry))() if isinstance(entry, str) else entry for entry in entries]
        for rule in rules:
            if not isinstance(rule, Rule):
                raise UnknownNameError.of("aggregation", rule, (*NAMED, *REGISTRY))
        if not rules or not isinstance(rules[-1], LAST):
            rules.append(Mean())
        kinds = [type(rule) for rule in rules]
        if len(set(kinds)) < len(kinds):
            raise RangeError("aggregation: a rule occurs twice; pass each rule once")
        if isinstance(rules[-1], PrivateMean) and len(rules) > 1:
            raise RangeError(
                f"aggregation: PrivateMean is the only rule of its chain, but {type(rules[0]).__name__} is before it; "
                "a rule that compares clients would let one client change how much another one counts"
            )
        for rule in rules[:-1]:
            if isinstance(rule, LAST):
                raise RangeError(f"aggregation: {type(rule).__name__} must be the last rule of the chain")
            if isinstance(rule, MixingRule) and not isinstance(rules[-1], RobustRule):
                raise RangeError(f"aggregation: {type(rule).__name__} needs a robust rule at the end, such as Median()")
        return cls(tuple(rules))

    @classmethod
    def of_models(cls, rule: "str | Rule | Sequence[Rule | str] | Chain", *, has_base: bool) -> "Chain":
        """Return the chain that combines models without a server; ``has_base``: whether the model before is known.

        Raises:
            UnknownNameError: the name is unknown.
            RangeError: the chain has a rule that acts on single updates or needs more than the models.
        """
        chain = cls.of(rule)
        if chain.robust is None:
            raise RangeError(f"rule={rule!r}: must be a robust rule, such as 'median'; leave it out for the mean")
        for one in chain.rules[:-1]:
            if not isinstance(one, MixingRule):
                raise RangeError(
                    f"rule: {type(one).__name__} acts on the updates of a server; use Server(aggregation=)"
                )
        if chain.robust.needs_previous:
            raise RangeError(f"rule: {chain.robust} starts from the round before; use Server(aggregation=)")
        if chain.robust.needs_base and not has_base:
            raise RangeError(f"rule: {chain.robust} needs the model before the round; pass it as base to fedcore.merge")
        return chain

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def find(self, kind: type[R]) -> R | None:
        """Return the rule of that class, or None."""
        return next((rule for rule in self.rules if isinstance(rule, kind)), None)

    @cached_property
    def weights(self) -> Weights | None:
        """The weights of the ``Mean``."""
        return None if (mean := self.find(Mean)) is None else mean.weights

    def with_weights(self, weights: Weights | None) -> "Chain":
        """Return the chain with different weights of the ``Mean``."""
        return Chain((*self.rules[:-1], Mean(weights)))

    @cached_property
    def robust(self) -> RobustRule | None:
        """The last rule if it is robust, else None."""
        return rule if isinstance(rule := self.rules[-1], RobustRule) else None

    @cached_property
    def private(self) -> PrivateMean | None:
        """The last rule if it adds noise, else None."""
        return rule if isinstance(rule := self.rules[-1], PrivateMean) else None

    @cached_property
    def counts_clients(self) -> bool:
        """Whether each client counts once, whatever its number of examples."""
        return self.robust is not None or self.private is not None

    def at(self, ledger: Ledger) -> "Chain":
        """Return the chain for the next round of a private server, and itself for other servers."""
        return self if self.private is None else Chain((self.private.at(ledger),))

    def require_enough(self, k: int) -> None:
        """Raise RangeError if the robust rule needs more than k updates."""
        rule, left = self.robust, k
        assert rule is not None
        for one in self._mixing:
            left = _number_of(one, "size", partial(one.size, left))
        if left < (least := _number_of(rule, "least", lambda: rule.least)):
            unit = "updates" if left == k else f"mixed vectors of {k} updates"
            raise RangeError(
                f"aggregation: {rule} needs at least {least} updates, got {left} {unit}; add updates, or lower f"
            )

    @cached_property
    def _mixing(self) -> list[MixingRule]:
        return [rule for rule in self.rules if isinstance(rule, MixingRule)]

    def combination(self, k: int, products: Callable[[], F64], round: int) -> Combination:
        """Return the robust combination of k updates in a round.

        Args:
            products: returns the updates' inner products, float64[k, k], in the order of the clients' ids; if the rule
                ``needs_previous``, the last one is its previous result, which is not among the k.

        Raises:
            RangeError: the rule needs more updates.

        Cost: k^2 to k^3 operations, and one call of ``products`` at most.
        """
        self.require_enough(k)
        rule, matrix, products, mixing = self.robust, np.eye(k), cache(products), self._mixing
        assert rule is not None

        def mixed(matrix: F64) -> F64:
            """Return the inner products of the vectors that the matrix makes."""
            inner = products()[: matrix.shape[1], : matrix.shape[1]]
            return _product(_product(matrix, inner), matrix.T) if mixing else inner

        for one in mixing:
            k = len(matrix)
            try:
                mixes = one.matrix(k, partial(mixed, matrix), round)
            except Exception as error:
                failed(one, "matrix", error)
            if not _is_column(mixes, np.float64, one.size(k), k):
                must = f"float64[{one.size(k)}, {k}] of finite numbers"
                raise AlgorithmError(f"{name_of(one)}: matrix must return {must}, got {short_repr(mixes)}")
            matrix = _product(mixes, matrix)
        if rule.needs_previous:
            updates, matrix = matrix, np.zeros((len(matrix) + 1, k + 1))
            matrix[:-1, :-1], matrix[-1, -1] = updates, 1
        try:
            combination = rule.combine(len(matrix), partial(mixed, matrix))
        except Exception as error:
            failed(rule, "combine", error)
        if type(rule) not in _RULES:
            combination = _checked(rule, len(matrix), combination)
        return replace(combination, mixing=matrix) if mixing else combination

    @cached_property
    def needs_medians(self) -> bool:
        """Whether a rule compares norms with medians."""
        return any(rule.needs_medians for rule in self.rules)

    @cached_property
    def decides_last(self) -> bool:
        """Whether the rules decide at the end of the round, in the order of the clients' ids."""
        return self.needs_medians and self.robust is not None

    @cached_property
    def deciding(self) -> tuple[Rule, ...]:
        """The rules that decide on single updates."""
        idle = CapSteps | CountOnce | MixingRule | Mean | RobustRule
        return tuple(rule for rule in self.rules if not isinstance(rule, idle))

    @cached_property
    def is_plain(self) -> bool:
        """Whether the chain is the plain mean, in which every valid update counts unchanged."""
        return len(self.rules) == 1 and not self.counts_clients and self.weights is None

    @cached_property
    def examples_ratio(self) -> float | None:
        """The ratio of ``CapExamples``."""
        return None if (rule := self.find(CapExamples)) is None else rule.ratio

    @cached_property
    def steps_ratio(self) -> float | None:
        """The ratio of ``CapSteps``."""
        return None if (rule := self.find(CapSteps)) is None else rule.ratio


PLAIN = Chain()

PARTS = {
    "parameters": "update: its norm",
    "buffers": "update: the norm of its float buffers",
    "controls": "control: its norm",
}


def as_float32(number: float) -> float:
    """Return a number rounded to float32, in which norms are compared; infinite beyond its range."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


# Windows of accepted updates, and their medians.


class NormWindow:
    """The norms > 0 of the last ``WINDOW`` accepted updates, the oldest first, and their median.

    Cost: a few microseconds per norm, independent of the number of norms.
    """

    def __init__(self, norms: Iterable[float] = ()) -> None:
        self._norms = deque(norms, WINDOW)
        self._sorted = sorted(self._norms)

    def __len__(self) -> int:
        return len(self._norms)

    def add(self, norm: float) -> None:
        """Add a norm; a full window drops its oldest norm."""
        if norm <= 0:
            return
        if len(self._norms) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._norms[0])]
        self._norms.append(norm)
        insort(self._sorted, norm)

    def median(self, beside: Sequence[float] = ()) -> float | None:
        """Return the lower median of the stored and further norms; None if more than half of the first norms are zeros.

        With the upper median, the longer one of two updates would set its own limit.
        """
        norms = self._sorted
        if beside:
            own = [norm for norm in beside if norm > 0]
            norms = sorted([*self._sorted, *own]) if 2 * len(own) >= len(beside) or self._norms else []
        return norms[(len(norms) - 1) // 2] if norms else None

    def copied(self) -> "NormWindow":
        """Return a window with the same norms."""
        return NormWindow(self._norms)

    def is_equal(self, other: "NormWindow") -> bool:
        """Whether another window has the same norms in the same order."""
        return self._norms == other._norms

    def packed(self) -> F32:
        """Return the norms as float32[WINDOW], with NaN after the last: a folder has a file for each vector size."""
        vector = np.full(WINDOW, np.nan, np.float32)
        vector[: len(self._norms)] = self._norms
        return vector

    @classmethod
    def unpacked(cls, vector: F32) -> "NormWindow":
        """Return the window that ``packed`` described."""
        return cls(vector[~np.isnan(vector)].tolist())


_NONE = np.full(WINDOW, np.nan)
_NONE.flags.writeable = False


class ClaimWindow:
    """The last ``WINDOW`` accepted claims of examples or steps, in order.

    Args:
        ratio: the greatest multiple of the median that a claim counts. Default: no limit.
        packed: float64[WINDOW], ``packed`` after the last round. Default: no claims.

    Cost: some microseconds per call, independent of the number of claims.
    """

    def __init__(self, ratio: float | None, packed: F64 | None = None) -> None:
        self.ratio = ratio
        self.packed = _NONE if packed is None else packed
        """The claims, with NaN after the last. The array never changes in place."""
        self._count = 0 if packed is None else WINDOW - int(np.isnan(packed).sum())
        self._range = core.column_range(self.packed[: self._count])
        self._limit = math.inf if ratio is None else ratio

    def __len__(self) -> int:
        return self._count

    def agree(self, claims: F64) -> bool:
        """Whether no claim can exceed the ratio times a median of these and the stored claims, whatever claims follow.

        A single first claim does not agree.
        """
        least, most = core.column_range(claims)
        return len(claims) + self._count > 1 and most <= self._limit * min(least, self._range[0])

    def most(self, beside: F64, ratio: float | None = None) -> float:
        """Return the ratio times the median of the stored and further claims."""
        claims = np.concatenate([self.packed[: self._count], beside])
        return (self._limit if ratio is None else ratio) * median(claims) if len(claims) else math.inf

    def add(self, claims: F64) -> None:
        """Add claims > 0; a full window drops its oldest claims. A weight of the caller may be zero."""
        if len(claims) and not core.column_range(claims)[0] > 0:
            claims = claims[claims > 0]
        if not len(claims):
            return
        if self._count == WINDOW and self._range[0] == self._range[1] and core.column_range(claims) == self._range:
            return
        kept = self.packed[max(0, self._count + len(claims) - WINDOW) : self._count]
        count = min(WINDOW, len(kept) + len(claims))
        packed = _NONE.copy()
        packed[: len(kept)], packed[len(kept) : count] = kept, claims[-WINDOW:]
        self.packed = packed
        self._count, self._range = count, core.column_range(packed[:count])


def median(claims: F64) -> float:
    """Return the lower median of claims."""
    at = (len(claims) - 1) // 2
    return float(np.partition(claims, at)[at])


class ClaimWindows:
    """The windows of claims, rebuilt from a snapshot's vectors only if those changed."""

    def __init__(self) -> None:
        self._windows: dict[str, ClaimWindow] = {}

    def of(self, what: str, ratio: float | None, packed: Mapping[str, npt.NDArray[Any]]) -> ClaimWindow:
        """Return the window of one kind of claims, as of the snapshot with the vectors ``packed``."""
        window, last = self._windows.get(what), packed.get(what, _NONE)
        # An aborted round may have added claims, and a changed chain may have a different ratio.
        if window is None or window.packed is not last or window.ratio != ratio:
            window = self._windows[what] = ClaimWindow(ratio, last)
        return window
