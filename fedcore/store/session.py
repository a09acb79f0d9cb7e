"""An open store: who may still use it, and how it ends."""

import logging
import os
from contextlib import suppress
from typing import Literal, get_args
from weakref import finalize

from fedcore import devices
from fedcore.errors import RangeError, StoreError, UnknownNameError
from fedcore.store.commits import Commits
from fedcore.store.content import Content
from fedcore.store.files.read_ahead import DiskThread
from fedcore.store.files.residency import Residency
from fedcore.store.files.store_folder import Folder

_log = logging.getLogger("fedcore.store")

FEW_SLOTS = 100
"""So many that wait for readers are nothing to speak of."""

_NO_NUMBER = ("ram:", "mmap:")

Durability = Literal["round", "checkpoint", "none"]
"""When a commit survives a loss of power: at once, from a checkpoint on, or once the system has written it."""
Medium = Literal["ram", "mmap", "cuda"]


def require_names(medium: str, durability: str) -> str:
    """The device of a medium: "cpu" for the host's memory and for files.

    Raises:
        UnknownNameError: there is no such medium or durability.
        DeviceError: there is no such device.
    """
    if not isinstance(medium, str) or medium.partition(":")[0] not in get_args(Medium) or medium.startswith(_NO_NUMBER):
        raise UnknownNameError.of("medium", medium, get_args(Medium))
    if durability not in get_args(Durability):
        raise UnknownNameError.of("durability", durability, get_args(Durability))
    return devices.named(medium) if medium.startswith("cuda") else devices.CPU


def require_files(undoable: bool, medium: str, *, readonly: bool) -> None:
    """Raise a RangeError where an undoable store cannot be: it is its folder that keeps what was replaced."""
    if undoable and (medium != "mmap" or readonly):
        got = "readonly=True" if readonly else f'medium="{medium}"'
        raise RangeError(f'undoable: expected False, or medium="mmap" open for writing, got True with {got}')


class Session:
    """From opening to closing, in one process.

    Args:
        content: what is open.
        durability: when the folder is durable.
        resident_rows: how many rows of a file stay in memory.
    """

    def __init__(self, content: Content, durability: Durability, resident_rows: int | None) -> None:
        self.content, self.folder = content, content.folder
        self.commits = Commits(content, every_commit=durability != "checkpoint")
        self._write_back = durability == "checkpoint"  # else commits wait for their writing, or nobody ever does
        self.background = None if self.folder is None else DiskThread(self.folder.rows)
        self.residency = None if self.folder is None else Residency(self.folder.rows, resident_rows)
        self._process = os.getpid()
        self._closed = False
        self._has_warned = False
        # So that the thread ends and files are closed, but nothing else is done, when a store is dropped:
        self._finalizer = None if self.folder is None else finalize(self, _end, self.background, self.folder)
        if self._finalizer is not None:
            # A daemon thread may be in a commit when the program ends: what is closed under its hands may be a file of
            # another number then, into which it writes. The system closes everything, as after a kill.
            self._finalizer.atexit = False

    def require_open(self) -> None:
        """Raise a StoreError if the store was closed; see to what a fork of its process needs."""
        if self._closed:
            raise StoreError(f"{self._name}: expected an open store, got one that was closed")
        if self.folder is not None and self._process != os.getpid():
            self._wake_in_fork(self.folder)

    def require_files(self) -> None:
        """Raise a CorruptionError if a file was cut short."""
        self.content.rows.slots.require_whole()
        self.content.vectors.require_whole()

    def require_writer(self) -> None:
        """Raise a StoreError unless the store can be written to."""
        self.require_open()
        if self.folder is not None and self.folder.readonly:
            raise StoreError(f"{self._name}: expected a store open for writing, got one opened with readonly=True")
        self.require_whole()

    def require_right(self) -> None:
        """Raise a StoreError unless the store can be written to, and by nobody else: before slots are written."""
        self.require_writer()
        self.require_files()
        self.commits.require_right()

    def require_whole(self) -> None:
        """Raise a StoreError if what is in memory may be no commit."""
        self.require_open()
        if self.commits.broken is not None:
            raise StoreError(f"{self._name}: {self.commits.broken}: open it again")

    def refresh(self) -> None:
        """Let a reader see what was committed last."""
        self.require_open()
        if self.folder is not None and self.folder.readonly:
            self.content.refresh(self.folder)

    def after_commit(self) -> None:
        """Evict surplus rows and start writing back, after a commit."""
        with suppress(OSError, RuntimeError, MemoryError):  # the commit counts, and these only make others quicker
            if self.residency is not None:
                self.residency.trim()
            if self.background is not None and self._write_back:
                self.background.write_back()
            self._look_at_readers()

    def _look_at_readers(self) -> None:
        """Say once that readers, a forgotten notebook perhaps, keep more of the disk from use than is in use."""
        rows, vectors = self.content.rows, self.content.vectors
        waiting, used = rows.slots.waiting + vectors.waiting, rows.written + len(vectors.table)
        if self.folder is None or waiting <= max(used, FEW_SLOTS):
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            who = [f"process {process}, {behind} commits behind" for process, behind in self.folder.readers]
            _log.warning(
                "%s: %d slots that are used no more wait for readers, and %d are in use: the files grow with every "
                "round until readers refresh() or close() (%s)",
                self._name,
                waiting,
                used,
                "; ".join(who) or "in this process, or views of vectors that somebody holds",
            )

    def close(self) -> None:
        """Publish what was committed, or stay open; then close the files, and leave them no longer than they must be.

        Raises:
            StoreError: it was not published; or the files stayed longer, and are closed.
        """
        folder, end = self.folder, self._finalizer
        if folder is None or end is None or self._closed:
            self._closed = True
            return
        if self.background is not None:
            self.background.close()
        writes = not folder.readonly and self.commits.broken is None and self._process == os.getpid()
        is_ours = writes and self._publish()
        self._closed = True
        try:
            if is_ours:
                folder.trim()
        finally:
            end()

    def _publish(self) -> bool:
        """Leave the folder as it was committed last; whether it is this process's."""
        try:
            self.commits.require_right()
        except StoreError:
            if self.commits.is_behind:
                raise
            return False  # nothing is lost, and the files are somebody else's
        self.commits.publish()
        return True

    @property
    def _name(self) -> str:
        return "store" if self.folder is None else str(self.folder.path)

    def _wake_in_fork(self, folder: Folder) -> None:
        """A reader that was forked looks at the last commit; a writer's slots belong to the process that was forked."""
        if not folder.readonly:
            raise StoreError(
                f"{self._name}: expected the process that opened the store for writing ({self._process}), got a fork "
                "of it: open it there with readonly=True"
            )
        self._process = os.getpid()
        folder.pin_again()
        self.content.refresh(folder)


def _end(background: DiskThread | None, folder: Folder) -> None:
    if background is not None:
        background.close()
    folder.close()
