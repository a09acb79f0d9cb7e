"""The journal of a trial: the record of its rounds, its models, and checkpoints of its server."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

from fedcore.errors import ConfigError, StoreError
from fedcore.files import inside, read_bytes, reading, replacing
from fedcore.model import write_model
from fedcore.runtime import Closing, __version__
from fedcore.server import Server
from fedcore.sim.engines import AtWork, Engine, KeepingClients, Nodes
from fedcore.sim.experiment import results
from fedcore.sim.experiment.results import RECORDS, Header, RoundRecord, Writer, have_ended, started
from fedcore.sim.experiment.schema import Evaluate, Trial
from fedcore.store import Carried, carried, put, remove

SECONDS = 10
"""The minimum time between two checkpoints."""
SHARE = 0.05
"""The maximum share of a trial's time that checkpoints use."""
CHECKPOINTS = "checkpoints"
MODELS = "models"


class Copy(NamedTuple):
    """A checkpoint as bytes, for a different machine: the server's files, and the vectors of its clients by round."""

    files: Carried
    rows: dict[str, bytes]


@dataclass(frozen=True)
class Begun:
    """The start of a trial, or its resumption after ``rounds`` recorded rounds; later ones are computed again.

    ``data`` and ``traces`` are the hashes of ``Header``.
    """

    rounds: int
    data: str | None = None
    traces: list[str] | None = None


@dataclass(frozen=True)
class Kept:
    """A model (torch's tensors by name) and the name of its file, written before the entry of its round."""

    name: str
    tensors: Mapping[str, Any]


Entry = Begun | RoundRecord | Kept | Copy
"""An entry of a journal; a ``Copy`` is a checkpoint after all preceding rounds."""


