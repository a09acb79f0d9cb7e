"""The report of a round: who took part, what was rejected, and how the step was measured."""

import json
import math
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging import Logger
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.arguments import shown
from fedcore.arrays import F32, F64, Floats, zeros
from fedcore.errors import CorruptionError
from fedcore.kernels import Linear
from fedcore.native import core
from fedcore.options import Settings
from fedcore.profiling import span
from fedcore.representation import Represented
from fedcore.runtime import __version__
from fedcore.server.aggregation import Reducer, UpdateBatch, combined_square
from fedcore.server.step import PreparedStep
from fedcore.server.update import digest_of_numbers, digest_of_text
from fedcore.server.validation import CappedClaim
from fedcore.store import ClientStore
from fedcore.store.registry import ClientId

# The report of a round.


KINDS_TOLD = 5
"""Kinds of refusals that a summary tells apart: clients can make as many as they like."""


@dataclass(frozen=True, repr=False)
class Report(Represented):
    """The outcome of one round.

    Attributes:
        round: its number, counted from 0.
        accepted: the clients whose updates count, in the order of ``add``.
        rejected: (client, reason) of the updates that do not.
        steps: the local steps of the clients heard, added up.
        norms: float64[len(accepted)], |h_i|, the lengths of the clients' mean gradients.
        weights: float64[len(accepted)], w_i, by which the method weighed them, before it divides by their sum.
        factors: float64[len(accepted)], by which ``limits="open"`` scaled each update down; 1 where it did not.
        diversity: sum q_i |h_i|^2 / |sum q_i h_i|^2 with q_i = w_i / W, and h_i = x - y_i where models are averaged:
            the weighted gradient diversity (Haddadpour and Mahdavi 2019, eq. 7). None for an empty cohort, for a mean
            of zero, and for methods that sum h_i - r_i (MIFA, MimiC) and so never form the mean, unless
            ``Server(diagnostics=True)`` asks for it.
        staleness: the mean over the clients heard of the rounds since each one's row was written; None where no client
            heard has a row of an earlier round.
        correction_norm: the length of what the method adds to the cohort's plain mean: |v - mean h_i| where the server
            corrects (MIFA, MimiC), and the length of the cohort's mean offset where the clients do (SCAFFOLD and the
            momentum methods; gradients at x_{t-1} not counted). None for an empty cohort, for methods without a
            correction, where the rows are on the clients' side, and, except for FedAvg-M and FedAvg-M-VR, unless
            ``Server(diagnostics=True)`` asks for it.
        gamma: the server's step along v; 0 where x stayed.
        waiting_for: how many clients were never heard, for which x waits (MIFA); 0 where it does not.
        seconds: time spent in the server, the clients' own not counted.
        bytes: what the clients sent.
        changed: the options that ``Server.change`` or ``Server.load`` changed before the round; None for none.
    """

    round: int
    accepted: tuple[ClientId, ...] = ()
    rejected: tuple[tuple[ClientId, str], ...] = ()
    steps: int = 0
    norms: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    weights: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    factors: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    diversity: float | None = None
    staleness: float | None = None
    correction_norm: float | None = None
    gamma: float = 0.0
    waiting_for: int = 0
    seconds: float = 0.0
    bytes: int = 0
    changed: Mapping[str, Any] | None = None


def refusal_summary(refused: Iterable[tuple[ClientId, str]]) -> str:
    """The reasons of ``Report.refused`` in one line, those of one kind counted, the most frequent first.

    Reasons are of one kind if they differ in numbers and in what came alone; the first one stands for all.

    >>> refusal_summary([(7, "steps: expected an integer in 1..10, got None"), (1, "update: expected finite numbers"),
    ...                  (8, "steps: expected an integer in 1..10, got 0")])
    '2 x steps: expected an integer in 1..10, got None (or the like); 1 x update: expected finite numbers'
    """
    kinds: dict[str, list[str]] = {}
    for _, reason in refused:
        due = reason.rpartition(", got ")[0] or reason
        kinds.setdefault(re.sub(r"\d[\d.e+-]*", "0", due), []).append(reason)
    listed = sorted(kinds.values(), key=len, reverse=True)
    told = [f"{len(k)} x {k[0]}{' (or the like)' if len(set(k)) > 1 else ''}" for k in listed[:KINDS_TOLD]]
    others = sum(map(len, listed[KINDS_TOLD:]))
    return "; ".join([*told, f"{others} x other reasons"] if others else told)


