"""Clients that arrive and depart at given rounds."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np

from fedcore.arguments import whole
from fedcore.errors import RangeError
from fedcore.participation.active import Active, Clients
from fedcore.participation.pattern import Participation


class Schedule(Participation):
    """Client i is present from its arrival on, and until its departure.

    It is a fact and no choice, so ``first_round="all"`` does not set it aside: who arrives later is away in round 0.

    Args:
        clients: N, those that arrive later included.
        arrivals: client to the first round in which it is there; the others are there from the start. Keys may be
            numbers written out, as TOML and JSON have them.
        departures: client to the first round in which it is gone for ever.
        among, seed, first_round: see ``Participation``.

    Attributes:
        arrivals, departures: client to round, by number.

    Raises:
        RangeError: a client or a round does not exist, or a client departs before it has been there.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021, Sec. 4.2, 4.3.
    The paper counts rounds from 1, so that its arrival at t0, heard from t0 + 1 on, is the round t0 here.

    >>> pattern = Schedule(3, arrivals={2: 10}, departures={0: 20})
    >>> [pattern.active(t).clients.tolist() for t in (9, 10, 20)]
    [[0, 1], [0, 1, 2], [1, 2]]
    """

    overruled: ClassVar[bool] = False

    def __init__(
        self,
        clients: int,
        *,
        arrivals: Mapping[int | str, int] | None = None,
        departures: Mapping[int | str, int] | None = None,
        among: Participation | None = None,
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.arrivals = self._rounds("arrivals", arrivals)
        self.departures = self._rounds("departures", departures)
        self._first = np.zeros(self.clients, np.int64)
        self._gone = np.full(self.clients, np.iinfo(np.int64).max)
        for client, arrival in self.arrivals.items():
            self._first[client] = arrival
        for client, departure in self.departures.items():
            self._gone[client] = departure
            if departure <= self._first[client]:
                raise RangeError(
                    f"departures: expected client {client} to leave after round {self._first[client]}, its first, "
                    f"got {departure}"
                )

    def present(self, round: int) -> Clients:
        """The clients that have arrived and not departed; see ``Participation``."""
        candidates = super().present(round)
        return candidates[self._is_there(round)[candidates]]

    def _choose(self, round: int, candidates: Active) -> Active:
        return candidates.only(self._is_there(round)[candidates.clients])

    def _is_there(self, round: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return (self._first <= round) & (round < self._gone)

    def _rounds(self, name: str, given: Mapping[int | str, int] | None) -> dict[int, int]:
        rounds: dict[int, int] = {}
        if not isinstance(given, Mapping | None):
            raise RangeError(f"{name}: expected clients and their rounds, got {given!r}")
        for key, round in ({} if given is None else given).items():
            written_out = isinstance(key, str) and key.isascii() and key.isdigit()
            client = whole(f"{name}: client", int(key) if written_out else key, 0, self.clients - 1)
            if client in rounds:
                raise RangeError(f"{name}: expected client {client} once, got it twice")
            rounds[client] = whole(f"{name}: client {client}", round, 0, 2**53)
        return rounds
