"""The changes in memory once a commit counts: worked out before the commit, so that hardly anything fails after it."""

from collections.abc import Iterable

import numpy as np

from fedcore.store.content import Content
from fedcore.store.files.previous import Previous
from fedcore.store.files.row_entries import RowEntries
from fedcore.store.named_vectors import Place, Table, places

_AT_ONCE = 0


class Acceptance:
    """One commit's changes to a content.

    A slot that the folder's index names is free only when a later index does not name it, be it for a row or vector of
    the last commit or, where that can be undone, for one of the commit before.

    Args:
        content: what changes.
        entries: the rows that are new or moved.
        dropped: rows that go: number -> slot.
        table, taken: the vectors, from ``Vectors.propose``.
        unpublished: numbers whose rows the folder does not know, so that their slots are free at once.
        published: the places of vectors that the folder knows.
        keeps: whether what the folder knows, and what is replaced here, is kept as the commit before.
        released: what was kept as the commit before, and is no more.
        is_undo: whether the entries are of rows that were kept.
        round, state: of the commit.

    Cost: O(rows of the commit).
    """

    def __init__(
        self,
        content: Content,
        entries: RowEntries,
        dropped: dict[int, int],
        table: Table,
        taken: list[Place],
        *,
        unpublished: Iterable[int],
        published: set[Place],
        keeps: bool,
        released: Previous | None,
        is_undo: bool,
        round: int | None,
        state: str | None,
    ) -> None:
        self._content, self._entries, self._round, self._state = content, entries, round, state
        self._trusted = not is_undo  # whoever writes a row knows it; one that comes back is checked when it is read
        rows, folder = content.rows, content.folder
        # The transaction with which the folder forgets what is replaced here, be it this one or the next:
        forgets = _AT_ONCE if folder is None else folder.head.sequence + 1
        old = rows.slot[entries.numbers]
        self._written = rows.written + len(old) - int(np.count_nonzero(old))
        replaced = [pair for pair in zip(entries.numbers.tolist(), old.tolist(), strict=True) if pair[1]]
        replaced += dropped.items()
        free_at_once = set(unpublished)
        self._free = [slot for number, slot in replaced if folder is None or number in free_at_once]
        known = [slot for number, slot in replaced if folder is not None and number not in free_at_once]
        self._retired = [] if keeps else known
        kept: set[Place] = set()
        if released is not None and folder is not None:
            self._retired += released.rows.used.tolist()
            kept = places(released.head.vectors) - places(folder.head.vectors) - places(table)

        def end(place: Place) -> int | None:
            if place not in published:
                return _AT_ONCE
            return None if keeps else forgets

        self._forgets = forgets
        self._vectors = content.vectors.after(table, taken, end, [(forgets, place) for place in kept])

    def apply(self) -> None:
        """Make it so. After an error (of an allocation, say) it is called again, and goes on where it stopped."""
        content, slots = self._content, self._content.rows.slots
        content.rows.accept(self._entries, self._written, trusted=self._trusted)
        # Taken from here before it is given there: an error in between leaves a slot unused until the store is opened
        # again. In the other order it would be given twice, and two clients would share it.
        while self._free:
            slot = self._free.pop()
            slots.give((slot,))
        retired, self._retired = self._retired, []
        slots.retire(retired, self._forgets)
        content.vectors.accept(self._vectors)
        content.round, content.state = self._round, self._state
