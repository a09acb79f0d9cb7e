"""Participation patterns: the clients of each round, and the share of its local steps that each client does."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from inspect import isabstract, isclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.arrays import F64, ieee, own_classes
from fedcore.errors import RangeError, ShapeError, UnknownNameError
from fedcore.options import ROUNDING, RoundPolicy, as_policy
from fedcore.runtime import generator
from fedcore.sampling import bernoulli, weighted_without_replacement, with_replacement, without_replacement
from fedcore.sim.checks import Checked, Real, Whole
from fedcore.sim.traces import Generated, Law, Logged, Recorded, read_traces
from fedcore.validation import Registry, Represented, arguments_of, check_integer, check_number

__all__ = ["REGISTRY", "Active", "Always", "AtLeast", "Bernoulli", "Fluctuating", "Generated", "Markov"]
__all__ += ["OverSelection", "Participation", "Recorded", "RoundRobin", "Schedule", "TimeVarying", "Trace", "Uniform"]
__all__ += ["Weighted", "class_chances", "named", "read_traces"]

Clients = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Active(Represented):
    """The clients of one round.

    A client that completes its work in a round does E local steps. ``Participation`` patterns return shares of E, not
    numbers of steps: E depends on the client's data if the work is a number of epochs. An active client does at least
    one step.

    Attributes:
        clients: int64[k], ascending, without repetition.
        shares: float64[k] in (0, 1], the share of its E local steps that each client does. Default: 1 for all clients.
        counts: int64[k], >= 1, how often each client was drawn; None without draws with replacement.

    >>> Active(np.array([2, 5]), shares=np.array([0.5, 0.01])).steps(20)
    array([10,  1])
    """

    clients: Clients
    shares: F64 | None = None
    counts: Clients | None = None

    def __len__(self) -> int:
        return len(self.clients)

    def fits(self, clients: int) -> bool:
        """Whether clients and shares are as described above, for N clients."""
        own, shares = self.clients, self.shares
        if not (isinstance(own, np.ndarray) and own.ndim == 1 and own.dtype == np.int64):
            return False
        fit = isinstance(shares, np.ndarray) and shares.shape == own.shape and ((shares > 0) & (shares <= 1)).all()
        return bool((np.diff(own, prepend=-1, append=clients) > 0).all() and (shares is None or fit))

    def only(self, kept: npt.NDArray[Any]) -> "Active":
        """Return the clients at some positions, bool[k] or ascending int64[m], with their shares and counts."""
        shares, counts = (None if one is None else one[kept] for one in (self.shares, self.counts))
        return Active(self.clients[kept], shares, counts)

    @ieee
    def working(self, shares: F64) -> "Active":
        """Multiply shares by factors, float64[k] in [0, 1]; return the clients whose share is then positive."""
        product = shares if self.shares is None else self.shares * shares
        return Active(self.clients, product, self.counts).only(product > 0)

    def steps(self, full: int | Clients) -> Clients:
        """Return s_i, int64[k], the local steps of each client: its share of E, rounded down, but at least one.

        ``full`` is E, the number of steps of a client whose share is 1: an int >= 1 for all clients, or int64[k].
        """
        complete = np.broadcast_to(np.asarray(full, np.int64), self.clients.shape)
        if self.shares is None:
            return complete.copy()
        return np.maximum(np.floor(self.shares * complete + ROUNDING), 1).astype(np.int64)


@ieee
def _by_client(name: str, values: Sequence[float], clients: int, interval: str) -> F64:
    """Return a read-only copy of ``values``, float64[clients]; require one number in ``interval`` for each client."""
    shape = np.shape(values)
    if shape != (clients,):
        raise ShapeError(f"{name}: expected {clients} numbers, one for each client, got shape {list(shape)}")
    array = np.array([check_number(f"{name}[{client}]", value, interval) for client, value in enumerate(values)])
    array.flags.writeable = False
    return array


@dataclass(eq=False, repr=False)
class Participation(Checked, Represented, ABC):
    """A pattern of participation: it selects the clients of each round.

    A pattern selects among the clients of an inner pattern, or among all: ``Uniform(50, 5, among=Bernoulli(50, 0.3))``
    draws five of the clients that ``Bernoulli`` selects. The order matters: ``Uniform`` with ``among=Schedule(...)``
    draws five of the present clients. A ``Schedule`` with ``among=Uniform(...)`` first draws five of all clients, and
    then drops absent ones. All patterns have these arguments:

    Args:
        clients: N; the clients are 0 .. N-1.
        among: the inner pattern, over the same N clients. Default: all clients.
        seed: the run's seed, 0 .. 2^64 - 1.
        first_round: "all" skips the pattern in round 0, so that all candidates take part, as the MimiC paper's analysis
            assumes (Sec. 5).

    Determinism: ``active(t)`` depends only on the arguments and t. So all algorithms of a comparison see the same
    active sets, and a round can be repeated without the rounds before it. Nested patterns share no random numbers.
    Bernoulli, RoundRobin, Trace and Schedule decide for each client separately. If only these patterns are nested,
    their order does not matter.
    """

    overruled: ClassVar[bool] = True
    """Whether ``first_round="all"`` skips the pattern. False for a pattern that describes facts, such as a schedule."""

    clients: Annotated[int, Whole(1, 2**53)]
    _: KW_ONLY
    among: "Participation | None" = None
    seed: Annotated[int, Whole(0, 2**64 - 1)] = 0
    first_round: Literal["all"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.among is not None and not isinstance(self.among, Participation):
            raise RangeError(f"among={self.among!r}: must be a participation pattern")
        if self.among is not None and self.among.clients != self.clients:
            raise RangeError(f"among: has {self.among.clients} clients; this pattern has {self.clients}")

    def _facts(self) -> dict[str, Any]:
        return arguments_of(self)

    @ieee
    def active(self, round: int) -> Active:
        """Return the clients that take part in a round (counted from 0): 0 to N clients, ascending."""
        round = check_integer("round", round, 0, 2**63 - 1)
        candidates = self.candidates(round)
        if round == 0 and self.first_round == "all" and self.overruled:
            return candidates
        chosen = self._choose(round, candidates)
        if chosen is not candidates and not (isinstance(chosen, Active) and chosen.fits(self.clients)):
            due = f"an Active with clients, ascending int64[k] in 0 .. {self.clients - 1}, and shares in (0, 1] or None"
            raise RangeError(f"participation: {type(self).__name__}._choose must return {due}, got {chosen!r:.200}")
        return chosen

    def candidates(self, round: int) -> Active:
        """Return the clients of a round among which this pattern selects: those of the inner pattern, or all."""
        return Active(np.arange(self.clients)) if self.among is None else self.among.active(self.inner_round(round))

    def present(self, round: int) -> Clients:
        """Return the clients in a round, active or not, that no ``Schedule`` excludes: int64[m], ascending."""
        return np.arange(self.clients) if self.among is None else self.among.present(self.inner_round(round))

    def inner_round(self, round: int) -> int:
        """Return the round for which the inner pattern is asked: the same, except on a clock."""
        return round

    @abstractmethod
    def _choose(self, round: int, candidates: Active) -> Active:
        """Select among the candidates: a pure function of the arguments, independent of ``first_round``."""

    def _purpose(self, name: str) -> str:
        """Return the purpose of random numbers, which differs between nested patterns of one class of fedcore."""
        kinds = [next((k for k in type(one).__mro__ if k in _PATTERNS), type(one)) for one in nested(self)]
        below = kinds[1:].count(kinds[0])
        return f"participation: {name}" + (f" ({below + 1})" if below else "")

    def _stream(self, name: str, round: int) -> dict[str, Any]:
        """Return the arguments of a draw in ``fedcore.sampling``."""
        return {"seed": self.seed, "round": round, "purpose": self._purpose(name)}

    def _random(self, name: str, round: int = 0) -> np.random.Generator:
        return generator(self.seed, self._purpose(name), round=round)


class Always(Participation):
    """Full participation; in a composition it changes nothing.

    >>> Always(3).active(7).clients
    array([0, 1, 2])
    """

    def _choose(self, round: int, candidates: Active) -> Active:
        return candidates


@dataclass(eq=False, repr=False)
class AtLeast(Participation):
    """The clients of ``among`` if they are at least ``least``, else ``least`` clients drawn uniformly.

    The draw is from all present clients, not only from those of ``among``; drawn clients do all their steps. If fewer
    than ``least`` clients are present, all of them take part. The MimiC paper does not mention this rule, but its
    authors' public code applies it with two clients.

    >>> len(AtLeast(30, among=Bernoulli(30, 0.0)).active(3))
    2
    """

    least: Annotated[int, Whole(1, "clients")] = 2

    def _choose(self, round: int, candidates: Active) -> Active:
        if len(candidates) >= self.least:
            return candidates
        present = self.present(round)
        if len(present) <= self.least:
            return Active(present)
        drawn = without_replacement(len(present), self.least, **self._stream("at least", round))
        return Active(present[np.sort(drawn)])


Chances: TypeAlias = float | Sequence[float] | Mapping[int | str, Any]
"""Probabilities of the clients; see ``Bernoulli``. In an experiment also the options of ``class_chances``."""


@dataclass(eq=False, repr=False)
class Bernoulli(Participation):
    """Client i is active with probability p_i, or p_i^t in round t, independently of other clients and rounds.

    Args:
        p: one probability in [0, 1] for all clients, or N of them. Or a mapping from rounds to such values, each valid
            from its round on, with an entry for round 0. The keys may be strings, as in TOML and JSON. The attribute
            ``p`` has read-only arrays, float64[N].
        levels: L > 1 spreads one p over L levels up to 1: p_i = p + (i mod L)(1 - p)/(L - 1). The MimiC paper has one
            p; its authors' public code has five levels.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, the static pattern; its Assumption 5 and Theorem 3 have p_i^t.

    >>> Bernoulli(4, 1.0).active(3).clients
    array([0, 1, 2, 3])
    >>> Bernoulli(6, 0.2, levels=5).p
    array([0.2, 0.4, 0.6, 0.8, 1. , 0.2])
    >>> late = Bernoulli(3, {0: 1.0, 10: [1.0, 1.0, 0.0]})
    >>> late.active(9).clients, late.active(10).clients
    (array([0, 1, 2]), array([0, 1]))
    """

    p: Chances
    _: KW_ONLY
    levels: Annotated[int, Whole(1, 2**31)] = 1
    _stream_name: ClassVar[str] = "bernoulli"

    @ieee
    def __post_init__(self) -> None:
        super().__post_init__()
        p: Any = self.p if isinstance(self.p, Mapping) else {0: self.p}
        by_round: dict[int, F64] = {}
        for round, own in p.items():
            name = f"p[{round}]" if len(p) > 1 else "p"
            by_round[check_integer("p: round", _number(round), 0, 2**53)] = self._probabilities(name, own)
        if len(by_round) < len(p) or 0 not in by_round:
            raise RangeError(f"p: has rounds {list(p)}; the rounds must include 0, without duplicates")
        self._by_round = sorted(by_round.items())
        vars(self).update(p=by_round[0] if len(by_round) == 1 else dict(self._by_round))

    def _probabilities(self, name: str, p: float | Sequence[float]) -> F64:
        """Return p_i of each client, float64[N]."""
        levels = self.levels
        if np.ndim(p) > 0 and levels > 1:
            raise RangeError(f"levels={levels}: must be 1 if each client has its own p")
        if isinstance(p, Sequence | np.ndarray) and not isinstance(p, str):
            return _by_client(name, list(p), self.clients, "[0, 1]")
        least = check_number(name, p, "[0, 1]")
        level = np.arange(self.clients) % levels / max(levels - 1, 1)
        p_i: F64 = least + level * (1 - least)
        p_i.flags.writeable = False
        return p_i

    def _choose(self, round: int, candidates: Active) -> Active:
        # All clients are drawn, so that a client's result does not depend on the other candidates.
        drawn = bernoulli(self.clients, self.chances(round), **self._stream(self._stream_name, round))
        return candidates.only(np.isin(candidates.clients, drawn, assume_unique=True))

    def chances(self, round: int) -> F64:
        """Return the probability of each client in a round, float64[N]."""
        return next(p for start, p in reversed(self._by_round) if start <= round)


@dataclass(eq=False, repr=False)
class Fluctuating(Bernoulli):
    """Client i is active with probability p_i f(t) in round t, independently. f has a period of P rounds.

    - "sine": f(t) = g sin(2 pi t / P) + 1 - g.
    - "staircase": f(t) = 1 in the first half of each period, and 1 - g in the second.

    Args:
        p: as for ``Bernoulli``.
        shape: "sine" or "staircase".
        period: P, at least 1.
        depth: g, in [0, 1]. Default: 0.3 for a sine and 0.6 for a staircase, as in the paper's public code.
        least: probabilities below this number are 0 instead. The paper's "interleaved sine" is a sine with 0.1.

    Reference: Xiang, Ioannidis, Yeh, Joe-Wong, Su, "Efficient Federated Learning against Heterogeneous and
    Non-stationary Client Unavailability", NeurIPS 2024, arXiv 2409.17446.

    >>> day = Fluctuating(2, [1.0, 0.5], shape="staircase", period=4, least=0.3)
    >>> [day.chances(t).tolist() for t in (0, 1, 2, 3)]
    [[1.0, 0.5], [1.0, 0.5], [0.4, 0.0], [0.4, 0.0]]
    """

    _: KW_ONLY
    shape: Literal["sine", "staircase"] = "sine"
    period: Annotated[int, Whole(1, 2**31)] = 20
    depth: Annotated[float | None, Real("[0, 1]")] = None
    least: Annotated[float, Real("[0, 1]")] = 0.0

    _stream_name: ClassVar[str] = "fluctuating"

    @ieee
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth is None:
            self.depth = 0.3 if self.shape == "sine" else 0.6

    @ieee
    def chances(self, round: int) -> F64:
        """Return p_i f(t) of each client, float64[N]; 0 below ``least``."""
        at = round % self.period
        assert self.depth is not None
        if self.shape == "sine":
            f = self.depth * math.sin(2 * math.pi * at / self.period) + (1 - self.depth)
        else:
            f = 1.0 if 2 * at < self.period else 1 - self.depth
        p = np.clip(super().chances(round) * f, 0, 1)
        return np.where(p < self.least, 0.0, p)


@dataclass(eq=False, repr=False)
class Markov(Participation):
    """Each client is up or down, by its own chain with two states; clients that are up are active.

    A client that is down comes up in the next round with probability p_up, and a client that is up goes down with
    probability p_down. Round 0 has the stationary law: client i is up with probability p_up / (p_up + p_down). The
    mean length of an absence is 1 / p_up rounds. With p_up + p_down = 1 the rounds are independent (``Bernoulli``).

    Args:
        p_up, p_down: one probability in [0, 1] for all clients, or N of them. The sum of a client's two is > 0.

    Cost: a round that follows the last one costs O(N); any other round t costs O(t N).

    >>> pattern = Markov(4, p_up=0.1, p_down=[0.0, 0.1, 0.3, 0.9])
    >>> pattern.stationary.round(3)
    array([1.  , 0.5 , 0.25, 0.1 ])
    """

    p_up: Chances
    p_down: Chances

    @ieee
    def __post_init__(self) -> None:
        super().__post_init__()
        self._up, self._down = up, down = self._each("p_up", self.p_up), self._each("p_down", self.p_down)
        vars(self).update(p_up=up, p_down=down)
        total = up + down
        if (still := np.flatnonzero(total == 0)).size:
            raise RangeError(f"p_up: client {still[0]} has p_up = p_down = 0; one of them must be > 0")
        self.stationary: F64 = up / total
        self.stationary.flags.writeable = False
        self._last: tuple[int, npt.NDArray[np.bool_]] | None = None

    def _each(self, name: str, p: Any) -> F64:
        return _by_client(name, [p] * self.clients if np.ndim(p) == 0 else list(p), self.clients, "[0, 1]")

    def _choose(self, round: int, candidates: Active) -> Active:
        at, up = self._last or (-1, np.zeros(0, np.bool_))
        if at > round:
            at = -1
        while at < round:
            at += 1
            p = np.where(up, 1 - self._down, self._up) if at else self.stationary
            up = self._random("markov", at).random(self.clients) < p
        self._last = at, up  # only saves time: an earlier or later round has the same clients without it
        return candidates.only(up[candidates.clients])


@ieee
def class_chances(
    labels: Sequence[npt.NDArray[np.integer[Any]]],
    *,
    seed: int,
    popularity: Literal["halves", "dirichlet"] = "halves",
    alpha: float = 0.1,
    mean: float | None = None,
    least: float = 0.0,
) -> F64:
    """Return p_i = sum_c u_c m_ic of each client, float64[N]; m_ic is the share of class c in the client's examples.

    Clients with similar data thus have similar probabilities. In an experiment, a table with ``popularity`` is a ``p``:
    ``participation = {name = "Bernoulli", p = {popularity = "halves"}}``.

    Args:
        labels: the labels of each client's examples, integers >= 0.
        seed: the run's seed.
        popularity: the law of u, one number per class. "halves": u_c ~ U(0, 1) for the first half of the classes, and
            U(0, 0.5) for the others, as in the public code of Xiang et al. (NeurIPS 2024). "dirichlet": u is drawn from
            a symmetric Dirichlet law, as in Wang and Ji (ICLR 2024).
        alpha: the parameter of the Dirichlet law, > 0.
        mean: scales all p_i so that this is their mean, in (0, 1]. Default: no scaling.
        least: smaller p_i are raised to this number, in [0, 1]. Numbers above 1 become 1.

    >>> class_chances([np.array([0, 0]), np.array([1, 1]), np.array([0, 1])], seed=1).round(3)
    array([0.42 , 0.317, 0.369])
    """
    if popularity not in ("halves", "dirichlet"):
        raise UnknownNameError.of("popularity", popularity, ("halves", "dirichlet"))
    check_number("alpha", alpha, "(0, 1e6]")
    check_number("least", least, "[0, 1]")
    labels = own_classes("labels", labels)
    classes = 1 + max(int(own.max()) for own in labels)
    mix = np.array([np.bincount(own, minlength=classes) / len(own) for own in labels])
    random = generator(seed, "participation: class popularity")
    if popularity == "halves":
        u = random.random(classes) * np.where(2 * np.arange(classes) < classes, 1.0, 0.5)
    else:
        u = random.dirichlet(np.full(classes, alpha))
    p: F64 = mix @ u
    if mean is not None:
        p = p * (check_number("mean", mean, "(0, 1]") / p.mean())
    return np.clip(p, least, 1)


def _number(key: object) -> object:
    """Return a mapping's key as a number if possible, since keys in TOML and JSON are strings."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


