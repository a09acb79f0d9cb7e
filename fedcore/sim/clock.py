"""A virtual clock: how long clients work, in which order they finish, and when a synchronous round closes."""

import heapq
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from fedcore.arrays import F64, ieee
from fedcore.errors import RangeError
from fedcore.options import ROUNDING, RoundPolicy, as_policy
from fedcore.runtime import generator
from fedcore.sampling import without_replacement
from fedcore.sim.checks import Checked, Real, Whole
from fedcore.sim.participation import Active, Always, Participation
from fedcore.sim.traces import read_durations
from fedcore.validation import check_integer

__all__ = ["Arrival", "Arrivals", "Clock", "Durations"]

NO_POLICY = RoundPolicy()
MOST_IDLE = 10_000
"""The maximum number of successive periods without a client."""


@dataclass(eq=False)
class Durations(Checked):
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

    clients: Annotated[int, Whole(1, 2**53)]
    _: KW_ONLY
    median: Annotated[float, Real("(0, 1e9]")] = 1.0
    spread: Annotated[float, Real("[0, 10]")] = 0.5
    jitter: Annotated[float, Real("[0, 10]")] = 0.25
    trace: str | Path | None = None
    seed: Annotated[int, Whole(0, 2**64 - 1)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows = None if self.trace is None else read_durations(self.trace, self.clients)
        self._own = self.spread * generator(self.seed, "clock: speeds").standard_normal(self.clients)

    @ieee
    def seconds(self, number: int) -> F64:
        """Return the seconds of complete work number n of each client, float64[N]: n is the round, or counts starts."""
        if self.rows is not None:
            return np.array([own[number % len(own)] for own in self.rows])
        deviation = generator(self.seed, "clock: works", round=number).standard_normal(self.clients)
        return self.median * np.exp(self._own + self.jitter * deviation)

    def period(self, time: float) -> int:
        """Return the number of whole medians until a time. Sums of medians are rounded, so 2.9999999999 are three."""
        return int(time * (1 + ROUNDING) / self.median)


class Clock(Participation):
    """Synchronous rounds on a virtual clock: the clients of ``among`` that finish before the round closes.

    The server asks clients of ``among``, and each needs its duration times its share of the work. Clients finish in
    the order of their times, and of their numbers if times are equal. The round closes as ``RoundPolicy`` defines: when
    all asked clients have finished; ``grace`` after the share ``min_share``, or after ``cohort`` clients; or at the
    ``deadline``. Later clients do not count. A round without asked clients lasts until the deadline, or for the median
    duration. Only the clients' work takes time.

    As for ``Arrivals``, a period takes the median duration, and the clients of ``among`` are those of the period in
    which the round begins. So rounds that wait and rounds that do not meet the same clients at the same time.

    Args:
        durations: the clients' durations.
        policy: a ``RoundPolicy`` or a mapping of its fields: ``over_selection``, ``min_share``, ``grace`` and
            ``deadline``, in virtual seconds.
        cohort: k, how many clients a round needs. The server asks ``policy.asked(k)`` clients, drawn uniformly, and the
            k-th that finishes closes the round. Default: the server asks all clients of ``among``.

    Cost: O(t N) for round t, unless the rounds before it are known.

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
        self._begins = [0.0]
        unused = replace(self.policy, over_selection=1.0, min_share=1.0, grace=0.0, deadline=None)
        if unused != NO_POLICY:
            raise RangeError(f"policy={self.policy!r}: it uses only over_selection, min_share, grace and deadline")
        if self.cohort is None and self.policy.over_selection != 1:
            raise RangeError(f"over_selection={self.policy.over_selection:g}: needs cohort, the number of clients")
        if self.cohort is not None and self.policy.min_share != 1:
            raise RangeError(f"min_share={self.policy.min_share:g}: leave it out, because cohort closes the round")

    def inner_round(self, round: int) -> int:
        """Return the period in which a round begins."""
        while len(self._begins) <= round:
            self._begins.append(self._begins[-1] + self.closing(len(self._begins) - 1)[1])
        return self.durations.period(self._begins[round])

    def closing(self, round: int) -> tuple[Active, float]:
        """Return the clients that count in a round, and the virtual seconds until it closes."""
        return self._close(round, self.candidates(round))

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


class Arrivals:
    """Asynchronous clients on a virtual clock: which start, when, and in which order they finish.

    While fewer than ``concurrency`` clients are at work, free clients start. The clients that the pattern ``among``
    selects in the current period are available. A period takes the median duration, and the pattern's round is the
    number of the period. A free client is available and not at work, and is drawn uniformly. Without one, the next
    client starts after an arrival or in the next period. A client needs its duration times its share of the work.
    Clients finish in the order of their times, and of their numbers if times are equal.

    Args:
        durations: the clients' durations; work n has ``durations.seconds(n)``.
        concurrency: how many clients are at work at any time, 1 .. N.
        among: the pattern. Default: all clients are available.

    Attributes:
        time: the virtual seconds since the start.
        count: how many clients have arrived.

    Determinism: depends only on the arguments, and not on the server's rounds.

    >>> course = Arrivals(Durations(2, spread=0.0, jitter=0.0, median=3.0), 2)
    >>> [active.clients.tolist() for _, active in course.start()], course.next()
    ([[0], [1]], Arrival(time=3.0, client=0, number=0))
    """

    def __init__(self, durations: Durations, concurrency: int, *, among: Participation | None = None) -> None:
        self.durations = durations
        self.concurrency = check_integer("concurrency", concurrency, 1, durations.clients)
        self.among = Always(durations.clients) if among is None else among
        self.time, self.count = 0.0, 0
        self._period, self._idle, self._number = 0, 0, 0
        self._at_work: list[Arrival] = []

    @ieee
    def start(self) -> list[tuple[int, Active]]:
        """Start free clients now; return the number of each work, and its client with its share."""
        found: list[tuple[int, Active]] = []
        free = self.among.active(self._period)
        free = free.only(~np.isin(free.clients, [work.client for work in self._at_work]))
        while len(free) and len(self._at_work) < self.concurrency:
            stream: dict[str, Any] = {"seed": self.durations.seed, "round": self._number, "purpose": "clock: started"}
            is_drawn = np.arange(len(free)) == without_replacement(len(free), 1, **stream)[0]
            one, free = free.only(is_drawn), free.only(~is_drawn)
            client, share = int(one.clients[0]), 1.0 if one.shares is None else float(one.shares[0])
            end = self.time + share * float(self.durations.seconds(self._number)[client])
            heapq.heappush(self._at_work, Arrival(end, client, self._number))
            found.append((self._number, one))
            self._number += 1
        return found

    @ieee
    def next(self) -> Arrival | None:
        """Advance to the next arrival and return it, or to the next period, and return None, if clients are missing.

        Raises:
            RangeError: no client has been available for ``MOST_IDLE`` periods.
        """
        at_work, begin = self._at_work, (self._period + 1) * self.durations.median
        if len(at_work) < self.concurrency and (not at_work or at_work[0].time > begin * (1 + ROUNDING)):
            self._idle = 0 if at_work else self._idle + 1
            if self._idle > MOST_IDLE:
                raise RangeError(f"participation: no client has been available for {MOST_IDLE:,} periods; change it")
            self._period, self.time = self._period + 1, begin
            return None
        arrival = heapq.heappop(at_work)
        self.time, self.count, self._idle = arrival.time, self.count + 1, 0
        self._period = max(self._period, self.durations.period(self.time))
        return arrival

    def skip(self, count: int) -> None:
        """Repeat the starts and arrivals until ``count`` clients have arrived."""
        while self.count < count:
            self.start()
            self.next()
