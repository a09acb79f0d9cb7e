"""gamma, how far the server's step goes."""

import numpy as np
import numpy.typing as npt

from fedcore.algorithms.rates import rate_at
from fedcore.server.claimed import Claimed
from fedcore.server.judge import FEW
from fedcore.server.limits import MEDIANS
from fedcore.server.settings import Settings
from fedcore.server.snapshot import Snapshot
from fedcore.server.tally import Tally

F64 = npt.NDArray[np.float64]
_NONE: F64 = np.empty(0)


def step_length(settings: Settings, now: Snapshot, tally: Tally, heard: Claimed) -> tuple[float, int | None]:
    """The server's rate; or 1 where models are averaged; or the mean of eta_i K_i over the draws of the cohort.

    Of K_i none counts for more than 10 times a median: that of the last 1,000 replies, or that of the cohort's draws
    where it is larger and they are 8 or more, or the first of all. So one draw of S adds at most 10 / S of a usual
    step to the mean, however many it claims.

    Args:
        heard: the K that counted lately, to which the cohort's are added.

    Returns:
        The length, and the steps that the longest claims were counted with; None where all count as they are.
    """
    if settings.server_lr is not None:
        return rate_at(settings.server_lr, now.round_number), None
    if settings.averages_models:
        return 1.0, None
    if not tally.clients:
        return now.gamma, None
    steps, counts, distances = tally.column("steps"), tally.column("counts"), tally.column("distances")
    most = heard.most(_NONE) if len(heard) else 0.0
    if counts.sum() >= FEW or not len(heard):
        most = max(most, MEDIANS * _median(steps, counts))
    cut = steps > most
    if cut.any():
        distances = np.where(cut, distances / steps * most, distances)
    heard.add(np.minimum(steps, most))
    return float((distances * counts).sum() / counts.sum()), int(most) if cut.any() else None


def _median(values: F64, counts: F64) -> float:
    """The median of values that count so many times each, of an even number the lower of the two in the middle."""
    order = np.argsort(values)
    reached = np.cumsum(counts[order])
    return float(values[order[np.searchsorted(reached, reached[-1] / 2)]])


def farthest_gamma(settings: Settings, now: Snapshot) -> float:
    """The most that ``step_length`` can say in this round, whatever clients claim."""
    if settings.server_lr is not None:
        return rate_at(settings.server_lr, now.round_number)
    if settings.averages_models:
        return 1.0
    lr, limits = rate_at(settings.lr, now.round_number), settings.asked
    return max(limits.lr if limits.own_rates else lr, now.gamma) * limits.steps
