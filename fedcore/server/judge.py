"""The judge of which replies that a fold has measured may be part of the sums, and with how many examples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.aggregation import Lengths
from fedcore.native import core
from fedcore.server.claim_window import ClaimWindow
from fedcore.server.limits import Limits
from fedcore.server.norm_window import NormWindow
from fedcore.typing import F64

Vector = npt.NDArray[np.floating[Any]]
Mask = npt.NDArray[np.bool_]
Columns = Mapping[str, list[float]]
"""Norms by the sum that they go into: ``Lengths``'s names."""

FEW = 8
"""Replies that a median is taken of at least, as soon as there are so many."""

NOT_FINITE = "update: expected finite numbers, got a NaN, an infinity, or an update past float32's range"


@dataclass(slots=True)
class Verdict:
    """The verdict on k replies."""

    accepted: Mask
    """bool[k], those that count."""
    undecided: Mask
    """bool[k], those that are to be judged with the next: always the last ones that were not refused."""
    examples: F64
    """float64[k], how many examples each counts with."""
    factors: F64
    """float64[k], what each is multiplied by: 1, or less to clip it."""
    refused: dict[int, str] = field(default_factory=dict)
    """The reasons of those that do not count."""

    def refuse(self, i: int, reason: str) -> None:
        """Leave a reply out; the first reason is the one that is told."""
        self.accepted[i] = False
        self.refused.setdefault(i, reason)