class Journal(Closing, ABC):
    """Base class of the journals that a trial writes, and from which it resumes. A context manager.

    ``before`` are the rounds that are already written. ``saved`` is the folder of the last checkpoint, which may be
    missing, or None for a new trial. ``seconds`` is the minimum time between two checkpoints; 0 means one after every
    round. Results do not depend on this time.
    """

    def __init__(self, before: Sequence[RoundRecord], saved: Path | None, seconds: float) -> None:
        self.before, self.saved = before, saved
        self._seconds, self._next = seconds, perf_counter() + seconds

    @abstractmethod
    def put(self, entry: Entry) -> None:
        """Write an entry."""

    @abstractmethod
    def _save(self, server: Server | Nodes, engine: Engine) -> None:
        """Write a checkpoint."""

    @abstractmethod
    def end(self) -> None:
        """Delete the checkpoint of a complete trial."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def save_when_due(self, server: Server | Nodes, engine: Engine) -> None:
        """Write a checkpoint if enough time has passed since the last one."""
        began = perf_counter()
        if began >= self._next:
            self._save(server, engine)
            done = perf_counter()
            self._next = done + (max(self._seconds, (done - began) / SHARE) if self._seconds else 0)


class FolderJournal(Journal):
    """The journal in a run's folder, in the subfolders ``records``, ``checkpoints`` and ``models``.

    Raises a ConfigError if the record belongs to a different trial, and a MissingDataError if it is damaged.
    """

    def __init__(self, trial: Trial, folder: Path, seconds: float = SECONDS) -> None:
        self._header = header_of(trial)
        self._path = record_of(trial, folder)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._models = inside(folder, folder / MODELS / self._path.stem)
        self._checkpoint = inside(folder, folder / CHECKPOINTS / self._path.stem)
        before = rounds_before(self._path, self._header, trial.experiment.evaluate)
        super().__init__(before or [], None if before is None else self._checkpoint, seconds)
        self._writer: Writer | None = None
        if before is None:
            Writer(self._path, self._header).close()  # so that a trial that fails at once has a record too

    @property
    def is_complete(self) -> bool:
        """Whether all rounds were written before."""
        return have_ended(self.before, self._header.rounds)

    def put(self, entry: Entry) -> None:
        """Write an entry; a model is written as ``models/TRIAL/NAME.pt``, a ``state_dict``."""
        if isinstance(entry, Begun):
            self.close()
            self._check_hashes(entry)
            self._writer = Writer(self._path, self._header, self.before[: entry.rounds], until=len(self.before))
        elif isinstance(entry, RoundRecord):
            self._record.add(entry)
        elif isinstance(entry, Kept):
            self._models.mkdir(parents=True, exist_ok=True)
            write_model(entry.tensors, self._models / f"{entry.name}.pt")
        else:
            self._record.sync()
            _write_copy(self._checkpoint, entry)

    def _check_hashes(self, begun: Begun) -> None:
        """Reject data or traces that changed since the trial began, and put their hashes into the header."""
        recorded = results.read_header(self._path)
        for name in ("data", "traces"):
            before, now = getattr(recorded, name, None), getattr(begun, name)
            if before is not None and before != now:
                raise ConfigError(
                    f"{name}: changed since {self._path} was begun (hash {before}, now {now}); restore the old "
                    f"{name}, or choose a different folder"
                )
        self._header = replace(self._header, data=begun.data, traces=begun.traces)

    def _save(self, server: Server | Nodes, engine: Engine) -> None:
        self._record.sync()  # the rounds must be durable before the checkpoint
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        _write_checkpoint(self._checkpoint, server, engine)

    def carried(self) -> Copy | None:
        """Return the last checkpoint as bytes; None if no checkpoint exists."""
        return _read_copy(self._checkpoint) if self.saved is not None and self._checkpoint.exists() else None

    def end(self) -> None:
        """Delete the checkpoint, even if a run that was killed at its very end left it."""
        _delete_rows(self._checkpoint)
        if self._checkpoint.is_dir():
            with suppress(StoreError):
                remove(self._checkpoint)
                with suppress(OSError):  # delete an empty folder of a killed run; keep a folder with other files
                    self._checkpoint.rmdir()

    def close(self) -> None:
        """Close the record."""
        if self._writer is not None:
            self._writer.close()

    @property
    def _record(self) -> Writer:
        assert self._writer is not None, "a Begun entry comes first"
        return self._writer


class SentJournal(Journal):
    """The journal of a trial whose folder is on a different machine; ``send`` sends each entry to that machine.

    A checkpoint is on this machine's disk only while it is read or written, since a worker may be killed at any time.
    """

    def __init__(
        self, before: Sequence[RoundRecord], copy: Copy | None, seconds: float, send: Callable[[Entry], None]
    ) -> None:
        self._folder = _temporary_folder()
        saved = Path(self._folder.name, "server")
        super().__init__(before, saved, seconds)
        self._send = send
        if copy is not None:
            _write_copy(saved, copy)

    def put(self, entry: Entry) -> None:
        """Send an entry."""
        if isinstance(entry, Begun):
            self.close()
        self._send(entry)

    def _save(self, server: Server | Nodes, engine: Engine) -> None:
        with _temporary_folder() as folder:
            _write_checkpoint(Path(folder, "server"), server, engine)
            self._send(_read_copy(Path(folder, "server")))

    def end(self) -> None:
        """Do nothing: the other machine ends its journal."""

    def close(self) -> None:
        """Delete the local copy of the checkpoint."""
        self._folder.cleanup()


def _temporary_folder() -> "TemporaryDirectory[str]":
    return TemporaryDirectory(prefix="fedcore-trial-")


def record_of(trial: Trial, folder: Path) -> Path:
    """Return the path of a trial's record in a run's folder; reject links that lead out of the folder."""
    return inside(folder, folder / RECORDS) / trial.file_name


def is_complete(trial: Trial, folder: Path) -> bool:
    """Whether a trial's record has all its rounds."""
    path = folder / RECORDS / trial.file_name
    return path.exists() and started(path) and have_ended(results.read(path).rounds, trial.experiment.rounds)


