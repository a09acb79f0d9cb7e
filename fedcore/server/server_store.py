"""The store of a server: made, or opened again, and let go if the server then cannot be."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from fedcore.clients import ClientId
from fedcore.errors import CheckpointError, RangeError, ShapeError, UnknownNameError
from fedcore.server.folder_checks import believed
from fedcore.store import ClientStore, Durability
from fedcore.store.files.atomic_folder import remove
from fedcore.store.info import state_of
from fedcore.store.session import Medium


@contextmanager
def new_rows(store: str | ClientStore, clients: int | Iterable[ClientId] | None, n: int) -> Iterator[ClientStore]:
    """Rows of n elements for a new server; if the block fails, what was made here is gone again.

    Raises:
        RangeError, ShapeError, UnknownNameError: an argument is not what ``Server`` says.
        StoreError: the folder cannot be made.
    """
    if isinstance(store, ClientStore):
        if clients is not None:
            raise RangeError("clients: expected none beside a ClientStore, which knows its clients, got some")
        if len(store) > 0:
            raise RangeError(
                f"store: expected an empty ClientStore, got {len(store)} rows: their sum is unknown; use Server.load"
            )
        if store.n != n:
            raise ShapeError(f"store: expected rows of {n} parameters, got {store.n}")
        yield store
        return
    medium, _, path = store.partition(":")
    if store != "ram" and (medium != "mmap" or not path):
        raise UnknownNameError.of("store", store, ["ram", "mmap:PATH"])
    if clients is None:
        raise RangeError("clients: expected a count or the ids, got None")
    made = ClientStore(clients, n, medium="mmap", path=path) if path else ClientStore(clients, n)
    try:
        yield made
    except BaseException:
        made.close()
        if path:
            remove(Path(path))
        raise


@contextmanager
def saved_rows(
    path: str | os.PathLike[str], medium: Literal["ram", "mmap"] | None, durability: Durability
) -> Iterator[tuple[ClientStore, dict[str, Any]]]:
    """The rows and the state of a server, both of one commit; if the block fails, the store is closed again.

    Args:
        medium: None for the one that the server had; only this is looked up beforehand.

    Raises:
        StoreError, LockedError, CorruptionError: as ``ClientStore.open``.
        CheckpointError: it is a store without a server, or none can be made of what it says.
    """
    with believed(path):
        if medium is None:
            medium = _servers(path, state_of(Path(path)))["medium"]
        rows = ClientStore.open(path, medium=medium, durability=durability)
        try:
            yield rows, _servers(path, rows.state)
        except BaseException:
            rows.close()
            raise


def _servers(path: str | os.PathLike[str], state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or state.get("what") != "a fedcore server":
        raise CheckpointError(f"{path}: expected a folder written by a fedcore Server, got a ClientStore without one")
    if state["medium"] not in get_args(Medium):
        raise CheckpointError(f"{path}: expected a server on one of {get_args(Medium)}, got {state['medium']!r}")
    return state
