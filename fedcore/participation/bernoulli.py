"""Clients that take part independently, with fixed probabilities: the MimiC paper's *static* pattern."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from fedcore.arguments import real, whole
from fedcore.errors import RangeError
from fedcore.float_mode import ieee
from fedcore.participation.active import Active
from fedcore.participation.pattern import Participation
from fedcore.participation.per_client import each
from fedcore.sampling import bernoulli
from fedcore.typing import F64


class Bernoulli(Participation):
    """Client i is active with probability p_i, or p_i^t in round t, independently of the others and of other rounds.

    Args:
        clients: N.
        p: one probability in [0, 1] for all, or N of them; or a table of such, by the round from which each holds, with
            one from round 0 on. Its keys may be numbers written out, as TOML and JSON have them.
        levels: L > 1 spreads one p over L levels up to 1: p_i = p + (i mod L)(1 - p)/(L - 1). The MimiC paper has one
            p; its authors' public code has five levels.
        among, seed, first_round: see ``Participation``.

    Attributes:
        p: float64[N], read-only; where they change, a table of such by the round from which each holds.

    Raises:
        RangeError, ShapeError: an argument is not what is said above.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central
    Updates", 2023, the static pattern; its Assumption 5 and Theorem 3 have p_i^t.

    >>> Bernoulli(4, 1.0).active(3).clients
    array([0, 1, 2, 3])
    >>> Bernoulli(6, 0.2, levels=5).p
    array([0.2, 0.4, 0.6, 0.8, 1. , 0.2])
    >>> late = Bernoulli(3, {0: 1.0, 10: [1.0, 1.0, 0.0]})
    >>> late.active(9).clients, late.active(10).clients
    (array([0, 1, 2]), array([0, 1]))
    """

    @ieee
    def __init__(
        self,
        clients: int,
        p: float | Sequence[float] | Mapping[int | str, float | Sequence[float]],
        *,
        levels: int = 1,
        among: Participation | None = None,
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        levels = whole("levels", levels, 1, 2**31)
        if not isinstance(p, Mapping):
            p = {0: p}
        given = {_round(round): self._chances(round, chances, levels, len(p) > 1) for round, chances in p.items()}
        if len(given) < len(p) or 0 not in given:
            raise RangeError(f"p: expected each round once, and chances from round 0 on, got rounds {list(p)}")
        self._from = sorted(given.items())
        self.p: F64 | dict[int, F64] = given[0] if len(given) == 1 else dict(self._from)

    def _chances(self, round: object, p: float | Sequence[float], levels: int, several: bool) -> F64:
        """p_i of each client, float64[N], from a round on."""
        name = f"p[{round}]" if several else "p"
        if np.ndim(p) > 0 and levels > 1:
            raise RangeError(f"levels: expected 1 where there is a p for each client, got {levels}")
        if isinstance(p, Sequence | np.ndarray) and not isinstance(p, str):
            return each(name, list(p), self.clients, "[0, 1]")
        least = real(name, p, "[0, 1]")
        level = np.arange(self.clients) % levels / max(levels - 1, 1)
        chances: F64 = least + level * (1 - least)
        chances.flags.writeable = False
        return chances

    def _choose(self, round: int, candidates: Active) -> Active:
        # Drawn for all, so that whether one is active does not depend on who else could be.
        purpose = self._purpose("bernoulli")
        p = next(chances for began, chances in reversed(self._from) if began <= round)
        drawn = bernoulli(self.clients, p, seed=self.seed, round=round, purpose=purpose)
        return candidates.only(np.isin(candidates.clients, drawn, assume_unique=True))


def _round(key: object) -> int:
    written_out = isinstance(key, str) and key.isascii() and key.isdigit()
    return whole("p: round", int(str(key)) if written_out else key, 0, 2**53)
