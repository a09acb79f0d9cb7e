"""Learning rates as functions of the round, including those of the papers' theorems.

Rounds count from 0. ``PerCohort`` also needs the number of clients; its method ``over`` returns a function of the
round. A rate that changes with each local step has a method ``of_step(round, step)`` (``InverseStep``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import isclass
from typing import Any, ClassVar, Protocol, Self, SupportsFloat

from fedcore.arrays import ieee
from fedcore.errors import RangeError
from fedcore.validation import (
    Checked,
    Registry,
    check_integer,
    check_number,
    describe_interval,
    failed,
    in_interval,
    is_number,
    name_of,
)

POSITIVE = "(0, inf)"
IN_FLOAT32 = "(0, 3.4028234663852886e38]"
"""The range of a round's rate, which may decay."""


class Rate(Protocol):
    """A function from a round, counted from 0, to a positive number.

    A rate that depends on the length of the run, such as ``Horizon``, sets ``of_whole_run = True``. A run with such a
    rate cannot be extended.
    """

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        ...


@dataclass(frozen=True)
class Constant:
    """The rate ``value`` in every round.

    >>> Constant(0.1)(7)
    0.1
    """

    value: float

    def __post_init__(self) -> None:
        check_number("rate", self.value, POSITIVE)

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        return self.value


@dataclass(frozen=True)
class Exponential(Checked):
    """The rate ``initial * decay**round``; the MimiC paper's experiments use 0.01 * 0.95^t.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, Sec. 7.

    >>> Exponential(0.01, 0.5)(2)
    0.0025
    """

    initial: float
    decay: float

    _intervals = (("initial", POSITIVE), ("decay", "(0, 1]"))

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        return self.initial * self.decay**round


@dataclass(frozen=True)
class Horizon(Checked):
    """The constant rate eta = (1 / L) sqrt(K / T) for a run of known length.

    Args:
        L: the smoothness of the clients' objectives.
        K: the number of clients drawn in each round; in a network, all p nodes (Theorem 3.4).
        T: the number of local steps in the whole run.

    For long runs this rate is below ``bench.papers.theory.local_sgd.largest_rate``, up to which a bound holds, and
    below the paper's largest rate (eq. 25, ``paper_rate`` there).

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Theorem 3.3 (local SGD, general nonconvex objectives).

    >>> Horizon(L=2.0, K=4, T=400)(0)
    0.05
    """

    of_whole_run: ClassVar[bool] = True

    L: float
    K: int
    T: int

    _intervals = (("L", POSITIVE), ("K", (1, None)), ("T", (1, None)))

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        return math.sqrt(self.K / self.T) / self.L


class _Restarting(Checked):
    """Base class of rates that restart in given rounds."""

    restarts: Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        rounds = [self.restarts] if isinstance(self.restarts, str) else self.restarts  # a string is not a list
        object.__setattr__(self, "restarts", tuple(sorted({check_integer("restarts", round, 0) for round in rounds})))

    def _rounds(self, round: int) -> int:
        """Return the number of rounds since the last restart."""
        return round - max((restart for restart in self.restarts if restart <= round), default=0)

    def restarted(self, round: int) -> Self:
        """Return the rate with one more restart."""
        return replace(self, restarts=(*self.restarts, round))  # type: ignore[type-var]


@dataclass(frozen=True)
class InverseRound(_Restarting):
    """The rate eta_t = 16 E / (mu w) / ((t - t0) E + gamma), where t0 is the round of the last restart.

    Args:
        mu: the strong convexity of the clients' objectives.
        E: the local steps of a complete round.
        work: w = E[sum_k p_t^k s_t^k], the expected sum of coefficients times steps. With scheme C, w = E if every
            client does some work. With scheme B, w = sum_k p^k E[s^k].
        gamma: > 0, the constant of the bound (M_t D + V) / (t E + gamma). With a larger gamma the first rate is smaller
            and decays later. ``of_theorem`` returns the rate with the theorem's gamma.
        restarts: the rounds in which the rate restarts (Corollary 3.2.1), as for ``Staircase``.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021, Theorem 3.1.

    >>> rate = InverseRound(mu=0.5, E=4, work=4.0, gamma=320.0, restarts=[2])
    >>> [round(rate(t), 4) for t in range(4)]
    [0.1, 0.0988, 0.1, 0.0988]
    """

    mu: float
    E: int
    work: float
    gamma: float
    restarts: Sequence[int] = ()

    _intervals = (("mu", POSITIVE), ("work", POSITIVE), ("gamma", POSITIVE), ("E", (1, None)))

    @classmethod
    @ieee
    def of_theorem(
        cls, *, mu: float, L: float, E: int, work: float, theta: float, restarts: Sequence[int] = ()
    ) -> "InverseRound":
        """Return the rate with gamma = max(32 E (1 + theta) L / (mu w), 4 E^2 theta / w).

        The first rate is then at most 1 / (2 (1 + theta) L), which the proof needs.

        Args:
            mu, E, work, restarts: as for the class.
            L: the smoothness of the clients' objectives.
            theta: > 0, a bound of p_t^k / p^k (Assumption 3.5): N for scheme A, 1 for scheme B, E for scheme C.

        Raises:
            RangeError: a number is outside its range, or gamma is not a finite float > 0.

        >>> InverseRound.of_theorem(mu=0.5, L=2.0, E=5, work=5.0, theta=5.0)
        InverseRound(mu=0.5, E=5, work=5.0, gamma=768.0, restarts=())
        """
        for name, value in {"mu": mu, "L": L, "work": work, "theta": theta}.items():
            check_number(name, value, POSITIVE)
        check_integer("E", E, 1, 2**53)
        gamma = max(32 * E / (mu * work) * (1 + theta) * L, 4 * E * E / work * theta)
        return cls(mu, E, work, gamma, restarts)

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        return 16 * self.E / (self.mu * self.work) / (self._rounds(round) * self.E + self.gamma)