def warn_if_unheard(report: Report, logger: Logger) -> None:
    """Log a warning of a round that refused everybody who replied, which nothing else would tell."""
    if report.rejected and not report.accepted:
        refused = len(report.rejected)
        logger.warning(
            "round %d heard nobody and refused %d: %s", report.round, refused, refusal_summary(report.rejected)
        )


def warn_if_lowered(round: int, lowered: Sequence[CappedClaim], most_steps: int | None, logger: Logger) -> None:
    """Log a warning of claims of examples or steps that did not count in full, which nothing else would tell."""
    if most_steps is not None:
        logger.warning(
            "round %d counted at most %d steps of a client in gamma (CapSteps), and some claim more",
            round,
            most_steps,
        )
    if lowered:
        told = ", ".join(
            f"client {client!r} {counted} of {claimed}" for client, claimed, counted in lowered[:KINDS_TOLD]
        )
        others = f", and {len(lowered) - KINDS_TOLD} others" if len(lowered) > KINDS_TOLD else ""
        logger.warning(
            "round %d counted fewer examples than were claimed: %s%s; at most their n_k, or else the "
            "ratio of CapExamples times the median of the claims accepted",
            round,
            told,
            others,
        )


def tell(callbacks: Iterable[Callable[[Report], object]], report: Report, logger: Logger) -> None:
    """Call the callbacks with the report of a finished round; an exception is logged, and the round stays."""
    for callback in callbacks:
        try:
            callback(report)
        except Exception:
            logger.exception("round %d: a callback failed; the round counts", report.round)


# Diagnostics of a round: the length of the correction, and the cohort's mean for methods that do not form it.


Combination: TypeAlias = Sequence[tuple[Floats, float]]
"""A linear combination: vectors and their coefficients."""

AT_ONCE = 8
"""Rows that are decoded and summed in one pass."""


class Diagnostics(NamedTuple):
    """The measurements of a step that is prepared; see ``Report``."""

    correction_norm: float | None = None
    mean_square: float | None = None
    """|sum_i (w_i / W) h_i|^2, where it is known."""


UNKNOWN = Diagnostics()


