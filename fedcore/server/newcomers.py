"""Newcomers of a round: clients that count from their first update that does, not from when they were asked."""

from collections.abc import Iterable, Mapping, Sequence

from fedcore.clients import ClientId
from fedcore.clients.registry import canonical
from fedcore.interrupts import uninterrupted
from fedcore.server.population import Population
from fedcore.server.snapshot import Snapshot
from fedcore.store import ClientStore

Coming = Iterable[ClientId] | Mapping[ClientId, int]
"""Ids, with n_k by id where clients have sizes."""


class Newcomers:
    """The clients that may come with the open round.

    They are registered while it lasts, which no commit has seen yet. Those that it heard stay; the others leave before
    the commit, or all of them with a round that is given up.

    Attributes:
        before: how many clients there were before them.
        population: with them; None where there are none.
        share_of_total: n with all of them over n with those that were heard: the shares p^k of the round were of the
            former and are due of the latter, both the same number of times for every client. 1 where nobody has a size,
            and where the method weighs by none.

    Args:
        store: of the rows, with the registry.
        weighs_shares: whether the method's weights are of shares.
    """

    def __init__(self, store: ClientStore, *, weighs_shares: bool) -> None:
        self._store, self._weighs_shares = store, weighs_shares
        self._ids: list[ClientId] = []
        self._sizes: list[int] | None = None
        self.before = 0
        self.population: Population | None = None
        self.share_of_total = 1.0

    def admit(self, clients: Sequence[ClientId], sizes: list[int] | None, now: Snapshot) -> None:
        """Register them for the open round.

        Raises:
            RangeError, UnknownClientError: one is registered already, or named twice, or is no id; none is then.
        """
        self.before, self.share_of_total = len(self._store.registry), 1.0
        if not clients:
            return
        with uninterrupted():
            self._ids = list(map(canonical, clients))  # before they are: whatever comes between, they are forgotten
            try:
                self._store.add_all(self._ids)
                self._sizes = sizes
                self.population = self._with(now, self._ids, sizes)
            except BaseException:
                self.forget()
                raise

    def settle(self, heard: Iterable[ClientId], now: Snapshot) -> Population:
        """Let those go that the round did not hear; returns the population of those that there are then."""
        if self.population is None:
            return now.population
        came = self._came(set(heard))
        for client in self._ids:
            if client not in came:
                self._store.forget(client)
        sizes = None if self._sizes is None else [came[client] for client in came]
        population = self._with(now, [*came], sizes)
        if population.total and self._weighs_shares:
            self.share_of_total = self.population.total / population.total
        return population

    def forget(self) -> None:
        """Forget them: the round was given up. One whose commit counts has nobody to forget."""
        if self._ids:
            self._store.rollback()
        self._ids, self._sizes, self.population = [], None, None

    def _came(self, heard: set[ClientId]) -> dict[ClientId, int]:
        sizes = self._sizes or [0] * len(self._ids)
        return {client: size for client, size in zip(self._ids, sizes, strict=True) if client in heard}

    def _with(self, now: Snapshot, clients: Sequence[ClientId], sizes: list[int] | None) -> Population:
        if not clients:
            return now.population
        numbers = self._store.registry.numbers(list(clients)).tolist()
        # Who comes with the first round was there from the start.
        return now.population.with_clients(numbers, clients, sizes, now.round_number or None)
