"""Server optimisers, which turn a method's direction v into the direction u of the step x' = x - gamma u.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2, with -v for its Delta. They compose with every
algorithm: what rows, controls and g follow is v, not u.

Delta is a difference of models where models are averaged (no server rate: x' = x - u), and with a server rate a mean
gradient, eta K times smaller: tau there is the paper's tau / (eta K).

The names of the paper: FedAdagrad, FedAdam and FedYogi are ``FedAvg`` with ``Adagrad``, ``Adam`` and ``Yogi``."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import isclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from fedcore import arrays as memory
from fedcore import kernels
from fedcore.arguments import real, whole
from fedcore.arrays import F32, ieee
from fedcore.registries import Registry

Moments: TypeAlias = tuple[F32, ...]


class Optimizer(Protocol):
    """A step along a direction; its moments are float32[n_parameters] each.

    A class whose every element depends on that element alone may say ``elementwise = True``: a cluster's shards, each
    of which has a range of the elements, take no other.

    A class may have a method ``rate(round)``: the server's rate in a round, from 0 on, where ``server_lr`` is None. If
    it has none, or gives None, gamma is the method's own.
    """

    def start(self, n: int) -> Moments:
        """The moments before the first round."""
        ...

    def turn(self, v: F32, moments: Moments, x: F32, *, gamma: float, moments_out: Moments, x_out: F32) -> float:
        """Write x' = x - gamma u and the next moments; what is read stays as it is.

        Args:
            v: the method's direction, float32[n_parameters]; read-only, as ``moments`` and ``x`` are.
            moments_out: as many vectors as ``start`` gives.
            x_out: float32[n_parameters].

        Returns:
            |x'|^2, not finite if an element of x' is not: the round is then refused.
        """
        ...


@dataclass(frozen=True)
class SGD:
    """u = m' = momentum m + v: the server momentum that many frameworks call FedAvgM (Hsu et al. 2019)."""

    elementwise: ClassVar[bool] = True
    momentum: float = 0.9

    def __post_init__(self) -> None:
        real("momentum", self.momentum, "[0, 1]")

    def start(self, n: int) -> Moments:
        """m = 0."""
        return (memory.zeros(n),)

    def turn(self, v: F32, moments: Moments, x: F32, *, gamma: float, moments_out: Moments, x_out: F32) -> float:
        """See ``Optimizer``."""
        (m,), (m_out,) = moments, moments_out
        return kernels.optimizer_step(
            v, m, None, x, from_m=self.momentum, from_v=1.0, gamma=gamma, m_out=m_out, s_out=None, x_out=x_out
        )


class Second(NamedTuple):
    """The second moment's rule: s' = from_s s + from_square v^2, or s - from_square v^2 sign(s - v^2)."""

    from_s: float
    from_square: float
    yogi: bool = False


@dataclass(frozen=True)
class Adagrad:
    """u = m' / (sqrt(s') + tau), m' = beta1 m + (1 - beta1) v, s' = s + v^2.

    Args:
        beta1: the decay of the first moment.
        tau: the degree of adaptivity.
        eta: the server's rate where ``server_lr`` is None. An element of u has a length of about 1, whatever the length
            of v, so the rates of other steps do not fit it. None uses them all the same.
        s0: s before the first round; None is tau^2.
    """

    elementwise: ClassVar[bool] = True
    before: ClassVar[dict[str, Any]] = {"eta": None, "s0": None, "corrected_from": None}
    """The options that a saved server has if it was saved before they were options."""
    beta1: float = 0.0
    tau: float = 1e-3
    eta: float | None = 0.1
    s0: float | None = None

    def __post_init__(self) -> None:
        real("beta1", self.beta1, "[0, 1]")
        real("tau", self.tau, "(0, 1e6]")
        if self.eta is not None:
            real("eta", self.eta, "(0, 1e6]")
        if self.s0 is not None:
            real("s0", self.s0, "[0, 1e12]")

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
        corrected_from: k, for a rate of eta sqrt(1 - beta2^(t + k)) / (1 - beta1^(t + k)) in round t = 0, 1, ...: the
            moments' start at 0 is corrected. 1 is Kingma and Ba's correction. None is the paper's: there is none.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    corrected_from: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        real("beta2", self.beta2, "(0, 1]")
        if self.corrected_from is not None:
            whole("corrected_from", self.corrected_from, 1, 2**31)
            real("beta1", self.beta1, "[0, 1)")
            real("beta2", self.beta2, "(0, 1)")

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


_ROWS: dict[str, Callable[..., Optimizer]] = {"SGD": SGD, "Adagrad": Adagrad, "Adam": Adam, "Yogi": Yogi}
REGISTRY: Registry[Callable[..., Optimizer]] = Registry(
    "optimizer",
    _ROWS,
    due="a class with the methods start and turn of fedcore.algorithms.optimizers.Optimizer",
    fits=lambda row: isclass(row) and callable(getattr(row, "start", None)) and callable(getattr(row, "turn", None)),
    group="fedcore.optimizers",
)


def named(name: str, **options: float) -> Optimizer:
    """The optimiser of that name.

    Raises:
        UnknownNameError: there is none.
    """
    return REGISTRY.find(name)(**options)
