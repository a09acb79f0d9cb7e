"""Checkpoints of killed runs: a copy of each unfinished trial's server, as old as losing it costs little."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from fedcore.atomic_file import replacing, require_file
from fedcore.engines import Engine, KeepingClients
from fedcore.errors import StoreError
from fedcore.experiment.nodes import Nodes
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


class Copy(NamedTuple):
    """A copy as bytes, for another machine: the server's files, and the rows that its clients keep, by round."""

    files: Carried
    rows: dict[str, bytes]


class Checkpoints:
    """The copies of one trial's server.

    Args:
        folder: of this trial; need not exist.
        seconds: as for ``Clock``.
    """

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self.folder = folder
        self._clock = Clock(seconds)

    def save_when_due(self, server: Server | Nodes, engine: Engine, record: Writer) -> None:
        """Copy the server, if the last copy is old enough; its rounds are durable in the record before."""
        if self._clock.is_due:
            with self._clock.copying():
                record.sync()
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                save(self.folder, server, engine)

    def carried(self) -> Copy | None:
        """The copy as bytes, if there is one."""
        return carried_copy(self.folder) if self.folder.exists() else None

    def put(self, copy: Copy, record: Writer) -> None:
        """Take in a copy that was made elsewhere; its rounds are durable in the record before."""
        record.sync()
        put_copy(self.folder, copy)

    def remove(self) -> None:
        """Forget the copy; the trial is over."""
        _forget_rows(self.folder)
        if self.folder.is_dir():
            with suppress(StoreError):
                remove(self.folder)
                with suppress(OSError):  # an empty one that a killed run has left; anything else stays
                    self.folder.rmdir()


def save(folder: Path, server: Server | Nodes, engine: Engine) -> None:
    """Copy a server.

    Rows that an engine's clients keep are copied first, under their round's number, so that a kill between the two
    leaves those of the older copy beside it.
    """
    rows = rows_file(folder, server.round_number)
    if isinstance(engine, KeepingClients):
        engine.save(rows)
    server.save(folder)
    _forget_rows(folder, but=[rows])


def carried_copy(folder: Path) -> Copy:
    """A copy as bytes."""
    return Copy(carried(folder), {_round_of(file): require_file(file).read_bytes() for file in _rows_files(folder)})


def put_copy(folder: Path, copy: Copy) -> None:
    """Write a copy that was made elsewhere, in the same order as ``save``."""
    files = {rows_file(folder, round): rows for round, rows in copy.rows.items()}
    for file, rows in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, "wb") as whole:
            whole.write(rows)
    put(folder, copy.files)
    _forget_rows(folder, but=files)


def rows_file(folder: Path, round: int | str) -> Path:
    """The file beside a server's copy that has its clients' own rows, of so many finished rounds."""
    return folder.with_name(f"{folder.name}.rows-{round}.npz")


def _rows_files(folder: Path) -> list[Path]:
    name = re.compile(re.escape(folder.name) + r"\.rows-[0-9]+\.npz")
    there = folder.parent.iterdir() if folder.parent.is_dir() else ()
    return [file for file in there if name.fullmatch(file.name) and _is_archive(file)]


def _is_archive(file: Path) -> bool:
    """Tell whether a file is one of arrays, as an engine writes it; a link is not followed."""
    if file.is_symlink():
        return False
    with require_file(file).open("rb") as content:
        return content.read(2) == b"PK"


def _round_of(file: Path) -> str:
    return file.stem.rpartition("-")[2]


def _forget_rows(folder: Path, but: Collection[Path] = ()) -> None:
    for file in _rows_files(folder):
        if file not in but:
            file.unlink(missing_ok=True)
