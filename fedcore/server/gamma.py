"""gamma, how far the server's step goes."""

import numpy as np

from fedcore.algorithms.rates import rate_at
from fedcore.server.claimed import Claimed
from fedcore.server.limits import LARGEST
from fedcore.server.settings import Settings
from fedcore.server.snapshot import Snapshot
from fedcore.server.tally import Tally


def step_length(settings: Settings, now: Snapshot, tally: Tally, heard: Claimed) -> float:
    """The server's rate; or 1 where models are averaged; or the mean of eta_i K_i over the draws of the cohort.

    Of K_i none counts for more than 10 times the median of the cohort's and of those heard lately, which are taken in:
    one draw of ten that claims ever so many steps at most doubles the mean. Of the first clients of all, who are alone
    with their claims, it is the median that may be a lie.

    Args:
        heard: what clients claimed of K lately.
    """
    if settings.server_lr is not None:
        return rate_at(settings.server_lr, now.round_number)
    if settings.averages_models:
        return 1.0
    if not tally.clients:
        return now.gamma
    lr, counts, distances = rate_at(settings.lr, now.round_number), tally.column("counts"), tally.column("distances")
    with np.errstate(over="ignore"):
        steps = np.minimum(np.round(distances / lr, 6), LARGEST)
        counted = np.minimum(distances, heard.most(steps) * lr)
    heard.add(steps)
    return float((counted * counts).sum() / counts.sum())


def farthest_gamma(settings: Settings, now: Snapshot) -> float:
    """The most that ``step_length`` can say in this round, whatever clients claim."""
    if settings.server_lr is not None:
        return rate_at(settings.server_lr, now.round_number)
    if settings.averages_models:
        return 1.0
    lr, limits = rate_at(settings.lr, now.round_number), settings.asked
    return max(limits.lr if limits.own_rates else lr, now.gamma) * limits.steps
