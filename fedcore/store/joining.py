"""A store whose rows are pieces of other stores' rows, one behind the other, copied bit by bit."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore.errors import CheckpointError
from fedcore.kernels import Codes
from fedcore.kernels.quantise import BLOCK
from fedcore.store.client_store import ClientStore
from fedcore.store.content import Content
from fedcore.store.files.atomic_folder import replacing
from fedcore.store.row_format import Row, RowFormat


class Piece(NamedTuple):
    """The elements [start, stop) of a store's rows: multiples of 64, which a scale of int8 covers, or the row's end."""

    rows: ClientStore
    start: int
    stop: int


def join(
    path: Path, pieces: Sequence[Piece], vectors: Mapping[str, Any], state: Any, row_done: Callable[[], object]
) -> None:
    """Write a store of joined rows to a folder, new or empty: safe on the disk when this returns, or not there at all.

    Clients, their numbers, the rounds of the rows and the last round are those of the pieces' stores.

    Args:
        pieces: one behind the other, of stores with one codec and the same clients.
        vectors, state: as for ``ClientStore.commit``.
        row_done: called after each row.

    Raises:
        CheckpointError: the stores are not of one codec, or not of the same clients and rows.
        StoreError: the folder is in use, or the disk is full.
        CorruptionError: something is not what was written.

    Cost: reads and writes each row once.
    """
    first = pieces[0].rows
    require_alike([piece.rows for piece in pieces])
    form = RowFormat(first.codec, sum(piece.stop - piece.start for piece in pieces))
    with replacing(path, form, first.registry, existing=False) as folder:
        content = Content.read(folder)
        rows, numbers, rounds = content.rows, *first.written()
        rows.grow(int(numbers.max(initial=-1)) + 1)
        seals = []
        for number, round in zip(numbers.tolist(), rounds.tolist(), strict=True):
            slot = rows.stage(number, round)
            _copy(pieces, first.registry.id_of(number), form.row(rows.slots.memory(slot)))
            seals.append(rows.slots.seal(slot))
            rows.slots.let_go([slot])
            row_done()
        entries = content.adopt(rows.proposed(0, seals), vectors)
        head = replace(folder.head, round=first.round, state=json.dumps(state), vectors=content.vectors.table)
        folder.publish(head, entries, (), ())


def require_alike(stores: Sequence[ClientStore]) -> None:
    """Raise a CheckpointError unless all have rows of the same clients and rounds, through one codec."""
    facts = [
        (store.codec, store.round, store.registry.explicit(), *(column.tolist() for column in store.written()))
        for store in stores
    ]
    if any(one != facts[0] for one in facts):
        raise CheckpointError(
            f"{stores[0].path}: expected rows of the same clients and rounds as in the others, got other ones: they "
            "are not of one server"
        )


def _copy(pieces: Sequence[Piece], client: Any, out: Row) -> None:
    """Copy the pieces of a client's row into one."""
    at = 0
    for store, start, stop in pieces:
        row, end = store.row(client), at + stop - start
        for source, target, block in zip(_arrays(row), _arrays(out), (1, BLOCK), strict=False):
            target[-(-at // block) : -(-end // block)] = source[start // block : -(-stop // block)]
        at = end


def _arrays(row: Row | None) -> list[npt.NDArray[Any]]:
    """The arrays of a row: an element each, and then a scale for each block of 64."""
    if not isinstance(row, Codes):
        return [np.asarray(row)]
    return [row.codes] if row.scales is None else [row.codes, row.scales]