@dataclass(eq=False, repr=False)
class OverSelection(Participation):
    """The server asks more than k clients, drawn uniformly without replacement, and keeps the first k that answer.

    Client i answers in round t after exp(spread a_i + jitter b_it). a and b are standard normal: a is drawn once per
    client, b in each round. The median of these times is 1. As in practice, fast clients are kept more often than slow
    clients. This model of the times is fedcore's own. Shares of work do not change the times.

    Args:
        k: the number of answers that the server waits for, 1 .. N.
        policy: a ``RoundPolicy`` or a mapping of its fields, of which the pattern uses two. ``over_selection`` sets the
            number of drawn clients, at most N. ``deadline`` is the time at which the server stops waiting. Default:
            1.3 k clients, as in production systems, and no deadline.
        spread: the standard deviation between clients of the logarithm of their times, >= 0.
        jitter: the standard deviation between rounds of the logarithm of a client's times, >= 0.

    Reference: Bonawitz et al., "Towards Federated Learning at Scale: System Design", 2019: 130 % of the target number
    are selected.

    >>> pattern = OverSelection(100, 10)
    >>> pattern.policy.asked(10), len(pattern.active(3))
    (13, 10)
    """

    k: Annotated[int, Whole(1, "clients")]
    _: KW_ONLY
    policy: RoundPolicy | Mapping[str, Any] = RoundPolicy(over_selection=1.3)  # noqa: RUF009  # a frozen value
    spread: Annotated[float, Real("[0, 10]")] = 0.5
    jitter: Annotated[float, Real("[0, 10]")] = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy = as_policy(self.policy)
        if replace(self.policy, over_selection=1.0, deadline=None) != RoundPolicy():
            raise RangeError(f"policy={self.policy!r}: the pattern uses only over_selection and deadline")
        self._own = self.spread * self._random("speeds").standard_normal(self.clients)

    def times(self, round: int) -> npt.NDArray[np.float64]:
        """Return the time until each client would answer in a round, whether it is drawn or not: float64[N]."""
        deviation = self._random("answers", round).standard_normal(self.clients)
        return np.exp(self._own + self.jitter * deviation)

    def _choose(self, round: int, candidates: Active) -> Active:
        assert isinstance(self.policy, RoundPolicy)
        asked = min(self.policy.asked(self.k), len(candidates))
        if asked == 0:
            return candidates
        places = np.sort(without_replacement(len(candidates), asked, **self._stream("over-selection", round)))
        times = self.times(round)[candidates.clients[places]]
        first = np.argsort(times, kind="stable")[: self.k]
        if self.policy.deadline is not None:
            first = first[times[first] <= self.policy.deadline]
        return candidates.only(np.sort(places[first]))


