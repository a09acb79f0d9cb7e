"""A virtual clock: how long clients work, in which order they finish, and when a synchronous round closes."""

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcore.arrays import F64, ieee
from fedcore.errors import RangeError
from fedcore.options import ROUNDING, RoundPolicy, as_policy
from fedcore.runtime import generator
from fedcore.sampling import without_replacement
from fedcore.simulation.participation import Active, Participation
from fedcore.simulation.traces import read_durations
from fedcore.validation import check_integer, check_number

__all__ = ["Arrival", "Clock", "Durations", "arrivals"]

NO_POLICY = RoundPolicy()


class Durations:
    """The virtual seconds that clients need for their work, by a law or a file.

    By the law, client i needs median x exp(spread a_i + jitter b_in) seconds for its work number n. a and b are
    standard normal: a is drawn once per client, and b for each work.

    Args:
        clients: N.
        median: the median of the durations, > 0.
        spread: the standard deviation between clients of the logarithm of their durations, >= 0.
        jitter: the standard deviation of the logarithm of one client's durations, >= 0.
        trace: a file of durations that replaces the law; see ``read_durations``. A client with several rows uses row
            n, and restarts after its last one.
        seed: the run's seed.

    >>> Durations(3, spread=0.0, jitter=0.0, median=2.0).seconds(0)
    array([2., 2., 2.])
    """

    def __init__(
        self,
        clients: int,
        *,
        median: float = 1.0,
        spread: float = 0.5,
        jitter: float = 0.25,
        trace: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        self.clients = check_integer("clients", clients, 1, 2**53)
        self.median = check_number("median", median, "(0, 1e9]")
        self.spread = check_number("spread", spread, "[0, 10]")
        self.jitter = check_number("jitter", jitter, "[0, 10]")
        self.seed = check_integer("seed", seed, 0, 2**64 - 1)
        self.rows = None if trace is None else read_durations(trace, self.clients)
        self._own = self.spread * generator(self.seed, "clock: speeds").standard_normal(self.clients)

    @ieee
    def seconds(self, number: int) -> F64:
        """Return the seconds of complete work number n of each client, float64[N]: n is the round, or counts starts."""
        if self.rows is not None:
            return np.array([own[number % len(own)] for own in self.rows])
        deviation = generator(self.seed, "clock: works", round=number).standard_normal(self.clients)
        return self.median * np.exp(self._own + self.jitter * deviation)


class Clock(Participation):
    """Synchronous rounds on a virtual clock: the clients of ``among`` that finish before the round closes.

    The server asks clients of ``among``, and each needs its duration times its share of the work. Clients finish in
    the order of their times, and of their numbers if times are equal. The round closes as ``RoundPolicy`` defines: when
    all asked clients have finished; ``grace`` after the share ``min_share``, or after ``cohort`` clients; or at the
    ``deadline``. Later clients do not count. A round without asked clients lasts until the deadline, or for the median
    duration. Only the clients' work takes time.

    Args:
        durations: the clients' durations.
        policy: a ``RoundPolicy`` or a mapping of its fields: ``over_selection``, ``min_share``, ``grace`` and
            ``deadline``, in virtual seconds.
        cohort: k, how many clients a round needs. The server asks ``policy.asked(k)`` clients, drawn uniformly, and the
            k-th that finishes closes the round. Default: the server asks all clients of ``among``.

    >>> slow = Durations(4, spread=0.0, jitter=0.0, median=10.0)
    >>> Clock(slow, policy={"deadline": 5.0}).closing(0)
    (Active(clients=int64[0]), 5.0)
    """

    def __init__(
        self,
        durations: Durations,
        *,
        policy: RoundPolicy | Mapping[str, Any] = NO_POLICY,
        cohort: int | None = None,
        among: Participation | None = None,
    ) -> None:
        super().__init__(durations.clients, among=among, seed=durations.seed)
        self.durations, self.policy = durations, as_policy(policy)
        self.cohort = None if cohort is None else check_integer("cohort", cohort, 1, self.clients)
        unused = replace(self.policy, over_selection=1.0, min_share=1.0, grace=0.0, deadline=None)
        if unused != NO_POLICY:
            raise RangeError(
                f"policy={self.policy!r}: the clock uses only over_selection, min_share, grace and deadline"
            )
        if self.cohort is None and self.policy.over_selection != 1:
            raise RangeError(f"over_selection={self.policy.over_selection:g}: needs cohort, the number of clients")
        if self.cohort is not None and self.policy.min_share != 1:
            raise RangeError(f"min_share={self.policy.min_share:g}: leave it out, because cohort closes the round")

    def closing(self, round: int) -> tuple[Active, float]:
        """Return the clients that count in a round, and the virtual seconds until it closes."""
        candidates = Active(np.arange(self.clients)) if self.among is None else self.among.active(round)
        return self._close(round, candidates)

    def _choose(self, round: int, candidates: Active) -> Active:
        return self._close(round, candidates)[0]

    @ieee
    def _close(self, round: int, candidates: Active) -> tuple[Active, float]:
        policy, deadline = self.policy, self.policy.deadline
        asked = self._asked(round, candidates)
        if not len(asked):
            return asked, self.durations.median if deadline is None else deadline
        times = self.durations.seconds(round)[asked.clients]
        times = times if asked.shares is None else times * asked.shares
        order = np.argsort(times, kind="stable")  # the clients are ascending
        share = math.ceil(policy.min_share * len(asked) - ROUNDING)
        needed = min(share if self.cohort is None else self.cohort, len(asked))
        enough = policy.grace + (times[order[needed - 1]] if needed else 0.0)
        end = min(enough, times[order[-1]], math.inf if deadline is None else deadline)
        count = int((times <= end).sum())
        if end == enough and not policy.grace:
            count = min(count, needed)  # the last needed client closes the round
        return asked.only(np.sort(order[:count])), float(end)

    def _asked(self, round: int, candidates: Active) -> Active:
        count = len(candidates) if self.cohort is None else self.policy.asked(self.cohort)
        if count >= len(candidates):
            return candidates
        stream: dict[str, Any] = {"seed": self.seed, "round": round, "purpose": "clock: asked"}
        return candidates.only(np.sort(without_replacement(len(candidates), count, **stream)))


class Arrival(NamedTuple):
    """A client that has finished its work: when, which, and the number of the work."""

    time: float
    client: int
    number: int


def arrivals(
    durations: Durations, concurrency: int, choose: Callable[[int, Collection[int]], int | None]
) -> Iterator[Arrival]:
    """Yield the clients that finish, ordered by time and client, while ``concurrency`` clients are at work.

    When a client has finished, and the caller asks for the next one, other clients start at that time. Asynchronous
    rounds thus fold an update before the next client gets a model.

    Args:
        durations: the clients' durations.
        concurrency: how many clients are at work at any time, 1 .. N.
        choose: called with the number of a work and the clients at work, returns the client that starts it, or None if
            no client is available; then fewer are at work until the next arrival.

    Determinism: the same durations and choices give the same arrivals.

    >>> durations = Durations(3, spread=0.0, jitter=0.0)
    >>> some = arrivals(durations, 2, lambda number, busy: min({0, 1, 2} - set(busy)))
    >>> [next(some).client for _ in range(5)]
    [0, 1, 0, 1, 0]
    """
    check_integer("concurrency", concurrency, 1, durations.clients)
    at_work: list[Arrival] = []
    now, number = 0.0, 0
    while True:
        while len(at_work) < concurrency:
            client = choose(number, [work.client for work in at_work])
            if client is None:
                break
            heapq.heappush(at_work, Arrival(now + float(durations.seconds(number)[client]), client, number))
            number += 1
        if not at_work:
            return
        arrival = heapq.heappop(at_work)
        now = arrival.time
        yield arrival
