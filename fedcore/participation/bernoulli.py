"""Clients that take part independently, with one fixed probability: the MimiC paper's *static* pattern."""

from typing import Literal

from fedcore.errors import RangeError
from fedcore.participation.pattern import Clients, Participation
from fedcore.sampling import bernoulli


class Bernoulli(Participation):
    """Each client is active with probability p, independently of the others and of other rounds.

    Args:
        clients: N.
        p: the probability, in [0, 1].
        seed: see ``Participation``.
        first_round: see ``Participation``.

    Raises:
        RangeError: an argument is outside its range.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central
    Updates", 2023, the static pattern.

    >>> Bernoulli(4, 1.0).active(3)
    array([0, 1, 2, 3])
    """

    def __init__(self, clients: int, p: float, *, seed: int = 0, first_round: Literal["all"] | None = None) -> None:
        super().__init__(clients, seed=seed, first_round=first_round)
        if not 0 <= p <= 1:
            raise RangeError(f"p: expected a number in [0, 1], got {p!r}")
        self.p = p

    def _active(self, round: int) -> Clients:
        return bernoulli(self.clients, self.p, seed=self.seed, round=round, purpose="participation: bernoulli")
