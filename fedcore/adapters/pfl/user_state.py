"""Users' states of pfl as rows of a ``ClientStore``."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from pfl.data.user_state import AbstractUserStateStorage
from pfl.exception import UserNotFoundError
from pfl.internal.ops.selector import get_default_framework_module
from pfl.stats import MappedVectorStatistics

from fedcore.arguments import absolute
from fedcore.errors import CheckpointError, DtypeError
from fedcore.kernels import Codes, quantise
from fedcore.layout import Layout
from fedcore.libraries import dtype_name
from fedcore.server.folder_checks import believed
from fedcore.store import ClientStore, Durability
from fedcore.store.files.atomic_folder import remove
from fedcore.store.row_format import Codec

BLOCK = 64
"""The weight lies in a block of elements of its own, so that under "int8" it does not set the scale of others."""


STATES = "states of pfl's users"
_KEY = re.compile(r"key(-[\w.~%-]*)?", re.ASCII)  # what _folder makes
_UNFINISHED = re.compile(r"\.(draft|previous)-[0-9a-f]{12}$")  # a store that was being made


class ClientStoreUserState(AbstractUserStateStorage):
    """A user's state, tensors of float32 by name and a weight, as one row; the states of each key in a store.

    ``save_state`` copies. ``load_state`` returns a copy, as MappedVectorStatistics of the framework's tensors.

    Args:
        path: a folder, for states that may be larger than memory and outlive the process; None keeps them in memory.
        codec, durability: as of ``ClientStore``. With "checkpoint" a crash goes back to the last ``checkpoint``, so
            call that with each checkpoint of the run; with "round" every saved state is safe, and waits for the disk.
    """

    def __init__(
        self, path: str | Path | None = None, *, codec: Codec = "f32", durability: Durability = "checkpoint"
    ) -> None:
        self._path = None if path is None else absolute(path)
        self._codec, self._durability = codec, durability
        self._tables: dict[str, tuple[ClientStore, Layout]] = {}
        try:
            for folder in sorted(self._path.iterdir()) if self._path is not None and self._path.is_dir() else []:
                if (
                    _KEY.fullmatch(folder.name)
                    and not _UNFINISHED.search(folder.name)
                    and folder.is_dir()
                    and not folder.is_symlink()
                ):
                    self._tables[folder.name] = self._reopened(folder)
        except BaseException:
            self.close()
            raise

    def save_state(self, state: Any, user_id: str, key: str | None = None) -> None:
        """Keep a copy of the state.

        Raises:
            DtypeError, ShapeError, ArrayError: it is not of float32 tensors, or not of those that the first state of
                this key had.
        """
        tensors = dict(state.items())
        store, layout = self._table(key, tensors)
        if user_id not in store.registry:
            store.add(user_id)
        try:
            row = store.stage(user_id)
            whole = np.empty(store.n, np.float32) if isinstance(row, Codes) else row
            for piece in layout.slices:  # the state comes back as it was saved
                if piece.name in tensors and (dtype := dtype_name(tensors[piece.name])) != piece.dtype:
                    raise DtypeError(f"{piece.name}: expected {piece.dtype}, as the first state has, got {dtype}")
            layout.flatten(tensors, out=whole[: layout.n])
            whole[layout.n :], whole[-1] = 0, getattr(state, "weight", 1.0)
            if isinstance(row, Codes):
                quantise(whole, row.codec, out=row)
            store.commit((store.round or 0) + 1)
        finally:
            store.discard()

    def load_state(self, user_id: str, key: str | None = None) -> Any:
        """A copy of the user's state, as MappedVectorStatistics.

        Raises:
            UserNotFoundError: it was never saved.
        """
        store, layout = self._tables.get(_folder(key), (None, None))
        if store is None or layout is None or user_id not in store.registry or store.row(user_id) is None:
            raise UserNotFoundError(user_id)
        row = store.read(user_id)
        to_tensor = get_default_framework_module().to_tensor
        tensors = {name: to_tensor(view) for name, view in layout.unflatten(row[: layout.n]).items()}
        return MappedVectorStatistics(tensors, weight=float(row[-1]))

    def clear_states(self) -> None:
        """Remove all states, from the disk too, where nothing else is touched."""
        self.close()
        if self._path is not None:
            for folder in self._tables:
                remove(self._path / folder)
        self._tables.clear()

    def checkpoint(self) -> None:
        """Make all saved states safe on the disk, where durability is "checkpoint"."""
        for store, _ in self._tables.values():
            store.checkpoint()

    def close(self) -> None:
        """Make all saved states safe, and close the files."""
        for store, _ in self._tables.values():
            store.close()

    def _table(self, key: str | None, tensors: dict[str, Any]) -> tuple[ClientStore, Layout]:
        """The store of a key, made for tensors like these if it is new."""
        folder = _folder(key)
        if folder not in self._tables:
            layout = Layout.of(tensors, buffers=())
            for piece in (*layout.outside, *layout.narrow):
                raise DtypeError(f"{piece.name}: expected float32, got {piece.dtype}")
            n = -(-layout.n // BLOCK) * BLOCK + 1
            if self._path is None:
                store = ClientStore([], n, codec=self._codec)
            else:
                path, durability = self._path / folder, self._durability
                store = ClientStore([], n, medium="mmap", codec=self._codec, path=path, durability=durability)
            store.commit(0, state={"what": STATES, "layout": layout.to_state()})
            self._tables[folder] = store, layout
        return self._tables[folder]

    def _reopened(self, folder: Path) -> tuple[ClientStore, Layout]:
        store = ClientStore.open(folder, durability=self._durability)
        try:
            if not isinstance(store.state, dict) or store.state.get("what") != STATES:
                raise CheckpointError(f"{folder}: expected the states of pfl's users, got another store")
            if store.codec != self._codec:
                raise CheckpointError(f"codec: expected {store.codec!r}, as {folder} has, got {self._codec!r}")
            with believed(folder):
                return store, Layout.from_state(store.state["layout"])
        except BaseException:
            store.close()
            raise


def _folder(key: str | None) -> str:
    return "key" if key is None else f"key-{quote(key, safe='')}"
