"""Flower strategies, one for each of ``fedcore.algorithms``; their arguments are in ``ServerStrategy``."""

from fedcore import algorithms
from fedcore.adapters.flower.strategy import ServerStrategy


class FedAvg(ServerStrategy):
    """``fedcore.algorithms.FedAvg`` in Flower."""

    method = algorithms.FedAvg


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
