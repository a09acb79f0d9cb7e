"""Server optimisers, which turn a method's direction v into the direction u of the step x' = x - gamma u.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2, with -v for its Delta. They compose with every
algorithm: what rows, controls and g follow is v, not u.

Delta is a difference of models where models are averaged (no server rate: x' = x - u), and with a server rate a mean
gradient, eta K times smaller: tau there is the paper's tau / (eta K).
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import isclass
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

from fedcore import kernels, memory
from fedcore.arguments import real
from fedcore.float_mode import ieee
from fedcore.registries import Registry
from fedcore.typing import F32

Moments: TypeAlias = tuple[F32, ...]


class Optimizer(Protocol):
    """A step along a direction; its moments are float32[n_parameters] each.

    A class whose every element depends on that element alone may say ``elementwise = True``: a cluster's shards, each
    of which has a range of the elements, take no other.
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
        tau: the degree of adaptivity; s starts at tau^2.
    """

    elementwise: ClassVar[bool] = True
    beta1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        real("beta1", self.beta1, "[0, 1]")
        real("tau", self.tau, "(0, 1e6]")

    @property
    def second(self) -> Second:
        """s' = s + v^2."""
        return Second(1.0, 1.0)

    @ieee
    def start(self, n: int) -> Moments:
        """m = 0, s = tau^2."""
        return memory.zeros(n), memory.full(n, self.tau**2)

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
    """Adagrad with s' = beta2 s + (1 - beta2) v^2. As in the paper, without a correction of the start."""

    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        real("beta2", self.beta2, "(0, 1]")

    @property
    def second(self) -> Second:
        """s' = beta2 s + (1 - beta2) v^2."""
        return Second(self.beta2, 1 - self.beta2)


@dataclass(frozen=True)
class Yogi(Adam):
    """Adagrad with s' = s - (1 - beta2) v^2 sign(s - v^2)."""

    @property
    def second(self) -> Second:
        """s' = s - (1 - beta2) v^2 sign(s - v^2)."""
        return Second(1.0, 1 - self.beta2, yogi=True)


_ROWS: dict[str, Callable[..., Optimizer]] = {"SGD": SGD, "Adagrad": Adagrad, "Adam": Adam, "Yogi": Yogi}
REGISTRY: Registry[Callable[..., Optimizer]] = Registry(
    "optimizer",
    _ROWS,
    due="a class with the methods start and turn of fedcore.optimizers.Optimizer",
    fits=lambda row: isclass(row) and callable(getattr(row, "start", None)) and callable(getattr(row, "turn", None)),
    group="fedcore.optimizers",
)


def named(name: str, **options: float) -> Optimizer:
    """The optimiser of that name.

    Raises:
        UnknownNameError: there is none.
    """
    return REGISTRY.find(name)(**options)
