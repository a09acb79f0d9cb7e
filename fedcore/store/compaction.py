"""Which rows move when a store gives back its free slots."""

import numpy as np

from fedcore.store.content import Content
from fedcore.store.index import RowEntries


def lowered_rows(content: Content) -> RowEntries:
    """Copy the highest rows to the lowest free slots, as far as that brings them down; a damaged row stays.

    Returns:
        the entries of the rows that move.
    """
    rows = content.rows
    numbers = np.flatnonzero(rows.slot)
    moved, slots = [], []
    try:
        for number in numbers[np.argsort(-rows.slot[numbers])].tolist():
            old = int(rows.slot[number])
            if not rows.slots.has_free_below(old):
                break
            if content.problem(number) is None:
                slots.append(rows.slots.copy(old))
                moved.append(number)
                rows.slots.let_go([old, slots[-1]])
    except BaseException:
        rows.slots.give(slots)
        raise
    moving = np.array(moved, np.int64)
    return RowEntries(moving, np.array(slots, np.int64), rows.round[moving], rows.seal[moving])