@dataclass(frozen=True)
class InverseStep(Checked):
    """The rate eta_t = 4 / (mu (t + a)), a = alpha E + 4, where t counts local steps.

    The rate changes within a round (``of_step``). A call returns the rate of the round's first step, t = round * E.
    Adapters reject this rate, because their messages hold one rate for each round.

    Args:
        mu: the Polyak-Lojasiewicz constant.
        alpha: a number > 0.
        E: the local steps of a round.

    The theorem has conditions on alpha and E: ``largest_alpha``, ``least_steps`` and ``meets_theorem_4_2`` in
    ``bench.papers.theory.local_sgd``.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Theorem 3.2 (local SGD under the Polyak-Lojasiewicz condition).

    >>> rate = InverseStep(mu=0.5, alpha=3.0, E=4)
    >>> rate(0), rate(1), rate.of_step(0, 4)
    (0.5, 0.4, 0.4)
    """

    mu: float
    alpha: float
    E: int

    _intervals = (("mu", POSITIVE), ("alpha", POSITIVE), ("E", (1, None)))

    def __call__(self, round: int) -> float:
        """Return the rate of a round's first step."""
        return self.of_step(round, 0)

    def of_step(self, round: int, step: int) -> float:
        """Return the rate of a step of a round; both count from 0."""
        return 4 / (self.mu * (round * self.E + step + self.alpha * self.E + 4))


@dataclass(frozen=True)
class PerCohort(Checked):
    """The server rate gamma_t = c |S_t| / (t + beta), a function of the round and the number of clients in the cohort.

    ``over`` returns a function of the round. With a participation pattern, which determines each cohort in advance, use
    ``Server(..., server_lr=rule.over(lambda t: len(pattern.active(t))))``. An empty cohort counts as one client, since
    rates must be positive.

    Args:
        c: the rate for each client; ``largest`` returns the rate with the largest c of the analysis.
        beta: > 0. With a larger beta the rate decays later.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, the decaying server rate of its convergence analysis.

    >>> PerCohort(c=0.5, beta=5.0)(5, 4)
    0.2
    """

    c: float
    beta: float

    _intervals = (("c", POSITIVE), ("beta", POSITIVE))

    @classmethod
    @ieee
    def largest(cls, *, beta: float, N: int, tau_max: int, K: int, lr: float, L: float, nu: float) -> "PerCohort":
        """Return the rate with the largest c of Lemma 6 (eq. 54): c = (sqrt(B^2 + 4 A C) - B) / (2 A) at t = 0.

        A = phi_K tau_max N^2 ((1 - nu) (t + beta) + 1), B = nu L N (t + beta)^2 and C = nu (t + beta)^3. The largest c
        grows with t, so round 0 decides. phi_K = (((2 + 2 z)^K - 1) / (K (2 z + 1)) + 1) L^2 with z = (eta_L L)^2
        (Lemma 4). Eq. 25 then holds for every cohort, with equality for a cohort of all N clients in round 0.

        Args:
            beta: as for the class.
            N: the number of clients.
            tau_max: the bound of the dropouts, in rounds.
            K: the number of local steps.
            lr: eta_L, the local rate.
            L: the smoothness of the clients' objectives.
            nu: a small number > 0. Lemma 6 needs nu < 1 / (t + beta) in every round t of the run. A smaller nu makes c
                smaller, like sqrt(nu).

        Raises:
            RangeError: a number is outside its range, such as nu >= 1 / beta, or c is not a finite float > 0.

        >>> round(PerCohort.largest(beta=40.0, N=30, tau_max=20, K=5, lr=0.01, L=2.0, nu=0.01).c, 5)
        0.00549
        """
        for name, value in {"beta": beta, "lr": lr, "L": L}.items():
            check_number(name, value, POSITIVE)
        for name, number in {"N": N, "tau_max": tau_max, "K": K}.items():
            check_integer(name, number, 1, 2**53)
        check_number("nu", nu, f"(0, {1 / beta!r})")
        growth = 2 + 2 * (lr * L) * (lr * L)
        try:
            phi = ((growth**K - 1) / (K * (growth - 1)) + 1) * L * L
        except OverflowError:
            phi = math.inf
        # eq. 54 for c / beta, divided by beta^3 and with the root in the denominator, where nothing cancels
        A, B = phi * tau_max * N * N * (1 - nu + 1 / beta), nu * L * N
        return cls(beta * 2 * nu / (B + math.sqrt(B * B + 4 * A * nu)), beta)

    def __call__(self, round: int, S: int) -> float:
        """Return the rate of a round with S clients."""
        return self.c * max(S, 1) / (round + self.beta)

    def over(self, sizes: Callable[[int], int]) -> Rate:
        """Return the rate whose number of clients in a round is ``sizes(round)``."""
        return lambda round: self(round, sizes(round))


