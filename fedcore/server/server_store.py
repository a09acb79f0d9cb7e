"""The store of a server: made, or opened again, and let go if the server then cannot be."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fedcore import devices
from fedcore.arguments import absolute, absolute_store
from fedcore.clients import ClientId
from fedcore.errors import RangeError, ShapeError, UnknownNameError
from fedcore.server.folder_checks import believed, server_state
from fedcore.store import ClientStore, Durability
from fedcore.store.device_rows import DeviceRows
from fedcore.store.files.atomic_folder import remove
from fedcore.store.info import state_of
from fedcore.store.session import require_files


@contextmanager
def new_rows(
    store: str | ClientStore,
    clients: int | Iterable[ClientId] | None,
    n: int,
    device: str = devices.CPU,
    hot_rows: int | None = None,
    undoable: bool = False,
) -> Iterator[ClientStore]:
    """Rows of n elements for a new server, on its device; if the block fails, what was made here is gone again.

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
        if undoable and not store.undoable:
            raise RangeError("undoable: expected False beside a ClientStore that was made without it, got True")
        yield on_device(store, device, hot_rows)
        return
    store = absolute_store(store)
    medium, _, path = str(store).partition(":")  # a Path alone is told what it should be
    if store not in ("ram", "cuda") and (medium != "mmap" or not path):
        raise UnknownNameError.of("store", store, ["ram", "cuda", "mmap:PATH"])
    if store == "cuda" and device == devices.CPU:
        raise RangeError("store: expected 'ram' or 'mmap:PATH' for a server with device='cpu', got 'cuda'")
    if clients is None:
        raise RangeError("clients: expected a count or the ids, got None")
    if path:
        made = ClientStore(clients, n, medium="mmap", path=path, undoable=undoable)
    else:
        made = ClientStore(clients, n, medium=device if store == "cuda" else "ram", undoable=undoable)
    try:
        yield on_device(made, device, hot_rows)
    except BaseException:
        made.close()
        if path:
            remove(Path(path))
        raise


def on_device(store: ClientStore, device: str, hot_rows: int | None) -> ClientStore:
    """A store as a server on that device uses it: itself, or a face of it that brings rows there and back.

    Raises:
        RangeError: its rows lie on another device; or there is a bound of hot rows where all are, or none can be.
    """
    if store.device not in (devices.CPU, device):
        raise RangeError(
            f"store: expected rows in host memory, in files or on {device}, where the server's device is, got a store "
            f"of medium 'cuda' on {store.device}: Server(device={store.device!r}) goes with it"
        )
    if store.device == device:
        if hot_rows is not None:
            due = "None for a server with device='cpu'" if device == devices.CPU else "None, since all rows are there"
            raise RangeError(f"hot_rows: expected {due}, got {hot_rows!r}")
        return store
    return DeviceRows(store, device, hot_rows)


@contextmanager
def saved_rows(
    path: str | os.PathLike[str] | ClientStore,
    medium: Literal["ram", "mmap", "cuda"] | None,
    durability: Durability | None,
    device: str | None = None,
    hot_rows: int | None = None,
    undoable: bool | None = None,
) -> Iterator[tuple[ClientStore, dict[str, Any], str]]:
    """The rows and the state of a server, both of one commit, and its device.

    If the block fails, the store is closed, unless it was given.

    Args:
        medium, device, undoable: None for those that the server had; only they are looked up beforehand.

    Raises:
        StoreError, LockedError, CorruptionError: as ``ClientStore.open``.
        CheckpointError: it is a store without a server.
        RangeError: something is said of a store that was given, which is as it is.
    """
    if isinstance(path, ClientStore):
        rows, where = _given(path, medium, durability, undoable), path.path or "store"
    else:
        where = absolute(path)
        rows, device = _opened(where, medium, durability, device, undoable)
    try:
        with believed(where):
            state = server_state(where, rows.state)
            device = _device_of(state) if device is None else device
        yield on_device(rows, device, hot_rows), state, device
    except BaseException:
        if rows is not path:
            rows.close()
        raise


def _given(rows: ClientStore, medium: str | None, durability: Durability | None, undoable: bool | None) -> ClientStore:
    """The store that was given.

    Raises:
        RangeError: something else is said of it, or it only reads.
    """
    if rows.readonly:
        raise RangeError("path: expected a ClientStore open for writing, got one opened with readonly=True")
    for name, said in (("medium", medium), ("durability", durability), ("undoable", undoable)):
        if said is not None and said != (here := getattr(rows, name)):
            raise RangeError(f"{name}: expected None or {here!r} beside a ClientStore that is open, got {said!r}")
    return rows


def _opened(
    path: Path,
    medium: Literal["ram", "mmap", "cuda"] | None,
    durability: Durability | None,
    device: str | None,
    undoable: bool | None,
) -> tuple[ClientStore, str | None]:
    """The store of a folder, and the device as far as it is known."""
    with believed(path):
        if medium is None or (medium == "cuda" and device is None) or (medium == "mmap" and undoable is None):
            before = server_state(path, state_of(path))
            device = _device_of(before) if device is None else device
            if medium is None:
                medium = "ram" if before["medium"] == "cuda" and device == devices.CPU else before["medium"]
            if undoable is None and medium == "mmap":
                undoable = before.get("undoable") is True
    if medium == "cuda" and device == devices.CPU:
        raise RangeError("medium: expected 'ram' or 'mmap' for a server with device='cpu', got 'cuda'")
    require_files(bool(undoable), medium or "mmap", readonly=False)
    with believed(path):
        on = device if medium == "cuda" and device is not None else medium
        rows = ClientStore.open(path, medium=on or "mmap", durability=durability or "round", undoable=bool(undoable))
    return rows, device


def _device_of(state: dict[str, Any]) -> str:
    """The device of the server that wrote a state; the first folders do not say, for there was one."""
    return devices.named(state.get("device", devices.CPU))
