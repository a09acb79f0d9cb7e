"""Rules that reject, cap or scale single updates, and the mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcore.arrays import F64
from fedcore.rules.base import Combine, Filter, Group, Rule, Scale, Weights
from fedcore.rules.windows import PARTS, as_float32
from fedcore.validation import check_integer, check_number, listed, short_repr


@dataclass(frozen=True)
class RatioRule(Rule):
    """A rule with a ratio to a median, at least 1."""

    ratio: float = 2.0

    _intervals = (("ratio", "[1, inf)"),)


@dataclass(frozen=True)
class RejectLong(RatioRule, Filter):
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
    needs = frozenset({"norms", "medians", "received"})

    def decide(self, group: Group) -> Mapping[int, str]:
        """Compare each norm with the median of its part."""
        reasons: dict[int, str] = {}
        for name, median in group.medians.items():
            most = np.inf if median is None else as_float32(self.ratio * median)
            for i, norm in enumerate(group.norms[name]):
                if norm > most:
                    above = f"exceeds {self.ratio:g} x the median {median:g} (RejectLong)"
                    reasons.setdefault(i, f"{PARTS[name]} {norm:g} {above}")
        return reasons


@dataclass(frozen=True)
class ClipToMedian(Scale):
    """Scale an update by one factor, so that no part has a norm above its median; see ``RejectLong`` for medians.

    The window stores norms before clipping; otherwise the median could only fall. If clients add an offset to their
    gradients, h_i becomes offset + factor (h_i - offset). So rows and the momentum get at most a median gradient of a
    client. Late updates count with the offset of the open round.

    Cost: with offsets, another pass over updates, rows and the offset; n elements of memory per clipped update.
    """

    needs = frozenset({"norms", "medians"})

    def weights(self, group: Group) -> F64:
        """The smallest ratio median / norm below 1."""
        factors = [1.0] * len(group.clients)
        for name, median in group.medians.items():
            length = median or 0.0  # without a median, most updates are zero
            most = as_float32(length)
            for i, norm in enumerate(group.norms[name]):
                if norm > most:
                    factors[i] = min(factors[i], length / norm)
        return np.array(factors)


class CapExamples(RatioRule, Scale):
    """Count at most ``ratio`` times the median number of examples of the last 1,000 accepted updates.

    The rule applies if weights follow reported examples that the server cannot check. A warning lists clients that
    report more than the cap and more than 10 times the median.
    """

    needs = frozenset({"examples"})

    def examples(self, group: Group) -> F64:
        """At most the cap."""
        return np.minimum(group.examples, self.ratio * group.usual_examples)


class CapSteps(RatioRule):
    """In gamma, count at most ``ratio`` times the median number of steps of the last 1,000 accepted updates.

    The rule applies if gamma is the mean of eta_i K_i. It acts on the whole cohort at the end of the round. A larger
    median of the cohort replaces that of the window if the cohort has at least 8 draws.
    """

    needs = frozenset({"steps"})


@dataclass(frozen=True)
class CountOnce(Rule):
    """In a buffer (``RoundPolicy(buffer=)``), count one update of each client; reject its further ones by name.

    Without the rule, a client that sends more often counts more. A rejected update does not count towards K, so each
    fold has K different clients, and one dishonest client has the weight that it has in a synchronous round. If fewer
    than K clients are registered, a buffer is full once each of them has an update. In synchronous rounds the rule
    does nothing.
    """

    needs = frozenset({"once"})


@dataclass(frozen=True)
class Mean(Combine):
    """The last rule of every chain: the method's weighted sum of the accepted updates.

    Args:
        weights: numbers >= 0 that replace the numbers of examples, for methods that weight by examples: by client, or a
            function of one client's ``fedcore.algorithms.Claims``, such as ``lambda claims: np.sqrt(claims.examples)``.
            A folder does not store them; pass them to ``Server.load`` again.

    Raises:
        RangeError: there is no number, or one is negative or not finite.
    """

    weights: Weights | None = None

    def __post_init__(self) -> None:
        weights: Any = self.weights
        if weights is not None and not callable(weights):
            weights = weights if isinstance(weights, Mapping) else dict(enumerate(listed("weights", weights)))
            check_integer("weights: the number of clients", len(weights), 1)
            for client, weight in weights.items():
                check_number(f"weights[{short_repr(client)}]", weight, "[0, inf)")
            object.__setattr__(self, "weights", weights)
