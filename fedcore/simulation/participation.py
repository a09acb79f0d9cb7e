"""Participation patterns: the clients of each round, and the share of its work that each one does."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import isabstract, isclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.arguments import due_in, inside, real, whole
from fedcore.arrays import F64, ieee
from fedcore.errors import RangeError, ShapeError, UnknownNameError
from fedcore.randomness import generator
from fedcore.registries import Registry
from fedcore.representation import Represented, arguments_of
from fedcore.sampling import bernoulli, weighted_without_replacement, with_replacement, without_replacement
from fedcore.simulation.traces import Generated, Law, Recorded, read_traces

__all__ = [
    "REGISTRY",
    "Active",
    "Always",
    "AtLeast",
    "Bernoulli",
    "Generated",
    "OverSelection",
    "Participation",
    "Recorded",
    "RoundRobin",
    "Schedule",
    "TimeVarying",
    "Trace",
    "Uniform",
    "Weighted",
    "named",
    "read_traces",
]

Clients = npt.NDArray[np.int64]

ROUNDING = 1e-9
"""A share of E that is so little below a whole number of steps counts as that number."""


@dataclass(frozen=True, eq=False, repr=False)
class Active(Represented):
    """The clients of one round.

    Shares rather than numbers of steps: a pattern knows no data, and if E counts epochs, each client has another number
    of steps. A client that does nothing is not active, so every client here does at least one step.

    Attributes:
        clients: int64[k], ascending, each once.
        shares: float64[k] in (0, 1], the share of its E local steps that each client does. Default: all.
        counts: int64[k], >= 1, how often each was drawn, if draws are with replacement.

    >>> Active(np.array([2, 5]), shares=np.array([0.5, 0.01])).steps(20)
    array([10,  1])
    """

    clients: Clients
    shares: npt.NDArray[np.float64] | None = None
    counts: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.clients)

    def only(self, kept: npt.NDArray[Any]) -> "Active":
        """Select some of the clients, with their shares and counts.

        Args:
            kept: bool[k], or int64[m] ascending places in ``clients``.
        """
        return Active(
            self.clients[kept],
            None if self.shares is None else self.shares[kept],
            None if self.counts is None else self.counts[kept],
        )

    @ieee
    def working(self, shares: npt.NDArray[np.float64]) -> "Active":
        """Multiply the shares by others, and leave out the clients whose share becomes 0.

        Args:
            shares: float64[k] in [0, 1].
        """
        done = shares if self.shares is None else self.shares * shares
        return Active(self.clients, done, self.counts).only(done > 0)

    def steps(self, full: int | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return s_i, the local steps of each client: the whole steps in its share of E, and at least one.

        Args:
            full: E, the steps of a whole round: an int >= 1 for all, or int64[k].

        Returns:
            int64[k], in 1 .. E.
        """
        everything = np.broadcast_to(np.asarray(full, np.int64), self.clients.shape)
        if self.shares is None:
            return everything.copy()
        return np.maximum(np.floor(self.shares * everything + ROUNDING), 1).astype(np.int64)


@ieee
def each(name: str, values: Sequence[float], clients: int, interval: str) -> npt.NDArray[np.float64]:
    """One number in the interval for each client, as a read-only copy, float64[clients]."""
    shape = np.shape(values)
    if shape != (clients,):
        raise ShapeError(f"{name}: expected {clients} numbers, one a client, got shape {list(shape)}")
    for client, value in enumerate(values):
        if not inside(value, interval):
            raise RangeError(f"{name}[{client}]: expected {due_in(interval)}, got {value!r}")
    array = np.array(values, np.float64)
    array.flags.writeable = False
    return array


