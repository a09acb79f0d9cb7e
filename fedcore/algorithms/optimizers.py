"""Server optimizers: they replace a method's direction v by u in the step x' = x - gamma u.

Reference: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2, with -v for its Delta. Every
optimizer works with every algorithm: rows, controls and g use v, not u. Only clients that compute g from two models
(``FedAvgM(placement="client")``) would get u, so a server refuses them.

Without a server rate, Delta is a model difference (x' = x - u). With a server rate, Delta is a mean gradient, which is
eta K times smaller, so tau is the paper's tau / (eta K).

The paper's FedAdagrad, FedAdam and FedYogi are ``FedAvg`` with ``Adagrad``, ``Adam`` and ``Yogi``."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import isclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np

from fedcore import arrays as memory
from fedcore import kernels
from fedcore.algorithms.rates import IN_FLOAT32
from fedcore.arrays import F32, ieee
from fedcore.errors import AlgorithmError, RangeError
from fedcore.validation import (
    Checked,
    Registry,
    check_number,
    describe_interval,
    failed,
    in_interval,
    name_of,
    short_repr,
)

Moments: TypeAlias = tuple[F32, ...]


class Optimizer(Protocol):
    """The interface of server optimizers. Each moment is float32[n_parameters]. Write a frozen dataclass.

    A class may set ``elementwise = True`` if every element of its step depends only on the same element of its inputs.
    Servers with shards require this, since each shard holds a range of the elements.

    A class may define ``rate(round)``, the server's rate if ``server_lr`` is None; rounds count from 0. Without the
    method, or if it returns None, gamma is the algorithm's.
    """

    def start(self, n: int) -> Moments:
        """Return the moments before the first round."""
        ...

    def turn(self, v: F32, moments: Moments, x: F32, *, gamma: float, moments_out: Moments, x_out: F32) -> float | None:
        """Write x' = x - gamma u and the next moments.

        Args:
            v: the method's direction, float32[n_parameters]. ``v``, ``moments`` and ``x`` are read-only.
            moments_out: one vector for each moment that ``start`` returns.
            x_out: float32[n_parameters].

        Returns:
            |x'|^2, for fedcore's optimizers. The server measures the results of others, whatever they return. A number
            of x' or of a moment that is not finite, or not written, ends the round with a DivergedError, and an
            exception ends it with an AlgorithmError; both leave the server unchanged.
        """
        ...


@dataclass(frozen=True)
class SGD(Checked):
    """Server momentum, u = m' = momentum m + v. Many frameworks call it FedAvgM (Hsu et al. 2019).

    Args:
        eta: the server's rate if ``server_lr`` is None. With None the server uses the algorithm's rate.
    """

    elementwise: ClassVar[bool] = True
    momentum: float = 0.9
    eta: float | None = None

    _intervals = (("momentum", "[0, 1]"), ("eta", "(0, 1e6]", None))

    def rate(self, round: int) -> float | None:
        """See ``Optimizer``."""
        return self.eta

    def start(self, n: int) -> Moments:
        """m = 0."""
        return (memory.zeros(n),)

    def turn(self, v: F32, moments: Moments, x: F32, *, gamma: float, moments_out: Moments, x_out: F32) -> float:
        """See ``Optimizer``."""
        (m,), (m_out,) = moments, moments_out
        return kernels.optimizer_step(
            v, m, None, x, from_m=self.momentum, from_v=1.0, gamma=gamma, m_out=m_out, s_out=None, x_out=x_out
        )


@dataclass(frozen=True)
class Nesterov(SGD):
    """Nesterov momentum, u = v + momentum m', m' = momentum m + v, as in torch.

    With the defaults and ``FedAvg`` this is DiLoCo (Douillard et al. 2023, arXiv 2311.08105): v is its outer gradient,
    the mean of x - y_i.
    """

    eta: float | None = 0.7

    def turn(self, v: F32, moments: Moments, x: F32, *, gamma: float, moments_out: Moments, x_out: F32) -> float:
        """See ``Optimizer``."""
        (m,), (m_out,), beta = moments, moments_out, self.momentum
        u_of = kernels.Linear(A=1 + beta, g=beta**2)
        # m_out first holds u.
        _, square = kernels.server_step(
            v, None, x, v_of=u_of, gamma=gamma, momentum=m, v=m_out, total_out=None, x_out=x_out
        )
        kernels.combine([m, v], [beta, 1.0], m_out)
        return square


class Second(NamedTuple):
    """Coefficients of the second moment: s' = from_s s + from_square v^2, or s - from_square v^2 sign(s - v^2)."""

    from_s: float
    from_square: float
    yogi: bool = False


