"""gamma, how far the server's step goes."""

from fedcore.algorithms.rates import rate_at
from fedcore.server.settings import Settings
from fedcore.server.snapshot import Snapshot
from fedcore.server.tally import Tally


def step_length(settings: Settings, now: Snapshot, tally: Tally) -> float:
    """The server's rate; or 1 where models are averaged; or the cohort's mean of eta_i K_i."""
    if settings.server_lr is not None:
        return rate_at(settings.server_lr, now.round_number)
    if settings.averages_models:
        return 1.0
    return tally.mean_distance if tally.clients else now.gamma


def farthest_gamma(settings: Settings, now: Snapshot) -> float:
    """The most that ``step_length`` can say in this round, whatever clients claim."""
    if settings.server_lr is not None or settings.averages_models:
        return step_length(settings, now, Tally())
    lr, limits = rate_at(settings.lr, now.round_number), settings.asked
    return max(limits.lr if limits.own_rates else lr, now.gamma) * limits.steps