@dataclass(frozen=True)
class Staircase(_Restarting):
    """The rate eta_0 / t, or eta_0 / (t - t0) after a shift of the objective at t0.

    The paper counts rounds from 1, so the rate of round 0 is eta_0 / 1. A shift at t0 affects the paper's round t0 + 1,
    which is round t0 here.

    Args:
        initial: eta_0.
        restarts: the rounds in which the rate is eta_0 again, for example those in which a ``Schedule`` adds clients.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021: the rate
    eta_0 / t of its experiments, and the restart of Sec. 4.2.

    >>> rate = Staircase(1.0, restarts=[3])
    >>> [round(rate(t), 2) for t in range(6)]
    [1.0, 0.5, 0.33, 1.0, 0.5, 0.33]
    """

    initial: float
    restarts: Sequence[int] = ()

    _intervals = (("initial", POSITIVE),)

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        return self.initial / (1 + self._rounds(round))


REGISTRY: Registry[type[Any]] = Registry(
    "rate",
    {rate.__name__: rate for rate in (Constant, Exponential, Horizon, InverseRound, InverseStep, PerCohort, Staircase)},
    expected="a class whose objects are called with a round",
    fits=lambda row: isclass(row) and any("__call__" in vars(kind) for kind in row.__mro__),
    group="fedcore.rates",
)
"""The rates by name."""


@ieee
def as_rate(rate: float | Rate | None, name: str = "rate") -> Rate:
    """Return a positive number as a constant rate, and a function of the round unchanged; else raise RangeError."""
    if isinstance(rate, PerCohort):
        raise RangeError(f"rate={rate!r}: needs the cohorts' sizes; call its method over()")
    if callable(rate):
        if isinstance(rate, Constant):
            check_number(name, rate.value, IN_FLOAT32)
        return rate
    if isinstance(rate, bool) or not isinstance(rate, SupportsFloat):
        raise RangeError(f"rate={rate!r}: must be {describe_interval(POSITIVE)} or a function of the round")
    number = check_number("rate", rate if is_number(rate) else float(rate), POSITIVE)
    return Constant(check_number(name, number, IN_FLOAT32))


def rate_at(rate: Rate, round: int) -> float:
    """Return the rate of a round; raise RangeError if it is outside ``IN_FLOAT32``, such as after too much decay."""
    return float(rate.value) if type(rate) is Constant else _checked(rate, f"round {round}", rate, round)


@ieee
def _checked(rate: object, where: str, call: Callable[..., Any], *arguments: int) -> float:
    try:
        value = float(call(*arguments))
    except Exception as error:
        failed(rate, f"the rate of {where}", error)
    if not in_interval(value, IN_FLOAT32):
        raise RangeError(f"rate={value!r}: must be {describe_interval(IN_FLOAT32)} in {where}; correct {name_of(rate)}")
    return value


@dataclass(frozen=True)
class StepRates:
    """The rates of a round's steps, counted from 0. A call raises RangeError for a rate outside ``IN_FLOAT32``."""

    rate: Any
    round: int

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        return _checked(self.rate, f"step {step} of round {self.round}", self.rate.of_step, self.round, step)


def rate_of_steps(rate: Rate, round: int) -> StepRates | None:
    """Return the rates of a round's steps if they differ, else None."""
    return StepRates(rate, round) if hasattr(rate, "of_step") else None
