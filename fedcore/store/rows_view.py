"""The view that a server gives of its store: all that there is to read, and nothing that changes it."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.clients.registry import ClientId, Registry
from fedcore.representation import Represented, first
from fedcore.store.committed_rows import CommittedRows


class Clients(Represented):
    """The registered clients, of whom nobody comes or goes here.

    Args:
        registry: what its owner changes.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @property
    def capacity(self) -> int:
        """Every client's number is below it."""
        return self._registry.capacity

    def _facts(self) -> dict[str, Any]:
        return {"count": len(self), "first": first(self)}

    def __len__(self) -> int:
        return len(self._registry)

    def __contains__(self, client: object) -> bool:
        return client in self._registry

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._registry)

    def __eq__(self, other: object) -> bool:
        return self._registry == (other._registry if isinstance(other, Clients) else other)

    __hash__ = None  # type: ignore[assignment]

    def check(self, client: object) -> ClientId:
        """See ``Registry.check``."""
        return self._registry.check(client)

    def number(self, client: object) -> int:
        """See ``Registry.number``."""
        return self._registry.number(client)

    def numbers(self, clients: Iterable[ClientId] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """See ``Registry.numbers``."""
        return self._registry.numbers(clients)

    def id_of(self, number: int) -> ClientId:
        """See ``Registry.id_of``."""
        return self._registry.id_of(number)


class ReadRows(CommittedRows):
    """A face of a store that only reads: its owner changes it, and this shows what was committed last.

    Args:
        rows: the store.
    """

    def __init__(self, rows: CommittedRows) -> None:
        self._content, self._form, self._folder = rows._content, rows._content.form, rows._folder
        self._session, self._residency = rows._session, rows._residency

    @property
    def registry(self) -> Clients:  # type: ignore[override]  # all of it that reads
        """The clients."""
        return Clients(self._content.registry)
