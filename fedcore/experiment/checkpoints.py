"""Checkpoints of killed runs: a copy of each unfinished trial's server, as old as losing it costs little."""

from contextlib import suppress
from pathlib import Path
from time import perf_counter

from fedcore.engines import Engine, KeepingClients
from fedcore.errors import StoreError
from fedcore.experiment.nodes import Nodes
from fedcore.experiment.records import Writer
from fedcore.server import Server
from fedcore.store.files.atomic_folder import remove

SECONDS = 10
"""The least time between two copies."""
SHARE = 0.05
"""The most of a trial's time that copies may take."""


class Checkpoints:
    """The copies of one trial's server. When one is made depends on the clock, what a resumed trial gives does not.

    Args:
        folder: of this trial; need not exist.
        seconds: the least time between two copies; 0 for one after every round.
    """

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self.folder = folder
        self._seconds = seconds
        self._next = perf_counter() + seconds

    def save_when_due(self, server: Server | Nodes, record: Writer, engine: Engine | None = None) -> None:
        """Copy the server, if the last copy is old enough; its rounds are durable in the record before.

        Rows that an engine's clients keep are copied first, under their round's number, so that a kill between the two
        leaves those of the older copy beside it.
        """
        began = perf_counter()
        if began < self._next:
            return
        record.sync()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(engine, KeepingClients):
            engine.save(rows_file(self.folder, server.round_number))
        server.save(self.folder)
        self._forget_rows(but=rows_file(self.folder, server.round_number))
        done = perf_counter()
        self._next = done + (max(self._seconds, (done - began) / SHARE) if self._seconds else 0)

    def remove(self) -> None:
        """Forget the copy; the trial is over."""
        self._forget_rows()
        if self.folder.is_dir():
            with suppress(StoreError):
                remove(self.folder)

    def _forget_rows(self, but: Path | None = None) -> None:
        for file in self.folder.parent.glob(rows_file(self.folder, "*").name):
            if file != but:
                file.unlink(missing_ok=True)


def rows_file(folder: Path, round: int | str) -> Path:
    """The file beside a server's copy that has its clients' own rows, of so many finished rounds."""
    return folder.with_name(f"{folder.name}.rows-{round}.npz")
