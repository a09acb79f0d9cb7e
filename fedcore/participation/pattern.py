"""The contract of a participation pattern: a pure function from a round to the clients that take part in it."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np

from fedcore.arguments import whole
from fedcore.errors import RangeError
from fedcore.float_mode import ieee
from fedcore.participation.active import Active, Clients
from fedcore.representation import Represented, arguments_of


class Participation(Represented, ABC):
    """A pattern of participation: who takes part in which round.

    A pattern chooses among the clients that another one gives it, or among all: ``Uniform(50, 5, among=Bernoulli(50,
    0.3))`` draws five of those that are reachable. So patterns compose, and the order matters: ``Uniform`` among a
    ``Schedule`` draws five of those present; a ``Schedule`` among ``Uniform`` loses those that are drawn and away.

    Args:
        clients: N; the clients are 0 .. N-1.
        among: the pattern to choose from, over the same N clients; None is everybody.
        seed: the run's seed, 0 .. 2^64 - 1.
        first_round: "all" sets the pattern aside in round 0, so that all it could choose from take part, as the MimiC
            paper's analysis assumes (Sec. 5).

    Raises:
        RangeError: an argument is outside its range.

    Determinism: ``active(t)`` depends on the arguments and t alone, so every algorithm of a comparison sees
    the same active sets, and a round can be repeated without those before it. Two patterns of one composition share no
    random numbers. What decides over each client for itself (Bernoulli, RoundRobin, Trace, Schedule) decides the same
    whoever else is there, and may therefore change places with another such pattern.
    """

    overruled: ClassVar[bool] = True
    """True if ``first_round="all"`` sets it aside; not where it is no choice but a fact."""

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
            0 to N clients, ascending: nobody at all is a legal answer.

        Raises:
            RangeError: ``round`` is negative.
        """
        round = whole("round", round, 0, 2**63 - 1)
        candidates = Active(np.arange(self.clients)) if self.among is None else self.among.active(round)
        if round == 0 and self.first_round == "all" and self.overruled:
            return candidates
        return self._choose(round, candidates)

    def present(self, round: int) -> Clients:
        """The clients that belong to the federation in a round, whether they take part or not.

        Returns:
            int64[m], ascending: all but those that a ``Schedule`` in the composition keeps out.
        """
        return np.arange(self.clients) if self.among is None else self.among.present(round)

    @abstractmethod
    def _choose(self, round: int, candidates: Active) -> Active:
        """Choose among the candidates, whatever ``first_round`` says: a pure function of the arguments."""

    def _purpose(self, name: str) -> str:
        """The purpose of the random numbers; each pattern of one kind in a composition has its own."""
        below, inner = 0, self.among
        while inner is not None:
            below += type(inner) is type(self)
            inner = inner.among
        return f"participation: {name}" + (f" ({below + 1})" if below else "")