@dataclass(frozen=True)
class Adagrad(Checked):
    """u = m' / (sqrt(s') + tau), m' = beta1 m + (1 - beta1) v, s' = s + v^2.

    Args:
        beta1: the decay of the first moment.
        tau: the degree of adaptivity, a normal number of float32: at least 1.2e-38.
        eta: the server's rate if ``server_lr`` is None. The elements of u are about 1 for any norm of v, so rates for
            other optimizers do not fit. With None the server uses the algorithm's rate.
        s0: s before the first round. Default: tau^2.
    """

    elementwise: ClassVar[bool] = True
    before: ClassVar[dict[str, Any]] = {"eta": None, "s0": None, "corrected_from": None}
    """Values of options that older saved servers lack."""
    beta1: float = 0.0
    tau: float = 1e-3
    eta: float | None = 0.1
    s0: float | None = None

    _intervals = (("beta1", "[0, 1]"), ("tau", "[1.2e-38, 1e6]"), ("eta", "(0, 1e6]", None), ("s0", "[0, 1e12]", None))

    def rate(self, round: int) -> float | None:
        """See ``Optimizer``."""
        return self.eta

    @property
    def second(self) -> Second:
        """s' = s + v^2."""
        return Second(1.0, 1.0)

    @ieee
    def start(self, n: int) -> Moments:
        """m = 0, s = s0."""
        return memory.zeros(n), memory.full(n, self.tau**2 if self.s0 is None else self.s0)

    @ieee
    def turn(self, v: F32, moments: Moments, x: F32, *, gamma: float, moments_out: Moments, x_out: F32) -> float:
        """See ``Optimizer``."""
        (m, s), (m_out, s_out), second = moments, moments_out, self.second
        return kernels.optimizer_step(
            v,
            m,
            s,
            x,
            from_m=self.beta1,
            from_v=1 - self.beta1,
            from_s=second.from_s,
            from_square=second.from_square,
            yogi=second.yogi,
            tau=self.tau,
            gamma=gamma,
            m_out=m_out,
            s_out=s_out,
            x_out=x_out,
        )


@dataclass(frozen=True)
class Adam(Adagrad):
    """Adagrad with s' = beta2 s + (1 - beta2) v^2.

    Args:
        beta2: the decay of the second moment.
        corrected_from: k in the rate eta sqrt(1 - beta2^(t + k)) / (1 - beta1^(t + k)) of round t = 0, 1, .... The rate
            corrects the bias of moments that start at 0; k = 1 is Kingma and Ba's correction. Default: no correction,
            as in the paper.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    corrected_from: int | None = None

    _intervals = (("beta2", "(0, 1]"), ("corrected_from", (1, 2**31), None))  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.corrected_from is not None:
            check_number("beta1", self.beta1, "[0, 1)")
            check_number("beta2", self.beta2, "(0, 1)")

    def rate(self, round: int) -> float | None:
        """See ``Optimizer``."""
        if self.eta is None or self.corrected_from is None:
            return self.eta
        k = round + self.corrected_from
        return self.eta * math.sqrt(1 - self.beta2**k) / (1 - self.beta1**k)

    @property
    def second(self) -> Second:
        """s' = beta2 s + (1 - beta2) v^2."""
        return Second(self.beta2, 1 - self.beta2)


@dataclass(frozen=True)
class Yogi(Adam):
    """Adam with s' = s - (1 - beta2) v^2 sign(s - v^2)."""

    eta: float | None = 0.01

    @property
    def second(self) -> Second:
        """s' = s - (1 - beta2) v^2 sign(s - v^2)."""
        return Second(1.0, 1 - self.beta2, yogi=True)


