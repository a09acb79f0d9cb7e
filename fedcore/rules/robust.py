"""Robust rules.

They see the vectors of the whole cohort, h_1 ... h_k, in the order of the clients' ids, so the order of arrival has no
effect; those of a buffer in the order of arrival. A rule is a weighted sum whose weights follow from the inner products
of the h_i, or an order statistic of each column.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.arrays import F32, F64, empty_beside, ieee
from fedcore.errors import TooFewUpdatesError
from fedcore.rules.base import Combine, Rule, is_column
from fedcore.rules.windows import median
from fedcore.sampling import permutation
from fedcore.validation import is_integer


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
            weights: Any = self.shares(len(ys))
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
            return self.weights if self.mixing is None else product(self.weights[None], self.mixing)[0]
        if self.chosen is None:
            return None
        mixing = np.eye(k) if self.mixing is None else self.mixing
        used = mixing[self.chosen].any(axis=0)
        return np.asarray(used / np.count_nonzero(used))


def _chosen(at: npt.NDArray[np.int64], *columns: Sequence[Any]) -> list[list[Any]]:
    return [[column[i] for i in at] for column in columns]


class RobustRule(Combine, ABC):
    """The last rule of a chain in place of ``Mean``: it combines the whole cohort, of which f clients may lie.

    Numbers of examples and weights have no effect: each update counts once. The server holds the round's updates until
    ``finish``: k n bytes times the size of their dtype.

    It may need "previous", the result of the last round, or zero, and "base", the model before the round, from which
    the updates are differences.
    """

    @property
    def least(self) -> int:
        """The least number of updates, or of mixed vectors, that the rule can combine."""
        return 1

    @abstractmethod
    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """Return the combination of k vectors; ``products()`` returns their inner products, float64[k, k].

        For a rule that needs "previous", k counts the previous result, which is the last vector.
        """


@dataclass(frozen=True)
class ByzantineRule(RobustRule):
    """A robust rule that tolerates ``f`` dishonest clients of a cohort."""

    f: int = 1

    _intervals = (("f", (0, 2**31)),)
    _least = 2, 1
    """a and b, if the rule needs a f + b updates."""

    @property
    def least(self) -> int:
        """2 f + 1 unless the rule says otherwise."""
        return self._least[0] * self.f + self._least[1]


# Order statistics of each column.


@dataclass(frozen=True)
class Median(RobustRule):
    """The median of each coordinate; for even k, the mean of the two middle values (Yin et al., ICML 2018).

    It tolerates fewer than half of the clients.
    """

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """All but the middle is trimmed."""
        return Combination(trim=(k - 1) // 2)


class TrimmedMean(ByzantineRule):
    """The mean of each coordinate without its f smallest and its f largest values (Yin et al., ICML 2018)."""

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """f are trimmed at each end."""
        return Combination(trim=self.f)


class MeaMed(ByzantineRule):
    """The mean of the k - f values of each coordinate that are nearest its median (Xie et al., 2018, 1802.10116)."""

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """The k - f nearest."""
        return Combination(nearest=k - self.f)


# Choices by distances.


class Krum(ByzantineRule):
    """The update with the least score, the sum of its k - f - 2 smallest |h_i - h_j|^2 (Blanchard et al., NIPS 2017).

    Of equal scores, the first client's by id wins; in a buffer the first to arrive. A round needs 2 f + 3 updates.
    """

    _least = 2, 3

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

    _intervals = (("m", (1, None), None),)  # type: ignore[assignment]

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """The mean of the m best."""
        return _mean_of(self._ranked(k, products)[: min(self.m or k, k - self.f)], k)


class Bulyan(ByzantineRule):
    """k - 2 f updates by repeated ``Krum``, then the mean of the k - 4 f values of each coordinate nearest the median.

    Each repetition removes the winner; scores then sum over as many neighbors less, but at least one. A round needs
    4 f + 3 updates. Source: El Mhamdi, Guerraoui, Rouault, ICML 2018.
    """

    _least = 4, 3

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

    _intervals = (("passes", (1, 10**6)), ("nu", "(0, 1]"))

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
    needs = frozenset({"previous", "base"})

    _intervals = (("tau", "(0, inf)"), ("passes", (1, 10**6)))

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
    needs = frozenset({"base"})

    _intervals = (("most", "(0, inf)", "median"),)

    def combine(self, k: int, products: Callable[[], F64]) -> Combination:
        """Clipped weights."""
        norms = np.sqrt(np.diag(products()))
        most = median(norms) if isinstance(self.most, str) else self.most
        return Combination(_clipping(norms, most) / k)


# Mixing before a robust rule.


class MixingRule(Rule, ABC):
    """A rule that replaces the cohort's vectors by means of some of them, before a robust rule."""

    def size(self, k: int) -> int:
        """Return the number of new vectors that k vectors make; raise TooFewUpdatesError if k are too few."""
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

    _intervals = (("f", (0, 2**31)),)

    def size(self, k: int) -> int:
        """k, more than f."""
        if k <= self.f:
            raise TooFewUpdatesError(f"f={self.f}: NearestNeighborMixing needs more than f updates, got {k}; add more")
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

    _intervals = (("s", (1, 2**31)), ("seed", (0, 2**63 - 1)))

    def size(self, k: int) -> int:
        """The number of buckets."""
        return -(-k // self.s)

    def matrix(self, k: int, products: Callable[[], F64], round: int) -> F64:
        """A row for each bucket."""
        order = permutation(k, seed=self.seed, round=round, purpose="buckets")
        bucket, weights = np.arange(k) // self.s, np.zeros((self.size(k), k))
        weights[bucket, order] = 1 / np.bincount(bucket)[bucket]
        return weights


# Sums over a cohort are sequential, so that they have the same bits on every processor.


def _sum(values: F64) -> float:
    return float(np.cumsum(values)[-1])


def product(a: F64, b: F64) -> F64:
    """Return the matrix product a b."""
    return np.array([np.cumsum(row[:, None] * b, axis=0)[-1] for row in a])


def squared_distances(products: F64) -> F64:
    """Return |h_i - h_j|^2 of vectors with these inner products, float64[k, k]; zero for equal vectors."""
    squares = np.diag(products)
    return np.asarray(np.maximum(squares[:, None] + squares[None] - 2 * products, 0.0))


def _distances(products: F64, weights: F64) -> F64:
    """Return |h_i - sum_j weights[j] h_j| of each vector."""
    to_center = product(products, weights[:, None])[:, 0]
    squares = np.diag(products) - 2 * to_center + _sum(weights * to_center)
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


def _scores(distances: F64, f: int) -> F64:
    """Return Krum's scores."""
    k = len(distances)
    others = np.sort(distances + np.diag(np.full(k, np.inf)), axis=1)
    return np.asarray(np.cumsum(others, axis=1)[:, max(k - f - 2, 1) - 1] if k > 1 else np.zeros(k))


def _mean_of(chosen: npt.NDArray[np.int64], k: int) -> Combination:
    return Combination(np.isin(np.arange(k), chosen) / len(chosen))


def _clipping(norms: F64, most: float) -> F64:
    """Return the factors that clip vectors with these norms."""
    return most / np.maximum(norms, most) if most > 0 else (norms == 0).astype(np.float64)


def is_combination(found: Any, k: int, products: Any) -> bool:
    """Whether an object is a combination of k vectors."""
    if not isinstance(found, Combination) or found.mixing is not None:
        return False
    if found.weights is not None:
        return is_column(found.weights, np.float64, (k,))
    chosen = np.arange(k) if found.chosen is None else found.chosen
    r = len(chosen) if isinstance(chosen, np.ndarray) else 0
    are_some = r > 0 and is_column(chosen, np.int64, (r,)) and 0 <= chosen.min() <= chosen.max() < k
    return are_some and is_integer(found.trim, 0, (r - 1) // 2) and is_integer(found.nearest, 0, r)