class Participation(Represented, ABC):
    """A pattern of participation: the clients of each round.

    A pattern chooses among the clients of another pattern, or among all: ``Uniform(50, 5, among=Bernoulli(50, 0.3))``
    draws five of the reachable clients. The order matters: ``Uniform`` among a ``Schedule`` draws five present clients;
    a ``Schedule`` among ``Uniform`` drops drawn clients that are absent.

    Args:
        clients: N; the clients are 0 .. N-1.
        among: the pattern to choose from, over the same N clients. Default: all clients.
        seed: the run's seed, 0 .. 2^64 - 1.
        first_round: "all" skips the pattern in round 0, so that all its candidates take part, as the MimiC paper's
            analysis assumes (Sec. 5).

    Raises:
        RangeError, ShapeError, UnknownNameError: an argument is outside its range.

    Determinism: ``active(t)`` depends only on the arguments and t. So every algorithm of a comparison sees the same
    active sets, and a round can be repeated without those before it. Two patterns of one composition share no random
    numbers. Patterns that decide for each client separately (Bernoulli, RoundRobin, Trace, Schedule) do not depend on
    the other candidates, and may change places with another such pattern.
    """

    overruled: ClassVar[bool] = True
    """Whether ``first_round="all"`` skips the pattern: not one that states facts instead of choosing."""

    def __init__(
        self,
        clients: int,
        *,
        among: "Participation | None" = None,
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        self.clients = whole("clients", clients, 1, 2**53)
        self.seed = whole("seed", seed, 0, 2**64 - 1)
        if first_round not in ("all", None):
            raise RangeError(f"first_round: expected 'all' or None, got {first_round!r}")
        if among is not None and not isinstance(among, Participation):
            raise RangeError(f"among: expected a participation pattern, got {among!r}")
        if among is not None and among.clients != clients:
            raise RangeError(f"among: expected a pattern of {clients} clients, got one of {among.clients}")
        self.among = among
        self.first_round = first_round

    def _facts(self) -> dict[str, Any]:
        return arguments_of(self)

    @ieee
    def active(self, round: int) -> Active:
        """The clients that take part in a round.

        Args:
            round: counted from 0.

        Returns:
            0 to N clients, ascending.
        """
        round = whole("round", round, 0, 2**63 - 1)
        candidates = Active(np.arange(self.clients)) if self.among is None else self.among.active(round)
        if round == 0 and self.first_round == "all" and self.overruled:
            return candidates
        return self._choose(round, candidates)

    def present(self, round: int) -> Clients:
        """The clients that belong to the federation in a round, whether they take part or not.

        Returns:
            int64[m], ascending: all but those that a ``Schedule`` in the composition excludes.
        """
        return np.arange(self.clients) if self.among is None else self.among.present(round)

    @abstractmethod
    def _choose(self, round: int, candidates: Active) -> Active:
        """Choose among the candidates: a pure function of the arguments, without regard to ``first_round``."""

    def _purpose(self, name: str) -> str:
        """The purpose of the random numbers; the patterns of one class in a composition have different ones."""
        below, inner = 0, self.among
        while inner is not None:
            below += type(inner) is type(self)
            inner = inner.among
        return f"participation: {name}" + (f" ({below + 1})" if below else "")

    def _stream(self, name: str, round: int) -> dict[str, Any]:
        """The arguments of a draw of ``fedcore.sampling``."""
        return {"seed": self.seed, "round": round, "purpose": self._purpose(name)}

    def _random(self, name: str, round: int = 0) -> np.random.Generator:
        return generator(self.seed, self._purpose(name), round=round)


Among: TypeAlias = Participation | None
First: TypeAlias = Literal["all"] | None


class Always(Participation):
    """Full participation; in a composition it changes nothing.

    Args:
        clients, among, seed, first_round: see ``Participation``.

    >>> Always(3).active(7).clients
    array([0, 1, 2])
    """

    def _choose(self, round: int, candidates: Active) -> Active:
        return candidates


class AtLeast(Participation):
    """The clients of ``among``, or ``least`` others drawn uniformly if they are fewer than that.

    The draw is from all present clients, not from those of ``among``, and the drawn clients do all their steps. The
    MimiC paper does not mention it; its authors' public code does it with two clients.

    Args:
        clients: N.
        least: the number of clients, 1 .. N; all present clients if they are fewer.
        among, seed, first_round: see ``Participation``.

    >>> len(AtLeast(30, among=Bernoulli(30, 0.0)).active(3))
    2
    """

    def __init__(
        self, clients: int, least: int = 2, *, among: Among = None, seed: int = 0, first_round: First = None
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.least = whole("least", least, 1, self.clients)

    def _choose(self, round: int, candidates: Active) -> Active:
        if len(candidates) >= self.least:
            return candidates
        present = self.present(round)
        if len(present) <= self.least:
            return Active(present)
        drawn = without_replacement(len(present), self.least, **self._stream("at least", round))
        return Active(present[np.sort(drawn)])


class Bernoulli(Participation):
    """Client i is active with probability p_i, or p_i^t in round t, independently of the others and of other rounds.

    Args:
        clients: N.
        p: one probability in [0, 1] for all clients, or N of them; or a table of such by the round from which it holds,
            with one from round 0 on. The keys may be strings, as in TOML and JSON.
        levels: L > 1 spreads one p over L levels up to 1: p_i = p + (i mod L)(1 - p)/(L - 1). The MimiC paper has one
            p; its authors' public code has five levels.
        among, seed, first_round: see ``Participation``.

    Attributes:
        p: float64[N], read-only; or a table of such by the round from which it holds.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central
    Updates", 2023, the static pattern; its Assumption 5 and Theorem 3 have p_i^t.

    >>> Bernoulli(4, 1.0).active(3).clients
    array([0, 1, 2, 3])
    >>> Bernoulli(6, 0.2, levels=5).p
    array([0.2, 0.4, 0.6, 0.8, 1. , 0.2])
    >>> late = Bernoulli(3, {0: 1.0, 10: [1.0, 1.0, 0.0]})
    >>> late.active(9).clients, late.active(10).clients
    (array([0, 1, 2]), array([0, 1]))
    """

    @ieee
    def __init__(
        self,
        clients: int,
        p: float | Sequence[float] | Mapping[int | str, float | Sequence[float]],
        *,
        levels: int = 1,
        among: Among = None,
        seed: int = 0,
        first_round: First = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        levels = whole("levels", levels, 1, 2**31)
        if not isinstance(p, Mapping):
            p = {0: p}
        given = {
            whole("p: round", _number(round), 0, 2**53): self._chances(round, chances, levels, len(p) > 1)
            for round, chances in p.items()
        }
        if len(given) < len(p) or 0 not in given:
            raise RangeError(f"p: expected each round once, and chances from round 0 on, got rounds {list(p)}")
        self._from = sorted(given.items())
        self.p: F64 | dict[int, F64] = given[0] if len(given) == 1 else dict(self._from)

    def _chances(self, round: object, p: float | Sequence[float], levels: int, several: bool) -> F64:
        """p_i of each client, float64[N], from a round on."""
        name = f"p[{round}]" if several else "p"
        if np.ndim(p) > 0 and levels > 1:
            raise RangeError(f"levels: expected 1 where there is a p for each client, got {levels}")
        if isinstance(p, Sequence | np.ndarray) and not isinstance(p, str):
            return each(name, list(p), self.clients, "[0, 1]")
        least = real(name, p, "[0, 1]")
        level = np.arange(self.clients) % levels / max(levels - 1, 1)
        chances: F64 = least + level * (1 - least)
        chances.flags.writeable = False
        return chances

    def _choose(self, round: int, candidates: Active) -> Active:
        # Drawn for all clients, so that one client's draw does not depend on the other candidates.
        p = next(chances for began, chances in reversed(self._from) if began <= round)
        drawn = bernoulli(self.clients, p, **self._stream("bernoulli", round))
        return candidates.only(np.isin(candidates.clients, drawn, assume_unique=True))


def _require(name: str, value: str, *known: str) -> None:
    if value not in known:
        raise UnknownNameError.of(name, value, known)


def _number(key: object) -> object:
    """A key of a table as a number, if it is one: keys of TOML and JSON are strings."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


class OverSelection(Participation):
    """``select`` clients are drawn uniformly without replacement, and of these the first k to answer are kept.

    Client i answers in round t after exp(spread a_i + jitter b_it), a and b standard normal, a drawn once for each
    client and b anew in each round; 1 is the time of the median client. The law is this project's. Fast clients are
    kept more often than slow ones: this practice has that bias.

    Args:
        clients: N.
        k: the number of answers that the server waits for, 1 .. N.
        select: the number of clients that it asks, k .. N. Default: 1.3 k, rounded up, as in production systems.
        spread: the standard deviation of the logarithm of the clients' times, >= 0.
        jitter: that of the rounds' deviations from them, >= 0.
        deadline: when the server stops waiting, > 0. Default: it waits for k answers.
        among, seed, first_round: see ``Participation``. Shares of work do not change the times.

    Reference: Bonawitz et al., "Towards Federated Learning at Scale: System Design", 2019: 130 % of the target
    number are selected.

    >>> pattern = OverSelection(100, 10)
    >>> pattern.select, len(pattern.active(3))
    (13, 10)
    """

    def __init__(
        self,
        clients: int,
        k: int,
        *,
        select: int | None = None,
        spread: float = 0.5,
        jitter: float = 0.25,
        deadline: float | None = None,
        among: Among = None,
        seed: int = 0,
        first_round: First = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.k = whole("k", k, 1, self.clients)
        if select is None:
            select = min(math.ceil(1.3 * self.k), self.clients)
        self.select = whole("select", select, self.k, self.clients)
        self.spread = real("spread", spread, "[0, 10]")
        self.jitter = real("jitter", jitter, "[0, 10]")
        self.deadline = math.inf if deadline is None else real("deadline", deadline, "(0, inf]")
        self._own = self.spread * self._random("speeds").standard_normal(self.clients)

    def times(self, round: int) -> npt.NDArray[np.float64]:
        """The times at which each client would answer in a round, float64[N], whether it is asked or not."""
        deviation = self._random("answers", round).standard_normal(self.clients)
        return np.exp(self._own + self.jitter * deviation)

    def _choose(self, round: int, candidates: Active) -> Active:
        asked = min(self.select, len(candidates))
        if asked == 0:
            return candidates
        places = np.sort(without_replacement(len(candidates), asked, **self._stream("over-selection", round)))
        times = self.times(round)[candidates.clients[places]]
        first = np.argsort(times, kind="stable")[: self.k]
        return candidates.only(np.sort(places[first[times[first] <= self.deadline]]))


class RoundRobin(Participation):
    """Client i is active in every tau_i-th round.

    Active when (t + phase_i) mod max(tau_i, 1) = 0: both 0 and 1 mean every round.

    Args:
        clients: N.
        tau_max: the longest period, an int >= 0.
        phase: "zero" starts all clients in phase, so that round 0 has all; "random" draws
            phase_i ~ U{0 .. max(tau_i, 1) - 1}. The paper does not specify it; the periods are the same in both.
        periods: "uniform", the paper's: tau_i ~ U{0 .. tau_max}, drawn once. "half-normal", its authors' public
            code: tau_i = min(round(|z_i|), tau_max), z_i normal with standard deviation 3, so that periods past 10 are
            rare for any tau_max; that code is in phase, and has an ``AtLeast`` of two clients.
        among, seed, first_round: see ``Participation``.

    Attributes:
        tau: int64[N], read-only.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central
    Updates", 2023, the pattern with bounded intervals.

    >>> RoundRobin(3, 1).active(5).clients
    array([0, 1, 2])
    """

    def __init__(
        self,
        clients: int,
        tau_max: int,
        *,
        phase: Literal["zero", "random"] = "zero",
        periods: Literal["uniform", "half-normal"] = "uniform",
        among: Among = None,
        seed: int = 0,
        first_round: First = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.tau_max = whole("tau_max", tau_max, 0, 2**31)
        _require("phase", phase, "zero", "random")
        _require("periods", periods, "uniform", "half-normal")
        if periods == "uniform":
            self.tau = self._random("periods").integers(0, tau_max + 1, clients)
        else:
            z = self._random("half-normal periods").normal(0, 3, clients)
            self.tau = np.minimum(np.rint(np.abs(z)), tau_max).astype(np.int64)
        self.tau.flags.writeable = False
        self._period = np.maximum(self.tau, 1)
        self._phase = np.zeros(clients, np.int64)
        if phase == "random":
            self._phase = self._random("phases").integers(0, self._period)

    def _choose(self, round: int, candidates: Active) -> Active:
        due = (round + self._phase) % self._period == 0
        return candidates.only(due[candidates.clients])


class Schedule(Participation):
    """Client i is present from its arrival until its departure.

    ``first_round="all"`` does not override the schedule: a client that arrives later is absent in round 0.

    Args:
        clients: N, including those that arrive later.
        arrivals: client to the first round in which it is present; the others are present from the start. Keys may be
            strings, as in TOML and JSON.
        departures: client to the first round in which it is absent for good.
        among, seed, first_round: see ``Participation``.

    Attributes:
        arrivals, departures: client to round, by number.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021, Sec. 4.2, 4.3.
    The paper counts rounds from 1: its arrival at t0, with updates from t0 + 1 on, is the round t0 here.

    >>> pattern = Schedule(3, arrivals={2: 10}, departures={0: 20})
    >>> [pattern.active(t).clients.tolist() for t in (9, 10, 20)]
    [[0, 1], [0, 1, 2], [1, 2]]
    """

    overruled: ClassVar[bool] = False

    def __init__(
        self,
        clients: int,
        *,
        arrivals: Mapping[int | str, int] | None = None,
        departures: Mapping[int | str, int] | None = None,
        among: Among = None,
        seed: int = 0,
        first_round: First = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.arrivals = self._rounds("arrivals", arrivals)
        self.departures = self._rounds("departures", departures)
        self._first = np.zeros(self.clients, np.int64)
        self._gone = np.full(self.clients, np.iinfo(np.int64).max)
        for client, arrival in self.arrivals.items():
            self._first[client] = arrival
        for client, departure in self.departures.items():
            self._gone[client] = departure
            if departure <= self._first[client]:
                raise RangeError(
                    f"departures: expected client {client} to leave after round {self._first[client]}, its first, "
                    f"got {departure}"
                )

    def present(self, round: int) -> Clients:
        """The clients that have arrived and not departed; see ``Participation``."""
        candidates = super().present(round)
        return candidates[self._is_present(round)[candidates]]

    def _choose(self, round: int, candidates: Active) -> Active:
        return candidates.only(self._is_present(round)[candidates.clients])

    def _is_present(self, round: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return (self._first <= round) & (round < self._gone)

    def _rounds(self, name: str, given: Mapping[int | str, int] | None) -> dict[int, int]:
        rounds: dict[int, int] = {}
        if not isinstance(given, Mapping | None):
            raise RangeError(f"{name}: expected clients and their rounds, got {given!r}")
        for key, round in ({} if given is None else given).items():
            client = whole(f"{name}: client", _number(key), 0, self.clients - 1)
            if client in rounds:
                raise RangeError(f"{name}: expected client {client} once, got it twice")
            rounds[client] = whole(f"{name}: client {client}", round, 0, 2**53)
        return rounds


class TimeVarying(Participation):
    """Each round a_i ~ U[1, 10], and k clients are drawn without replacement by successive draws.

    Each draw takes i with probability a_i / sum a, the sum over those not drawn yet;
    k = max(1, round(share N)), halves to even, N the number of candidates.

    The weights are drawn anew each round by one law, so every set of k clients is equally likely: over the rounds this
    is uniform sampling, in which plain averaging has no bias either.

    Args:
        clients: N.
        share: P, the share of the clients that is active, in (0, 1].
        among, seed, first_round: see ``Participation``.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central
    Updates", 2023, the time-varying pattern.

    >>> len(TimeVarying(30, 0.1).active(7))
    3
    """

    def __init__(
        self, clients: int, share: float, *, among: Among = None, seed: int = 0, first_round: First = None
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.share = real("share", share, "(0, 1]")

    def _choose(self, round: int, candidates: Active) -> Active:
        if not len(candidates):
            return candidates
        a = self._random("weights", round).uniform(1, 10, self.clients)
        k = max(1, int(np.rint(self.share * len(candidates))))
        drawn = weighted_without_replacement(a[candidates.clients], k, **self._stream("time-varying", round))
        return candidates.only(np.sort(drawn))


class Trace(Participation):
    """Each device follows a trace: its share of the E steps in each round.

    A device whose share is 0 does not take part in that round.

    Args:
        clients: N.
        traces: an argument of ``read_traces`` (a file's path, or ``"flexible"``), or the traces themselves.
        first: |T|, the number of traces to use, from the first on. Default: all.
        assign: "random" gives each device one of the traces with equal probability, once; "order" gives device i
            trace i mod |T|.
        draw: "sample" draws each round's share from the trace, independently; "replay" takes row t of a recorded
            trace in round t, and starts again after its last row. With "order" and as many traces as clients, a file
            is replayed as it was measured, client by client.
        among, seed, first_round: see ``Participation``. Shares of ``among`` are multiplied.

    Attributes:
        traces: the traces in use.
        assigned: int64[N], the trace of each device, read-only.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021: eight traces,
    devices assigned at random to the first |T|. Their standard deviations are the paper's, their means stand-ins.

    >>> pattern = Trace(4, first=5)
    >>> pattern.assigned
    array([4, 4, 0, 3])
    >>> pattern.active(3).steps(10)
    array([ 6,  5, 10,  5])
    """

    def __init__(
        self,
        clients: int,
        traces: str | Path | Sequence[Law] = "flexible",
        *,
        first: int | None = None,
        assign: Literal["random", "order"] = "random",
        draw: Literal["sample", "replay"] = "sample",
        among: Among = None,
        seed: int = 0,
        first_round: First = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        known = read_traces(traces) if isinstance(traces, str | Path) else traces
        if not isinstance(known, Sequence) or not known or not all(isinstance(trace, Law) for trace in known):
            raise RangeError(f"traces: expected at least one trace, and nothing else, got {traces!r}")
        self.traces = tuple(known)[: len(known) if first is None else whole("first", first, 1, len(known))]
        _require("assign", assign, "random", "order")
        _require("draw", draw, "sample", "replay")
        generated = [trace.name for trace in self.traces if not isinstance(trace, Recorded)]
        if draw == "replay" and generated:
            raise RangeError(f"draw: expected 'sample', since trace {generated[0]!r} is not recorded, got 'replay'")
        self.draw = draw
        self.assigned = np.arange(self.clients) % len(self.traces)
        if assign == "random":
            self.assigned = with_replacement(np.ones(len(self.traces)), self.clients, **self._stream("traces", 0))
        self.assigned.flags.writeable = False

    def shares(self, round: int) -> npt.NDArray[np.float64]:
        """The share of E that each device would do in a round, float64[N] in [0, 1]."""
        random = self._random("shares", round)
        shares = np.empty(self.clients)
        for number, trace in enumerate(self.traces):
            its = self.assigned == number
            if self.draw == "replay" and isinstance(trace, Recorded):
                shares[its] = trace.shares[round % len(trace.shares)]
            else:
                shares[its] = trace.draw(random, int(its.sum()))
        return shares

    def _choose(self, round: int, candidates: Active) -> Active:
        return candidates.working(self.shares(round)[candidates.clients])


class Uniform(Participation):
    """k different clients a round, every set of k with the same probability; all candidates if they are fewer.

    Args:
        clients: N.
        k: the number of clients, S in the papers, 1 .. N.
        among, seed, first_round: see ``Participation``.

    Reference: Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably", ICLR 2024, partial
    participation.

    >>> Uniform(1000, 3).active(7).clients
    array([216, 388, 729])
    """

    def __init__(self, clients: int, k: int, *, among: Among = None, seed: int = 0, first_round: First = None) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.k = whole("k", k, 1, self.clients)

    def _choose(self, round: int, candidates: Active) -> Active:
        if len(candidates) <= self.k:
            return candidates
        return candidates.only(np.sort(without_replacement(len(candidates), self.k, **self._stream("uniform", round))))


class Weighted(Participation):
    """k draws a round, each of which takes client i with probability w_i / sum w.

    Without replacement the draws are successive: the sum is over those not drawn yet, and k different clients take part
    (all with a weight > 0 if they are fewer). With replacement the sum is over all, the weights are the probabilities q
    of the paper, and a client that is drawn twice takes part once and counts twice.

    Args:
        clients: N.
        k: the number of draws, >= 1; without replacement at most the number of weights > 0.
        weights: N finite numbers >= 0, not all of them 0; they need not add up to 1.
        replacement: whether draws are with replacement.
        among, seed, first_round: see ``Participation``. Counts of ``among`` are ignored by draws with replacement.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Algorithm 1: K clients with replacement by q.

    >>> drawn = Weighted(4, 6, [0.1, 0.0, 0.3, 0.6], replacement=True).active(0)
    >>> drawn.clients, drawn.counts
    (array([0, 3]), array([1, 5]))
    """

    @ieee
    def __init__(
        self,
        clients: int,
        k: int,
        weights: Sequence[float],
        *,
        replacement: bool = False,
        among: Among = None,
        seed: int = 0,
        first_round: First = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.weights = each("weights", weights, self.clients, "[0, inf)")
        positive, total = int(np.count_nonzero(self.weights)), sum(self.weights.tolist())
        if not 0 < total < math.inf:
            raise RangeError(f"weights: expected a finite sum > 0, got {total!r}")
        self.k = whole("k", k, 1, 2**31 if replacement else positive)
        self.replacement = replacement

    def _choose(self, round: int, candidates: Active) -> Active:
        weights = self.weights[candidates.clients]
        positive = int(np.count_nonzero(weights))
        if not self.replacement:
            drawn = weighted_without_replacement(weights, min(self.k, positive), **self._stream("weighted", round))
            return candidates.only(np.sort(drawn))
        k = self.k if positive else 0
        drawn = with_replacement(weights, k, **self._stream("weighted, with replacement", round))
        places, counts = np.unique(drawn, return_counts=True)
        kept = candidates.only(places)
        return Active(kept.clients, kept.shares, counts.astype(np.int64))


_PATTERNS = (Always, AtLeast, Bernoulli, OverSelection, RoundRobin, Schedule, TimeVarying, Trace, Uniform, Weighted)
REGISTRY: Registry[type[Participation]] = Registry(
    "participation",
    {pattern.__name__: pattern for pattern in _PATTERNS},
    due="a subclass of fedcore.simulation.participation.Participation that has a _choose",
    fits=lambda row: isclass(row) and issubclass(row, Participation) and not isabstract(row),
    group="fedcore.participation",
)
"""The patterns by name."""


def named(name: str, clients: int, **options: Any) -> Participation:
    """Make the pattern of that name.

    Args:
        name: a key of ``REGISTRY``, an entry point's, or ``module:Name`` of your own.
        clients: N.
        options: the pattern's arguments, with ``seed`` and ``first_round``. ``among`` may be a pattern, its name, or a
            mapping of its name and options; a pattern made from a name gets the same seed and ``first_round``.

    Raises:
        UnknownNameError: there is no such pattern.
        RangeError, ...: an argument is outside its range.

    >>> named("Bernoulli", 3, p=0.0).active(0).clients
    array([], dtype=int64)
    >>> both = named("Uniform", 9, k=2, among={"name": "Schedule", "arrivals": {8: 5}})
    >>> both.active(3).clients
    array([0, 5])
    """
    pattern = REGISTRY.find(name)
    among = options.pop("among", None)
    if isinstance(among, str):
        among = {"name": among}
    if isinstance(among, Mapping):
        if "name" not in among:
            raise RangeError(f"among: expected the name of a pattern and its options, got {dict(among)!r}")
        given = {key: options[key] for key in ("seed", "first_round") if key in options}
        among = named(**{"clients": clients, **given, **among})
    return pattern(clients, **options, **({} if among is None else {"among": among}))
