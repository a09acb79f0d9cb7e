"""gamma, how far the server's step goes."""

import numpy as np

from fedcore.aggregation import Replies
from fedcore.algorithms import Cohort
from fedcore.rates import rate_at
from fedcore.server.claim_window import ClaimWindow
from fedcore.server.judge import FEW
from fedcore.server.settings import Settings
from fedcore.server.snapshot import Snapshot
from fedcore.typing import F64

_NONE: F64 = np.empty(0)


def believed_steps(
    settings: Settings, now: Snapshot, heard: Replies, lately: ClaimWindow
) -> tuple[F64, F64, int | None]:
    """The cohort's K_i, eta_i K_i, and the steps that the longest claims were counted with; None where all count.

    With ``max_steps_ratio`` no K_i counts for more than so many times a median: that of the last 1,000 replies, or that
    of the cohort's draws where it is larger and they are 8 or more, or the first of all. So one draw of S adds at most
    ratio / S of a usual step to a mean of them, however many it claims. Where gamma does not depend on them, all count
    as they are.

    Args:
        lately: the K that counted lately, to which the cohort's are added.
    """
    steps, counts, eta_steps = heard.claims.steps, heard.claims.counts, heard.eta_steps
    ratio = settings.limits.steps_ratio
    if ratio is None or claimless_gamma(settings, now) is not None or not len(heard):
        return steps, eta_steps, None
    if lately.agree(steps):
        lately.add(steps)
        return steps, eta_steps, None
    most = lately.most(_NONE) if len(lately) else 0.0
    if counts.sum() >= FEW or not len(lately):
        most = max(most, ratio * _median(steps, counts))
    believed = np.minimum(steps, most)
    lately.add(believed)
    if (believed == steps).all():
        return steps, eta_steps, None
    return believed, np.where(steps > most, eta_steps / steps * most, eta_steps), int(most)


def step_length(settings: Settings, now: Snapshot, cohort: Cohort, said: float | None) -> float:
    """The server's rate; or what the method says; or the optimizer's rate; or 1 where models are averaged; or the mean
    of eta_i K_i over the draws of the cohort, in a round without any the last one.

    Args:
        said: gamma, as the method's step says it.
    """
    if said is not None and settings.server_lr is None:
        return float(said)
    if (gamma := claimless_gamma(settings, now)) is not None:
        return gamma
    if not cohort.S:
        return now.gamma
    counts = cohort.claims.counts
    return float((cohort.eta_steps * counts).sum() / counts.sum())


def claimless_gamma(settings: Settings, now: Snapshot) -> float | None:
    """gamma where no claim changes it: the server's rate, or the optimizer's, or 1 where models are averaged."""
    if settings.server_lr is not None:
        return rate_at(settings.server_lr, now.round_number)
    rate = getattr(settings.optimizer, "rate", None)
    if rate is not None and (gamma := rate(now.round_number)) is not None:
        return float(gamma)
    return 1.0 if settings.averages_models else None


def _median(values: F64, counts: F64) -> float:
    """The median of values that count so many times each, of an even number the lower of the two in the middle."""
    order = np.argsort(values)
    reached = np.cumsum(counts[order])
    return float(values[order[np.searchsorted(reached, reached[-1] / 2)]])


def farthest_gamma(settings: Settings, now: Snapshot) -> float:
    """The most that ``step_length`` can say in this round, whatever clients claim, unless the method says gamma."""
    if (gamma := claimless_gamma(settings, now)) is not None:
        return gamma
    lr, limits = rate_at(settings.lr, now.round_number), settings.asked
    return max(limits.lr if limits.own_rates else lr, now.gamma) * limits.steps
