"""Server optimisers, which turn a method's direction v into the direction u of the step x' = x - gamma u.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2, with -v for its Delta. They compose with every
algorithm: what rows, controls and g follow is v, not u.

Delta is a difference of models where models are averaged (no server rate: x' = x - u), and with a server rate a mean
gradient, eta K times smaller: tau there is the paper's tau / (eta K).
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.algorithms.algorithm import within
from fedcore.errors import UnknownNameError
from fedcore.float_mode import ieee

F32 = npt.NDArray[np.float32]
Moments: TypeAlias = tuple[F32, ...]


class Optimizer(Protocol):
    """A direction from a direction; its moments are float32[n_parameters] each."""

    def start(self, n: int) -> Moments:
        """The moments before the first round."""
        ...

    def turn(self, v: F32, moments: Moments) -> tuple[F32, Moments]:
        """u and the next moments; neither v nor the moments are changed."""
        ...


@dataclass(frozen=True)
class SGD:
    """u = m' = momentum m + v: the server momentum that many frameworks call FedAvgM (Hsu et al. 2019)."""

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.momentum:
            within("momentum", self.momentum, 0, 1)

    def start(self, n: int) -> Moments:
        """m = 0."""
        return (np.zeros(n, np.float32),)

    @ieee
    def turn(self, v: F32, moments: Moments) -> tuple[F32, Moments]:
        """See ``Optimizer``."""
        m = np.float32(self.momentum) * moments[0] + v
        return m, (m,)


@dataclass(frozen=True)
class Adagrad:
    """u = m' / (sqrt(s') + tau), m' = beta1 m + (1 - beta1) v, s' = s + v^2.

    Args:
        beta1: the decay of the first moment.
        tau: the degree of adaptivity; s starts at tau^2.
    """

    beta1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        if self.beta1:
            within("beta1", self.beta1, 0, 1)
        within("tau", self.tau, 0, 1e6)

    @ieee
    @ieee
    def start(self, n: int) -> Moments:
        """m = 0, s = tau^2."""
        return np.zeros(n, np.float32), np.full(n, self.tau**2, np.float32)

    @ieee
    def turn(self, v: F32, moments: Moments) -> tuple[F32, Moments]:
        """See ``Optimizer``."""
        m = np.float32(self.beta1) * moments[0] + np.float32(1 - self.beta1) * v
        s = self.second(v * v, moments[1])
        u: F32 = np.divide(m, np.sqrt(s) + np.float32(self.tau), dtype=np.float32)
        return u, (m, s)

    def second(self, square: F32, s: F32) -> F32:
        """s' from v^2 and s."""
        return s + square


@dataclass(frozen=True)
class Adam(Adagrad):
    """Adagrad with s' = beta2 s + (1 - beta2) v^2. As in the paper, without a correction of the start."""

    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        within("beta2", self.beta2, 0, 1)

    def second(self, square: F32, s: F32) -> F32:
        """s' from v^2 and s."""
        following: F32 = np.float32(self.beta2) * s + np.float32(1 - self.beta2) * square
        return following


@dataclass(frozen=True)
class Yogi(Adam):
    """Adagrad with s' = s - (1 - beta2) v^2 sign(s - v^2)."""

    def second(self, square: F32, s: F32) -> F32:
        """s' from v^2 and s."""
        following: F32 = s - np.float32(1 - self.beta2) * square * np.sign(s - square)
        return following


REGISTRY: dict[str, type[SGD] | type[Adagrad]] = {"SGD": SGD, "Adagrad": Adagrad, "Adam": Adam, "Yogi": Yogi}


def named(name: str, **options: float) -> Optimizer:
    """The optimiser of that name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in REGISTRY:
        raise UnknownNameError.of("optimizer", name, REGISTRY)
    return REGISTRY[name](**options)