OWN: tuple[type, ...] = (SGD, Nesterov, Adagrad, Adam, Yogi)
"""The optimizers whose results need no check."""


def rate_of(optimizer: Optimizer | None, round: int) -> float | None:
    """Return the optimizer's rate of a round, or None if it has none.

    Raises:
        RangeError: the rate is outside the positive range of float32.
        AlgorithmError: the method ``rate`` failed.
    """
    rate = getattr(optimizer, "rate", None)
    if rate is None or type(optimizer) in OWN:
        return rate and rate(round)
    try:
        found = rate(round)
        value = None if found is None else float(found)
    except Exception as error:
        failed(optimizer, f"rate({round})", error)
    if value is None or in_interval(value, IN_FLOAT32):
        return value
    raise RangeError(f"{name_of(optimizer)}: rate({round}) must be {describe_interval(IN_FLOAT32)}, got {value}")


def started(optimizer: Optimizer, n: int) -> Moments:
    """Return the moments before the first round; raise AlgorithmError unless they are float32[n] and finite."""
    if type(optimizer) in OWN:
        return optimizer.start(n)
    try:
        moments = tuple(optimizer.start(n))
    except Exception as error:
        failed(optimizer, "start", error)
    for moment in moments:
        if getattr(moment, "dtype", None) != np.float32 or moment.shape != (n,) or not kernels.all_finite([moment])[0]:
            must = f"a tuple of float32[{n}] of finite numbers, one for each moment"
            raise AlgorithmError(f"{name_of(optimizer)}: start must return {must}, got {short_repr(moments)}")
    return moments


def turn(optimizer: Optimizer, v: F32, moments: Moments, x: F32, *, gamma: float, outs: Moments) -> float:
    """Let the optimizer write x' and the next moments, ``outs``; return |x'|^2, not finite if a number of them is not.

    The inputs of a user's optimizer are read-only, and its results are measured in one pass. Raise AlgorithmError if it
    fails.
    """
    to: dict[str, Any] = {"gamma": gamma, "moments_out": tuple(outs[1:]), "x_out": outs[0]}
    if type(optimizer) in OWN:
        return float(optimizer.turn(v, moments, x, **to))  # type: ignore[arg-type]
    for out in outs:
        kernels.combine([v], [math.nan], out)  # what it does not write is found
    v, x, moments = memory.read_only(v), memory.read_only(x), tuple(map(memory.read_only, moments))
    try:
        optimizer.turn(v, moments, x, **to)
    except Exception as error:
        failed(optimizer, "turn", error)
    return float(kernels.squared_norms(list(outs)).sum())


REGISTRY: Registry[Callable[..., Optimizer]] = Registry(
    "optimizer",
    {"SGD": SGD, "Nesterov": Nesterov, "Adagrad": Adagrad, "Adam": Adam, "Yogi": Yogi},
    expected="a class with the methods start and turn of fedcore.algorithms.optimizers.Optimizer",
    fits=lambda row: isclass(row) and callable(getattr(row, "start", None)) and callable(getattr(row, "turn", None)),
    group="fedcore.optimizers",
)


def named(name: str, **options: float) -> Optimizer:
    """Return the optimizer with a name: a key of ``REGISTRY`` in any case, an entry point, or ``module:Name``."""
    return find(name)(**options)


def find(name: str) -> Callable[..., Optimizer]:
    """Return the class or function of the optimizer with a name, as for ``named``."""
    return REGISTRY.find({known.lower(): known for known in REGISTRY}.get(name.lower(), name))


def as_optimizer(optimizer: Optimizer | str | None) -> Optimizer | None:
    """Return an optimizer, which may be given by its name; raise RangeError for other objects."""
    if isinstance(optimizer, str):
        return named(optimizer)
    if optimizer is not None and (isclass(optimizer) or not hasattr(optimizer, "turn")):
        raise RangeError(f"optimizer={optimizer!r}: must be an optimizer, such as Adam(eta=0.01), or its name")
    return optimizer
