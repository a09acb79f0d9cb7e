"""Flower strategies, one for each of ``fedcore.algorithms``; their arguments are in ``ServerStrategy``."""

from typing import Any

from fedcore import algorithms, optimizers
from fedcore.adapters.flower.strategy import ServerStrategy


class FedAvg(ServerStrategy):
    """``fedcore.algorithms.FedAvg`` in Flower."""

    method = algorithms.FedAvg


class FedAdagrad(FedAvg):
    """Flower's FedAdagrad, with its arguments and its numbers: FedAvg with ``fedcore.optimizers.Adagrad``."""

    def __init__(self, *, eta: float = 0.1, tau: float = 1e-3, **options: Any) -> None:
        super().__init__(optimizer=optimizers.Adagrad(eta=eta, tau=tau, s0=0.0), **_flowers_own(options))


class FedAdam(FedAvg):
    """Flower's FedAdam, with its arguments and its numbers: FedAvg with ``fedcore.optimizers.Adam``.

    Flower corrects the start with the exponent of the round after.
    """

    def __init__(
        self, *, eta: float = 0.1, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3, **options: Any
    ) -> None:
        adam = optimizers.Adam(eta=eta, beta1=beta_1, beta2=beta_2, tau=tau, s0=0.0, corrected_from=2)
        super().__init__(optimizer=adam, **_flowers_own(options))


class FedYogi(FedAvg):
    """Flower's FedYogi, with its arguments and its numbers: FedAvg with ``fedcore.optimizers.Yogi``."""

    def __init__(
        self, *, eta: float = 0.01, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3, **options: Any
    ) -> None:
        yogi = optimizers.Yogi(eta=eta, beta1=beta_1, beta2=beta_2, tau=tau, s0=0.0)
        super().__init__(optimizer=yogi, **_flowers_own(options))


def _flowers_own(options: dict[str, Any]) -> dict[str, Any]:
    """Options without ``eta_l``, the clients' rate, which Flower takes and never uses."""
    return {name: value for name, value in options.items() if name != "eta_l"}


class FedProx(ServerStrategy):
    """``fedcore.algorithms.FedProx`` in Flower."""

    method = algorithms.FedProx


class SCAFFOLD(ServerStrategy):
    """``fedcore.algorithms.SCAFFOLD`` in Flower."""

    method = algorithms.SCAFFOLD


class MIFA(ServerStrategy):
    """``fedcore.algorithms.MIFA`` in Flower."""

    method = algorithms.MIFA


class MimiC(ServerStrategy):
    """``fedcore.algorithms.MimiC`` in Flower."""

    method = algorithms.MimiC


class FlexibleFedAvg(ServerStrategy):
    """``fedcore.algorithms.FlexibleFedAvg`` in Flower; nodes say their numbers of examples when they are queried."""

    method = algorithms.FlexibleFedAvg


class FedAvgM(ServerStrategy):
    """``fedcore.algorithms.FedAvgM`` in Flower: momentum in the local steps, which Flower's FedAvgM is not."""

    method = algorithms.FedAvgM


class SCAFFOLDM(ServerStrategy):
    """``fedcore.algorithms.SCAFFOLDM`` in Flower."""

    method = algorithms.SCAFFOLDM


class MBSTORM(ServerStrategy):
    """``fedcore.algorithms.MBSTORM`` in Flower."""

    method = algorithms.MBSTORM


class FedAvgMVR(ServerStrategy):
    """``fedcore.algorithms.FedAvgMVR`` in Flower."""

    method = algorithms.FedAvgMVR


class SCAFFOLDMVR(ServerStrategy):
    """``fedcore.algorithms.SCAFFOLDMVR`` in Flower."""

    method = algorithms.SCAFFOLDMVR


class LocalDescent(ServerStrategy):
    """``fedcore.algorithms.LocalDescent`` in Flower."""

    method = algorithms.LocalDescent


class FedVARP(ServerStrategy):
    """``fedcore.algorithms.FedVARP`` in Flower."""

    method = algorithms.FedVARP


class FedStale(ServerStrategy):
    """``fedcore.algorithms.FedStale`` in Flower."""

    method = algorithms.FedStale


class FedDyn(ServerStrategy):
    """``fedcore.algorithms.FedDyn`` in Flower."""

    method = algorithms.FedDyn


class FedNova(ServerStrategy):
    """``fedcore.algorithms.FedNova`` in Flower."""

    method = algorithms.FedNova


class FedExP(ServerStrategy):
    """``fedcore.algorithms.FedExP`` in Flower."""

    method = algorithms.FedExP