def header_of(trial: Trial) -> Header:
    """Return the header of a trial's record, which identifies the trial."""
    own, label = trial.experiment, trial.method.label
    return Header(own.name, own.title, label, trial.order, trial.seed, own.rounds, __version__)


def lengthen(trial: Trial, folder: Path) -> None:
    """Rewrite the header of a trial's record if the trial was begun with fewer rounds."""
    rounds_before(record_of(trial, folder), header_of(trial), trial.experiment.evaluate)


def rounds_before(path: Path, header: Header, evaluate: Evaluate) -> list[RoundRecord] | None:
    """Return the recorded rounds of a trial; None if it has no record. Reject the record of a different trial.

    If the trial was begun with fewer rounds, rewrite its header, and remove the evaluations of rounds that were
    evaluated only because they were among its last ones.
    """
    if not path.exists():
        return None
    if not started(path):
        if not results.is_torn(path):
            raise ConfigError(f"{path}: is not a record of a trial; move the file elsewhere")
        path.unlink()
        return None
    record = results.read(path)
    header = replace(header, data=record.header.data, traces=record.header.traces)
    if record.header.rounds < header.rounds and replace(record.header, rounds=header.rounds) == header:
        lines = [
            replace(line, stopped=None)
            if evaluate.is_due(line.round, header.rounds)
            else replace(line, stopped=None, accuracy=None, loss=None)
            for line in record.rounds
        ]
        Writer(path, header, lines).close()
        return lines
    if record.header != header:
        pairs = [(one.name, getattr(record.header, one.name), getattr(header, one.name)) for one in fields(Header)]
        unequal = [f"{name} is {own!r}, expected {expected!r}" for name, own, expected in pairs if own != expected]
        listed = ", ".join(unequal)
        raise ConfigError(f"{path}: is the record of a different trial ({listed}); choose a different folder")
    return record.rounds


def _write_checkpoint(folder: Path, server: Server | Nodes, engine: Engine) -> None:
    """Write a checkpoint: first the vectors that clients keep, under their round's number, then the server.

    A kill between the two leaves the older checkpoint with its own rows.
    """
    rows = rows_file(folder, server.round_number)
    if isinstance(engine, KeepingClients | AtWork):
        engine.save(rows)
    server.save(folder)
    _delete_rows(folder, but=[rows])


def _read_copy(folder: Path) -> Copy:
    rows = {file.stem.rpartition("-")[2]: read_bytes(file) for file in _rows_files(folder)}
    return Copy(carried(folder), rows)


def _write_copy(folder: Path, copy: Copy) -> None:
    """Write a checkpoint from a different machine, in the order of ``_write_checkpoint``."""
    files = {rows_file(folder, round): rows for round, rows in copy.rows.items()}
    for file, rows in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, "wb") as draft:
            draft.write(rows)
    put(folder, copy.files)
    _delete_rows(folder, but=files)


def rows_file(folder: Path, round: int | str) -> Path:
    """Return the file, next to a checkpoint, with the vectors that clients keep after this number of rounds."""
    return folder.with_name(f"{folder.name}.rows-{round}.npz")


def _rows_files(folder: Path) -> list[Path]:
    name = re.compile(re.escape(folder.name) + r"\.rows-[0-9]+\.npz")
    files = folder.parent.iterdir() if folder.parent.is_dir() else ()
    return [file for file in files if name.fullmatch(file.name) and _is_archive(file)]


def _is_archive(file: Path) -> bool:
    """Whether a file is an archive of arrays, as an engine writes it. Links are not followed."""
    if file.is_symlink():
        return False
    with reading(file) as content:
        return content.read(2) == b"PK"


def _delete_rows(folder: Path, but: Collection[Path] = ()) -> None:
    for file in _rows_files(folder):
        if file not in but:
            file.unlink(missing_ok=True)
