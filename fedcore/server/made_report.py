"""The report that a finished round makes of itself."""

import numpy as np

from fedcore.aggregation import Replies
from fedcore.clients import ClientId
from fedcore.native import core
from fedcore.server.diagnostics import Diagnostics
from fedcore.server.prepared_step import PreparedStep
from fedcore.server.report import RoundReport
from fedcore.server.settings import Settings
from fedcore.typing import F64


def diversity_of(weights: F64, squares: F64, mean_square: float | None) -> float | None:
    """The weighted gradient diversity of updates with |h_i|^2 = squares; see ``RoundReport``."""
    if not mean_square:
        return None
    mean: float = core.column_sum(0.0, weights, squares) / core.column_sum(0.0, weights, None)
    return mean / mean_square


def report_of(
    settings: Settings,
    prepared: PreparedStep,
    heard: Replies,
    found: Diagnostics,
    stale: float | None,
    refused: tuple[tuple[ClientId, str], ...],
    seconds: float,
    bytes: int,
) -> RoundReport:
    """The report of a round whose step was accepted.

    Args:
        heard: the cohort.
        found: what was measured of the step.
        stale: the cohort's staleness.
        refused, seconds, bytes: as the report has them.
    """
    norms, weights, claims = np.sqrt(heard.squares), heard.weights, heard.claims
    return RoundReport(
        round=prepared.before.round_number,
        heard=tuple(heard.clients),
        refused=refused,
        steps=int(core.column_sum(0.0, claims.steps, claims.counts)),
        # |h_i| as a gradient, whatever the units that were folded
        norms=norms / heard.eta_steps if settings.averages_models else norms,
        weights=weights,
        factors=heard.factors,
        diversity=diversity_of(weights, heard.squares, found.mean_square),
        staleness=stale,
        correction_norm=found.correction_norm,
        gamma=prepared.gamma,
        awaited=prepared.awaited,
        seconds=seconds,
        bytes=bytes,
        changed=dict(prepared.before.changed) or None,
    )
