"""The report of a round."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import Logger
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore.clients import ClientId
from fedcore.representation import Represented

KINDS_TOLD = 5
"""Kinds of refusals that a summary tells apart: clients can make as many as they like."""


@dataclass(frozen=True, repr=False)
class RoundReport(Represented):
    """The outcome of one round.

    Attributes:
        round: its number, counted from 0.
        heard: the clients whose updates count, in the order of ``add``.
        refused: (client, reason) of the updates that do not.
        steps: the local steps of the clients heard, added up.
        norms: float64[len(heard)], |h_i|, the lengths of the clients' mean gradients.
        weights: float64[len(heard)], w_i, by which the method weighed them, before it divides by their sum.
        factors: float64[len(heard)], by which ``limits="open"`` scaled each update down; 1 where it did not.
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
        awaited: how many clients were never heard, for which x waits (MIFA); 0 where it does not.
        seconds: time spent in the server, the clients' own not counted.
        bytes: what the clients sent.
        changed: the options that ``Server.change`` or ``Server.load`` changed before the round; None for none.
    """

    round: int
    heard: tuple[ClientId, ...] = ()
    refused: tuple[tuple[ClientId, str], ...] = ()
    steps: int = 0
    norms: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    weights: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    factors: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    diversity: float | None = None
    staleness: float | None = None
    correction_norm: float | None = None
    gamma: float = 0.0
    awaited: int = 0
    seconds: float = 0.0
    bytes: int = 0
    changed: Mapping[str, Any] | None = None


OnReport = Callable[[RoundReport], object]
"""A listener to the reports of a server's rounds."""


class Lowered(NamedTuple):
    """A client that was counted with fewer examples than it claimed."""

    client: ClientId
    claimed: int
    counted: int


def refusal_summary(refused: Iterable[tuple[ClientId, str]]) -> str:
    """The reasons of ``RoundReport.refused`` in one line, those of one kind counted, the most frequent first.

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


def warn_if_unheard(report: RoundReport, logger: Logger) -> None:
    """Log a warning of a round that refused everybody who replied, which nothing else would tell."""
    if report.refused and not report.heard:
        refused = len(report.refused)
        logger.warning(
            "round %d heard nobody and refused %d: %s", report.round, refused, refusal_summary(report.refused)
        )


def warn_if_lowered(round: int, lowered: Sequence[Lowered], most_steps: int | None, logger: Logger) -> None:
    """Log a warning of claims of examples or steps that did not count in full, which nothing else would tell."""
    if most_steps is not None:
        logger.warning(
            "round %d counted at most %d steps of a client in gamma (max_steps_ratio), and some claim more",
            round,
            most_steps,
        )
    if lowered:
        told = ", ".join(
            f"client {client!r} {counted} of {claimed}" for client, claimed, counted in lowered[:KINDS_TOLD]
        )
        others = f", and {len(lowered) - KINDS_TOLD} others" if len(lowered) > KINDS_TOLD else ""
        logger.warning(
            "round %d counted fewer examples than were claimed: %s%s; at most those of client_sizes, or else "
            "max_examples_ratio times the median of the claims accepted",
            round,
            told,
            others,
        )


def tell(on_report: OnReport | None, report: RoundReport, logger: Logger) -> None:
    """Have a listener hear of a round that counted; what it raises is logged, for it cannot undo the round."""
    if on_report is None:
        return
    try:
        on_report(report)
    except Exception:
        logger.exception("round %d counted, and on_report failed", report.round)