class Diagnosis(NamedTuple):
    """Measures a step that is prepared, while the store still has the rows of before.

    Args:
        heard: the cohort.
        offset: from_mean c + from_momentum g as it was sent, float32[n_parameters]; None for zero.
        reducer: of which all of these vectors may be slices.
    """

    settings: Settings
    store: ClientStore
    prepared: PreparedStep
    heard: UpdateBatch
    offset: F32 | None
    reducer: Reducer

    def measure(self) -> Diagnostics:
        """The diagnostics.

        Cost: nothing for methods without a correction; a pass over one vector for those whose correction is one vector
            for all; else a reading of the cohort's rows, copied and decoded: 12 n S bytes, and some vectors (30 clients
            of 44,426 parameters: 1 to 3 ms more than the 2 ms of the round).
        """
        if self.prepared.step is None or not self.prepared.result.linear:
            return UNKNOWN
        with span("diagnose"):
            corrected, square = self._corrections(), self._mean_square()
        return Diagnostics(corrected.correction_norm, corrected.mean_square if square is None else square)

    def _corrections(self) -> Diagnostics:
        algorithm, direction = self.settings.algorithm, self.settings.algorithm.direction
        W, after = self.prepared.result.W, self.prepared.after
        if not len(self.heard) or (direction.from_row and not algorithm.keeps_rows):
            return UNKNOWN
        at_clients = self.offset is not None or bool(direction.from_row)
        if at_clients and not direction.from_row:
            assert self.offset is not None
            return Diagnostics(self._length([(self.offset, 1.0)]))
        if not algorithm.keeps_rows or not self.settings.diagnostics or not W > 0:
            return UNKNOWN
        if at_clients:
            correction: Combination = [(self._mean_row(), direction.from_row)]
            return Diagnostics(self._length(correction if self.offset is None else [*correction, (self.offset, 1.0)]))
        mean_h = self._mean_of_sums()
        if mean_h is None:
            mean_h = self._mean_with_rows()
        if mean_h is None:
            return UNKNOWN
        return Diagnostics(self._length([*mean_h, (after.momentum, -1.0)]), self._length(mean_h) ** 2)

    def _mean_square(self) -> float | None:
        """|sum_i (w_i / W) h_i|^2 as the sums tell it; None where the rows would have to be read.

        Cost: nothing where v is that mean, or a multiple of it, as in most methods; else a pass over A.
        """
        step, W, form = self.prepared.step, self.prepared.result.W, self.settings.algorithm.sums
        assert step is not None
        if not W > 0 or self.settings.algorithm.hides_mean:
            return None
        # v = times (A / W - form.q offset) / form.h, the offset made of T and g?
        d, N, times = self.settings.algorithm.direction, self.prepared.cohort.N, step.v.A * W * form.h
        share = times * form.q / form.h
        multiple = Linear(step.v.A, 0.0, -share * d.from_mean / N, -share * d.from_momentum)
        if times and (step.v == multiple or _alike(step.v, multiple)):
            return self.prepared.v_square / times**2
        mean = self._mean_of_sums()
        return None if mean is None else self._length(mean) ** 2

    def _mean_of_sums(self) -> Combination | None:
        """sum_i (w_i / W) h_i, where it follows from A and the offset; else None."""
        form = self.settings.algorithm.sums
        if self.settings.algorithm.hides_mean:
            return None
        mean: Combination = [(self.prepared.result.A, 1 / (self.prepared.result.W * form.h))]
        return [*mean, (self.offset, -form.q / form.h)] if form.q and self.offset is not None else mean

    def _mean_with_rows(self) -> Combination | None:
        """The same by the rows of before the round; None where A does not tell h at all."""
        form, W = self.settings.algorithm.sums, self.prepared.result.W
        if not form.h:
            return None
        mean: list[tuple[Floats, float]] = [(self.prepared.result.A, 1 / (W * form.h))]
        if form.r:
            mean.append((self._mean_row(), -form.r / form.h))
        return mean + [(v, -form.q / form.h * share) for v, share in self._mean_anchor()] if form.q else mean

    def _mean_anchor(self) -> Combination:
        """sum_i (w_i / W) v[t_i], over the clients whose row refers to a round: one vector a round."""
        weights: dict[int, float] = {}
        for round, weight in zip(self.prepared.rounds, self.heard.weights.tolist(), strict=True):
            if round is not None:
                weights[round] = weights.get(round, 0.0) + weight
        history, W = self.prepared.before.history, self.prepared.result.W
        return [(v, weight / W) for round, weight in weights.items() if (v := history.get(round)) is not None]

    def _mean_row(self) -> F64:
        """sum_i (w_i / W) r_i, float64[n_parameters]."""
        mean: F64 = zeros(self.settings.layout.n_parameters, np.float64, device=self.settings.device)
        clients = self.heard.clients
        shares = self.heard.weights / self.prepared.result.W
        for start in range(0, len(clients), AT_ONCE):
            rows = [self.store.read(client) for client in clients[start : start + AT_ONCE]]
            k = len(rows)
            kernels.accumulate(mean, [None] * k, rows, -np.ones(k), shares[start : start + k], out=mean)
        return mean

    def _length(self, terms: Combination) -> float:
        return math.sqrt(combined_square(self.reducer, [vector for vector, _ in terms], [c for _, c in terms]))


def staleness(prepared: PreparedStep) -> float | None:
    """The mean over the clients heard of the rounds since their rows were written; None where no row was."""
    ages = [prepared.before.round_number - t for t in prepared.rounds if t is not None]
    return sum(ages) / len(ages) if ages else None