@dataclass(eq=False, repr=False)
class RoundRobin(Participation):
    """Client i is active in every tau_i-th round: if (t + phase_i) mod max(tau_i, 1) = 0.

    Both tau_i = 0 and tau_i = 1 mean every round. The attribute ``tau`` has the periods, int64[N].

    Args:
        tau_max: the longest period, an int >= 0.
        phase: "zero" starts all clients in phase, so that all are active in round 0. "random" draws phase_i uniformly
            from 0 .. max(tau_i, 1) - 1. The paper does not specify it. The periods do not depend on it.
        periods: "uniform" draws tau_i ~ U{0 .. tau_max} once, as in the paper. "half-normal" is from its authors'
            public code: tau_i = min(round(|z_i|), tau_max), z_i normal with standard deviation 3, so that periods above
            10 are rare for any tau_max. That code is in phase, and has an ``AtLeast`` of two clients.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, the pattern with bounded intervals.

    >>> RoundRobin(3, 1).active(5).clients
    array([0, 1, 2])
    """

    tau_max: Annotated[int, Whole(0, 2**31)]
    _: KW_ONLY
    phase: Literal["zero", "random"] = "zero"
    periods: Literal["uniform", "half-normal"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.periods == "uniform":
            self.tau = self._random("periods").integers(0, self.tau_max + 1, self.clients)
        else:
            z = self._random("half-normal periods").normal(0, 3, self.clients)
            self.tau = np.minimum(np.rint(np.abs(z)), self.tau_max).astype(np.int64)
        self.tau.flags.writeable = False
        self._period = np.maximum(self.tau, 1)
        self._phase = np.zeros(self.clients, np.int64)
        if self.phase == "random":
            self._phase = self._random("phases").integers(0, self._period)

    def _choose(self, round: int, candidates: Active) -> Active:
        is_active = (round + self._phase) % self._period == 0
        return candidates.only(is_active[candidates.clients])


@dataclass(eq=False, repr=False)
class Schedule(Participation):
    """Client i is present from its arrival until its departure.

    ``first_round="all"`` does not override the schedule: a client that arrives later is absent in round 0.

    Args:
        clients: N, including clients that arrive later.
        arrivals: maps a client to the first round in which it is present; other clients are present from the start.
            Keys may be strings, as in TOML and JSON.
        departures: maps a client to the first round from which it is permanently absent.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021, Sec. 4.2, 4.3.
    The paper counts rounds from 1: an arrival at its t0, with updates from t0 + 1 on, is an arrival in round t0.

    >>> pattern = Schedule(3, arrivals={2: 10}, departures={0: 20})
    >>> [pattern.active(t).clients.tolist() for t in (9, 10, 20)]
    [[0, 1], [0, 1, 2], [1, 2]]
    """

    overruled: ClassVar[bool] = False

    _: KW_ONLY
    arrivals: Mapping[int | str, int] | None = None
    departures: Mapping[int | str, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        arrivals, departures = (self._rounds(name, getattr(self, name)) for name in ("arrivals", "departures"))
        self.moves = arrivals, departures
        vars(self).update(arrivals=arrivals, departures=departures)
        self._first = np.zeros(self.clients, np.int64)
        self._end = np.full(self.clients, np.iinfo(np.int64).max)
        self._first[list(arrivals)] = list(arrivals.values())
        self._end[list(departures)] = list(departures.values())
        for client, departure in departures.items():
            if departure <= (first := self._first[client]):
                raise RangeError(f"departures: client {client} departs in round {departure}, but arrives in {first}")

    def present(self, round: int) -> Clients:
        """Return the clients that have arrived and not departed; see ``Participation``."""
        candidates = super().present(round)
        return candidates[self._is_present(round)[candidates]]

    def _choose(self, round: int, candidates: Active) -> Active:
        return candidates.only(self._is_present(round)[candidates.clients])

    def _is_present(self, round: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return (self._first <= round) & (round < self._end)

    def _rounds(self, name: str, by_key: Mapping[int | str, int] | None) -> dict[int, int]:
        rounds: dict[int, int] = {}
        if not isinstance(by_key, Mapping | None):
            raise RangeError(f"{name}={by_key!r}: must map clients to rounds")
        for key, round in (by_key or {}).items():
            client = check_integer(f"{name}: client", _number(key), 0, self.clients - 1)
            if client in rounds:
                raise RangeError(f"{name}: has client {client} twice")
            rounds[client] = check_integer(f"{name}: client {client}", round, 0, 2**53)
        return rounds


@dataclass(eq=False, repr=False)
class TimeVarying(Participation):
    """k clients a round, by successive draws with weights a_i ~ U[1, 10] that are new in each round.

    Each draw selects client i with probability a_i / sum a, where the sum is over the clients not drawn yet. k is
    max(1, round(share N)) for N candidates, with halves rounded to even, and ``share`` (P in the paper) in (0, 1].

    All weights have the same law, so every set of k clients is equally likely. Over the rounds, this is uniform
    sampling, in which plain averaging has no bias.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, the time-varying pattern.

    >>> len(TimeVarying(30, 0.1).active(7))
    3
    """

    share: Annotated[float, Real("(0, 1]")]

    def _choose(self, round: int, candidates: Active) -> Active:
        if not len(candidates):
            return candidates
        a = self._random("weights", round).uniform(1, 10, self.clients)
        k = max(1, int(np.rint(self.share * len(candidates))))
        drawn = weighted_without_replacement(a[candidates.clients], k, **self._stream("time-varying", round))
        return candidates.only(np.sort(drawn))


@dataclass(eq=False, repr=False)
class Trace(Participation):
    """Each device follows a trace: its share of the E local steps in each round.

    A device whose share is 0 does not take part in that round. If ``among`` gives shares too, they are multiplied.

    Args:
        traces: an argument of ``read_traces`` (a file's path, or ``"flexible"``), or the traces themselves.
        first: |T|, the number of traces to use, from the first one on. Default: all.
        assign: "random" assigns each device a trace with equal probability, once; "order" assigns device i the trace
            i mod |T|. Default: "order" for a log of rounds and clients, else "random".
        draw: "sample" draws each round's share from the trace, independently. "replay" uses row t of a recorded trace
            in round t, and restarts after its last row. With "order" and one trace per client, each client replays its
            own trace. Default: "replay" for a log, else "sample".

    Attributes:
        traces: the traces in use.
        assigned: int64[N], the trace of each device, read-only.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021: eight traces,
    devices assigned at random to the first |T|. The paper gives the standard deviations of the traces, not the means.

    >>> pattern = Trace(4, first=5)
    >>> pattern.assigned
    array([4, 4, 0, 3])
    >>> pattern.active(3).steps(10)
    array([ 6,  5, 10,  5])
    """

    traces: str | Path | Sequence[Law] = "flexible"
    _: KW_ONLY
    first: int | None = None
    assign: Literal["random", "order"] | None = None
    draw: Literal["sample", "replay"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        traces, first = self.traces, self.first
        known = read_traces(traces, self.clients) if isinstance(traces, str | Path) else traces
        if not isinstance(known, Sequence) or not known or not all(isinstance(trace, Law) for trace in known):
            raise RangeError(f"traces={traces!r}: must be a sequence of at least one trace")
        self._laws = tuple(known)[: len(known) if first is None else check_integer("first", first, 1, len(known))]
        vars(self).update(traces=self._laws)
        logged = all(isinstance(trace, Logged) for trace in known)
        if logged and len(known) != self.clients:
            raise RangeError(f"traces: the log has {len(known)} clients, not {self.clients}; use read_traces(clients=)")
        self.assign = self.assign or ("order" if logged else "random")
        self.draw = self.draw or ("replay" if logged else "sample")
        generated = [trace.name for trace in self._laws if not isinstance(trace, Recorded)]
        if self.draw == "replay" and generated:
            raise RangeError(f"draw='replay': trace {generated[0]!r} was generated and not recorded; use draw='sample'")
        self.assigned = np.arange(self.clients) % len(self._laws)
        if self.assign == "random":
            self.assigned = with_replacement(np.ones(len(self._laws)), self.clients, **self._stream("traces", 0))
        self.assigned.flags.writeable = False

    def check_names(self, names: Sequence[str]) -> None:
        """Raise RangeError if a log's clients have other names than those of the data, N strings by number.

        A log that numbers the clients from 0 fits any data whose names are not numbers themselves.
        """
        found = [trace.name for trace in self._laws if isinstance(trace, Logged)]
        by_number = found == [str(client) for client in range(self.clients)] and not any(map(str.isdecimal, names))
        if len(found) < self.clients or by_number:
            return
        for client, (name, logged) in enumerate(zip(names, found, strict=True)):
            one, other = (int(each) if each.isdecimal() else each.strip() for each in (name, logged))
            if one != other:
                raise RangeError(
                    f"traces: client {client} is {name!r} in the data and {logged!r} in the log; write the same "
                    "names in both, and numbers as integers"
                )

    def shares(self, round: int) -> F64:
        """Return the share of E that each device would do in a round, float64[N] in [0, 1]."""
        if self.draw == "replay":
            of_round = [one.shares[round % len(one.shares)] for one in self._laws if isinstance(one, Recorded)]
            return np.array(of_round, np.float64)[self.assigned]
        random = self._random("shares", round)
        shares = np.empty(self.clients)
        for number, trace in enumerate(self._laws):
            devices = self.assigned == number
            shares[devices] = trace.draw(random, int(devices.sum()))
        return shares

    def _choose(self, round: int, candidates: Active) -> Active:
        return candidates.working(self.shares(round)[candidates.clients])


@dataclass(eq=False, repr=False)
class Uniform(Participation):
    """k different clients a round (S in the papers); every set of k candidates is equally likely.

    With fewer than k candidates, all of them take part.

    Reference: Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably", ICLR 2024, partial
    participation.

    >>> Uniform(1000, 3).active(7).clients
    array([216, 388, 729])
    """

    k: Annotated[int, Whole(1, "clients")]

    def _choose(self, round: int, candidates: Active) -> Active:
        if len(candidates) <= self.k:
            return candidates
        return candidates.only(np.sort(without_replacement(len(candidates), self.k, **self._stream("uniform", round))))


@dataclass(eq=False, repr=False)
class Weighted(Participation):
    """k draws a round, each of which selects client i with probability w_i / sum w.

    Without replacement, draws are successive: the sum is over the clients not drawn yet. k different clients take part,
    or all with a positive weight if these are fewer.

    With replacement, the sum is over all clients, and the weights are the paper's probabilities q. A client that is
    drawn twice takes part once and counts twice. The counts of ``among`` are ignored.

    Args:
        k: the number of draws, >= 1; without replacement at most the number of positive weights.
        weights: N finite numbers >= 0, not all 0; they need not add up to 1.
        replacement: whether to draw with replacement.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Algorithm 1: K clients with replacement by q.

    >>> drawn = Weighted(4, 6, [0.1, 0.0, 0.3, 0.6], replacement=True).active(0)
    >>> drawn.clients, drawn.counts
    (array([0, 3]), array([1, 5]))
    """

    k: int
    weights: Sequence[float]
    _: KW_ONLY
    replacement: bool = False

    @ieee
    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights = weights = _by_client("weights", self.weights, self.clients, "[0, inf)")
        vars(self).update(weights=weights)
        positive, total = int(np.count_nonzero(weights)), sum(weights.tolist())
        if not 0 < total < math.inf:
            raise RangeError(f"weights: their sum must be finite and > 0, got {total!r}")
        self.k = check_integer("k", self.k, 1, 2**31 if self.replacement else positive)

    def _choose(self, round: int, candidates: Active) -> Active:
        weights = self._weights[candidates.clients]
        positive = int(np.count_nonzero(weights))
        if not self.replacement:
            drawn = weighted_without_replacement(weights, min(self.k, positive), **self._stream("weighted", round))
            return candidates.only(np.sort(drawn))
        k = self.k if positive else 0
        drawn = with_replacement(weights, k, **self._stream("weighted, with replacement", round))
        places, counts = np.unique(drawn, return_counts=True)
        kept = candidates.only(places)
        return Active(kept.clients, kept.shares, counts.astype(np.int64))


def nested(pattern: Participation | None) -> Iterator[Participation]:
    """Yield a pattern and its inner patterns."""
    while pattern is not None:
        yield pattern
        pattern = pattern.among


_PATTERNS = (
    *(Always, AtLeast, Bernoulli, Fluctuating, Markov, OverSelection, RoundRobin, Schedule, TimeVarying, Trace),
    *(Uniform, Weighted),
)
REGISTRY: Registry[type[Participation]] = Registry(
    "participation",
    {pattern.__name__: pattern for pattern in _PATTERNS},
    expected="a subclass of fedcore.sim.participation.Participation that has a _choose",
    fits=lambda row: isclass(row) and issubclass(row, Participation) and not isabstract(row),
    group="fedcore.participation",
)
"""The patterns, keyed by name."""


def named(
    name: str, clients: int, *, labels: Sequence[npt.NDArray[np.integer[Any]]] | None = None, **options: Any
) -> Participation:
    """Make the pattern with a given name.

    Args:
        name: a key of ``REGISTRY``, the name of an entry point, or ``module:Name`` of a custom pattern.
        clients: N.
        labels: the labels of each client's examples, for options that are tables with ``popularity``; see
            ``class_chances``. Default: such options are only checked, and all clients get the same probability.
        options: the pattern's arguments, including ``seed`` and ``first_round``. ``among`` may be a pattern, its name,
            or a mapping with its name and options; a named inner pattern gets the same ``seed`` and ``first_round``.

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
            raise RangeError(f"among={dict(among)!r}: needs the name of a pattern")
        common = {key: options[key] for key in ("seed", "first_round") if key in options}
        among = named(**{"clients": clients, "labels": labels, **common, **among})
    for key, value in options.items():
        if isinstance(value, Mapping) and "popularity" in value:
            if unknown := value.keys() - {"popularity", "alpha", "mean", "least"}:
                raise UnknownNameError.of(key, min(unknown), ["popularity", "alpha", "mean", "least"])
            known = [np.arange(2)] * clients if labels is None else labels
            options[key] = class_chances(known, seed=options.get("seed", 0), **value)
    return pattern(clients, **options, **({} if among is None else {"among": among}))
