"""One row per client: its last mean gradient."""

from collections.abc import Iterable
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedcore.errors import RangeError, UnknownNameError
from fedcore.store.registry import ClientId, Registry

Row = npt.NDArray[np.float32]


class ClientStore:
    """Rows of float32[n] by client id, changed by whole rounds.

    A round's rows are *staged* into free slots, where nobody sees them, and *commit* makes them the clients' rows
    all at once; *discard* forgets them. So a round that is left half-way leaves every row as it was. A row that was
    never written takes no memory and reads as zero.

    Args:
        clients: a count (ids 0..count - 1) or the ids, each an int in 0..2**64 - 1 or a str.
        n: elements of a row.
        medium: "ram".

    Cost: 4 n bytes for each row ever written, and for each row of the largest cohort so far.

    >>> store = ClientStore(clients=3, n=2)
    >>> store.stage(1)[:] = [4, 5]
    >>> store.commit(round=0)
    >>> store.read(1), store.read(2)
    (array([4., 5.], dtype=float32), array([0., 0.], dtype=float32))
    """

    def __init__(self, clients: int | Iterable[ClientId], n: int, *, medium: Literal["ram"] = "ram") -> None:
        if medium != "ram":
            raise UnknownNameError.of("medium", medium, ["ram"])
        if n < 1:
            raise RangeError(f"n: expected a row of at least 1 element, got {n}")
        self.registry = Registry(clients)
        self.n = n
        self._rows: dict[ClientId, Row] = {}
        self._rounds: dict[ClientId, int] = {}
        self._staged: dict[ClientId, Row] = {}
        self._free: list[Row] = []

    def __len__(self) -> int:
        """How many clients have a row."""
        return len(self._rows)

    def row(self, client: object) -> Row | None:
        """The client's row, float32[n] and not to be written to, or None if it was never written.

        It is the slot itself: a later round may reuse it. ``read`` copies.
        """
        return self._rows.get(self.registry.check(client))

    def read(self, client: object) -> Row:
        """A copy of the client's row, float32[n]; zeros if it was never written."""
        row = self.row(client)
        return np.zeros(self.n, np.float32) if row is None else row.copy()

    def round_of(self, client: object) -> int | None:
        """The round that wrote the client's row, or None."""
        return self._rounds.get(self.registry.check(client))

    def stage(self, client: object) -> Row:
        """A slot, float32[n] of undefined content, that becomes the client's row at ``commit``."""
        known = self.registry.check(client)
        if known not in self._staged:
            self._staged[known] = self._free.pop() if self._free else np.empty(self.n, np.float32)
        return self._staged[known]

    def unstage(self, client: object) -> None:
        """Forget the client's staged row, if there is one."""
        slot = self._staged.pop(self.registry.check(client), None)
        if slot is not None:
            self._free.append(slot)

    def commit(self, round: int) -> None:
        """Make every staged row its client's row, written in ``round``; their old slots become free."""
        for client, slot in self._staged.items():
            old = self._rows.get(client)
            if old is not None:
                self._free.append(old)
            self._rows[client] = slot
            self._rounds[client] = round
        self._staged.clear()

    def discard(self) -> None:
        """Forget every staged row."""
        self._free.extend(self._staged.values())
        self._staged.clear()