def _alike(form: Linear, other: Linear) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(form, other, strict=True))


# The report that a finished round makes of itself.


def diversity_of(weights: F64, squares: F64, mean_square: float | None) -> float | None:
    """The weighted gradient diversity of updates with |h_i|^2 = squares; see ``Report``."""
    if not mean_square:
        return None
    mean: float = core.column_sum(0.0, weights, squares) / core.column_sum(0.0, weights, None)
    return mean / mean_square


def report_of(
    settings: Settings,
    prepared: PreparedStep,
    heard: UpdateBatch,
    found: Diagnostics,
    stale: float | None,
    refused: tuple[tuple[ClientId, str], ...],
    seconds: float,
    bytes: int,
) -> Report:
    """The report of a round whose step was accepted.

    Args:
        heard: the cohort.
        found: what was measured of the step.
        stale: the cohort's staleness.
        refused, seconds, bytes: as the report has them.
    """
    norms, weights, claims = np.sqrt(heard.squares), heard.weights, heard.claims
    return Report(
        round=prepared.before.round_number,
        accepted=tuple(heard.clients),
        rejected=refused,
        steps=int(core.column_sum(0.0, claims.steps, claims.counts)),
        # |h_i| as a gradient, whatever the units that were folded
        norms=norms / heard.eta_steps if settings.averages_models else norms,
        weights=weights,
        factors=heard.factors,
        diversity=diversity_of(weights, heard.squares, found.mean_square),
        staleness=stale,
        correction_norm=found.correction_norm,
        gamma=prepared.gamma,
        waiting_for=prepared.awaited,
        seconds=seconds,
        bytes=bytes,
        changed=dict(prepared.before.changed) or None,
    )


# Records of rounds that can be audited: who sent what, how it counted, and what the model was before and after.


Document = dict[str, Any]


def record(
    settings: Settings, prepared: PreparedStep, heard: UpdateBatch, refused: Sequence[tuple[ClientId, str]]
) -> str:
    """The document of a round that is about to be committed, as JSON."""
    before, after, claims = prepared.before, prepared.after, heard.claims
    columns = zip(
        heard.clients,
        heard.digests,
        heard.weights.tolist(),
        heard.factors.tolist(),
        claims.steps.tolist(),
        heard.starts.tolist(),
        strict=True,
    )
    names = ("client", "digest", "weight", "factor", "steps", "start")
    options = {name: value for name, value in settings.to_state(before.round_number).items() if name != "layout"}
    document = {
        "what": "a round of a fedcore server",
        "round": before.round_number,
        "previous": before.audited,
        "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "versions": {"fedcore": __version__, "python": platform.python_version(), "numpy": np.__version__},
        "options": options,
        "changed": dict(before.changed),
        "x_before": digest_of_numbers(before.x),
        "x_after": digest_of_numbers(after.x),
        "gamma": prepared.gamma,
        "updates": [dict(zip(names, row, strict=True)) for row in columns],
        "rejected": [{"client": client, "reason": reason} for client, reason in refused],
    }
    return json.dumps(document, sort_keys=True)


def checked(documents: Sequence[tuple[int, str]], last: str | None, round: int) -> list[Document]:
    """The documents of the rounds before ``round``, if each has the digest that the next one names.

    Args:
        last: the digest of the last one.

    Raises:
        CorruptionError: one was changed, or is missing.
    """
    texts = [text for number, text in documents if number < round]
    due, found = last, []
    for text in reversed(texts):
        if digest_of_text(text) != due:
            raise CorruptionError("audit: expected the documents that were written, got a changed one, or one too few")
        try:
            found.append(json.loads(text))
            due = found[-1]["previous"]
        except (ValueError, TypeError, LookupError, RecursionError):
            raise CorruptionError(f"audit: expected the document of a round, got {shown(text)}") from None
    if due is not None:
        raise CorruptionError("audit: expected the documents of all rounds, got too few")
    return found[::-1]