class Judge:
    """Refuses what is not finite, what a sum cannot hold, and what is longer than the limits allow.

    Replies are judged in their order, each by those before it, so that it makes no difference how many come at once.
    With ``norm_ratio`` a reply may be so many times as long as the median of the norms that counted before it. While
    fewer than ``FEW`` ever did, replies wait until there are so many, or the round ends, and are judged by the median
    of all of them: else the first reply of all would be believed whatever it is, and the others be refused.

    ``limits.clips`` scales a reply down, as a whole, until none of its norms is past the median of those. The
    window keeps its norm before clipping: else the median could only fall.

    Where weights follow claims of examples, a claim counts up to ``examples_ratio`` times the median of those before it
    (``ClaimWindow``). While fewer than ``FEW`` are known, replies wait in the same way, but only from the first that
    differs by more from one heard, or while there is one alone.

    Each sum has norms, and a median, of its own. Buffers have no limit in numbers: their unit is not that of the rest.
    Norms are compared as they are remembered, in float32.

    Args:
        limits: the server's.
        unit: what |h_i| is, in a formula, for messages.
        heard: what ``heard`` was when the last round was finished.
        examples: what clients claimed lately, where weights follow their claims, which nobody here knows better.
        buffers: the squared length of those of x, which stands for a median of zeros, as far as it is asked for.
    """

    def __init__(
        self,
        limits: Limits,
        unit: str,
        heard: Mapping[str, Any],
        examples: ClaimWindow | None,
        buffers: Callable[[], float],
    ) -> None:
        self._limits, self._unit, self._buffers = limits, unit, buffers
        self._examples = examples
        self._norms: dict[str, NormWindow] = {}
        if limits.measures:
            self._norms = {
                name: NormWindow.unpacked(heard[name]) if name in heard else NormWindow() for name in Lengths._fields
            }

    def heard(self) -> dict[str, Vector]:
        """The norms that counted, float32[WINDOW] by sum, and the examples; empty where nobody asks for them."""
        heard: dict[str, Vector] = {name: norms.packed() for name, norms in self._norms.items() if len(norms)}
        return heard | ({"examples": self._examples.packed} if self._examples else {})

    def judge(self, lengths: Lengths, claims: F64, *, last: bool) -> Verdict | None:
        """The verdict on some replies; None where all of them count, as they are.

        Args:
            lengths: of the replies that were undecided, and then of those that came since.
            claims: float64[k], their examples.
            last: whether no more will come, so that none may stay undecided.
        """
        limited = self._limits.measures
        columns = [column for column in lengths if column is not None]
        finite = all(core.column_range(column)[1] < math.inf for column in columns)  # as a NaN is not
        if finite and not limited and (self._examples is None or self._examples.agree(claims)):
            if self._examples is not None:
                self._examples.add(claims)
            return None
        k = len(lengths.parameters)
        verdict = Verdict(np.ones(k, np.bool_), np.zeros(k, np.bool_), claims.copy(), np.ones(k))
        for column in columns:
            for i in np.flatnonzero(~np.isfinite(column)).tolist():
                verdict.refuse(i, NOT_FINITE)
        norms: Columns = {}
        if limited:
            norms = {name: _norms(squares) for name, squares in lengths._asdict().items() if squares is not None}
            self._judge_by_number(norms, verdict)
        self._judge_by_others(norms, claims, verdict, last=last)
        as_sent = (verdict.examples == claims) & (verdict.factors == 1)
        return None if (verdict.accepted & as_sent).all() else verdict

    def _judge_by_number(self, norms: Columns, verdict: Verdict) -> None:
        if (most := self._limits.norm) is None:
            return
        for i in np.flatnonzero(verdict.accepted).tolist():
            for name, column in norms.items():
                if name != "buffers" and column[i] > _as_float32(most):
                    verdict.refuse(i, f"{self._due(name)} of at most {most:g} (max_norm), got {column[i]:g}")

    def _judge_by_others(self, norms: Columns, claims: F64, verdict: Verdict, *, last: bool) -> None:
        """Judge replies by those heard before them, or by each other while there are too few."""
        apart = self._examples is not None and not self._examples.agree(claims[verdict.accepted])
        together: list[int] = []  # so few were heard that these wait for each other
        for i in np.flatnonzero(verdict.accepted).tolist():
            together.append(i)
            if self._may_decide(claims[together] if apart else None, len(together)):
                self._decide(norms, claims if apart else None, together, verdict)
                together = []
        if last:
            self._decide(norms, claims if apart else None, together, verdict)
        else:
            verdict.undecided[together], verdict.accepted[together] = True, False
        if self._examples is not None and not apart:
            self._examples.add(claims[verdict.accepted])

    def _may_decide(self, claims: F64 | None, waiting: int) -> bool:
        if self._limits.judges_by_medians and len(self._norms["parameters"]) + waiting < FEW:
            return False
        if self._examples is None or claims is None:
            return True
        return len(self._examples) + waiting >= FEW or self._examples.agree(claims)

    def _decide(self, norms: Columns, claims: F64 | None, which: Sequence[int], verdict: Verdict) -> None:
        """Judge some replies by the medians of those heard, and of their own if those are few; take in those that stay.

        Args:
            claims: None where no claim of examples can be too large.
        """
        if not which:
            return
        if self._limits.judges_by_medians:
            beside = () if len(self._norms["parameters"]) >= FEW else which
            medians = {name: self._norms[name].median([column[i] for i in beside]) for name, column in norms.items()}
            for i in which:
                self._judge_by_medians(norms, medians, i, verdict)
        if self._examples is not None and claims is not None:
            own = claims[which]
            most = self._examples.most(own[:0] if len(self._examples) >= FEW else own)
            stays = [i for i in which if verdict.accepted[i]]
            verdict.examples[stays] = np.minimum(claims[stays], most)
            self._examples.add(verdict.examples[stays])

    def _judge_by_medians(self, norms: Columns, medians: Mapping[str, float | None], i: int, verdict: Verdict) -> None:
        for name, median in medians.items():
            norm, ratio, of = norms[name][i], self._limits.norm_ratio, "the median of those heard"
            if median is None and name == "buffers" and (square := self._buffers()) > 0:
                median = math.sqrt(square)
                of = "theirs in x, which none heard changed"
            if ratio is not None and median is not None and norm > _as_float32(ratio * median):
                most = f"{ratio:g} x {median:g}, {of} (max_norm_ratio)"
                verdict.refuse(i, f"{self._due(name)} of at most {most}, got {norm:g}")
            if self._limits.clips and norm > _as_float32(median or 0.0):  # no median: most of them are zeros
                verdict.factors[i] = min(verdict.factors[i], (median or 0.0) / norm)
        if verdict.accepted[i]:
            for name, column in norms.items():
                self._norms[name].add(column[i])

    def _due(self, name: str) -> str:
        """The beginning of a message on a length."""
        dues = {
            "parameters": f"update: expected a length {self._unit}",
            "buffers": "update: expected a length |x - y| of the float buffers",
            "controls": "control: expected a length",
        }
        return dues[name]


def _norms(squares: F64) -> list[float]:
    with np.errstate(over="ignore", invalid="ignore"):
        norms: list[float] = np.sqrt(squares).astype(np.float32).tolist()
    return norms


def _as_float32(number: float) -> float:
    """A number as norms are compared; past float32's range infinite."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))
