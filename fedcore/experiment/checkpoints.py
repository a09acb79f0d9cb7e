"""Checkpoints of killed runs: a copy of each unfinished trial's server, as old as losing it costs little."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter

from fedcore.errors import StoreError
from fedcore.experiment.records import Writer
from fedcore.server import Server
from fedcore.store.files.atomic_folder import Carried, carried, put, remove

SECONDS = 10
"""The least time between two copies."""
SHARE = 0.05
"""The most of a trial's time that copies may take."""


class Clock:
    """Says when a copy is due, which depends on the time, as what a resumed trial gives does not.

    Args:
        seconds: the least time between two copies; 0 for one after every round.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = perf_counter() + seconds

    @property
    def is_due(self) -> bool:
        """Tell whether the last copy is old enough."""
        return perf_counter() >= self._next

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Measure how long a copy takes, on which it depends when the next one is due."""
        began = perf_counter()
        yield
        done = perf_counter()
        self._next = done + (max(self._seconds, (done - began) / SHARE) if self._seconds else 0)


class Checkpoints:
    """The copies of one trial's server.

    Args:
        folder: of this trial; need not exist.
        seconds: as for ``Clock``.
    """

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self.folder = folder
        self._clock = Clock(seconds)

    def save_when_due(self, server: Server, record: Writer) -> None:
        """Copy the server, if the last copy is old enough; its rounds are durable in the record before."""
        if self._clock.is_due:
            with self._clock.copying():
                record.sync()
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                server.save(self.folder)

    def carried(self) -> Carried | None:
        """The copy as bytes, if there is one."""
        return carried(self.folder) if self.folder.exists() else None

    def put(self, copy: Carried, record: Writer) -> None:
        """Take in a copy that was made elsewhere; its rounds are durable in the record before."""
        record.sync()
        put(self.folder, copy)

    def remove(self) -> None:
        """Forget the copy; the trial is over."""
        if self.folder.is_dir():
            with suppress(StoreError):
                remove(self.folder)
