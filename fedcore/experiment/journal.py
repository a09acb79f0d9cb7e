"""The journal of a trial: the record of its rounds, its models, and checkpoints of its server."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Self

from fedcore.atomic_file import inside, replacing, require_file
from fedcore.errors import ConfigError, StoreError
from fedcore.experiment.results import Header, RoundRecord, Writer, is_torn, read, started
from fedcore.experiment.schema import Trial
from fedcore.model import write_model
from fedcore.runtime import __version__
from fedcore.server import Server
from fedcore.simulation.engines import Engine, KeepingClients, Nodes
from fedcore.store.files.folder import Carried, carried, put, remove

SECONDS = 10
"""The least time between two checkpoints."""
SHARE = 0.05
"""The most of a trial's time that checkpoints may take."""
CHECKPOINTS = "checkpoints"
"""The folder of a run in which its unfinished trials have their servers."""
MODELS = "models"
"""The folder of a run in which its trials have the models that they keep."""


class Copy(NamedTuple):
    """A checkpoint as bytes, for another machine: the server's files, and the rows of its clients, by round."""

    files: Carried
    rows: dict[str, bytes]


@dataclass(frozen=True)
class Begun:
    """A trial goes on after so many of its recorded rounds."""

    rounds: int


@dataclass(frozen=True)
class Kept:
    """A round's model by name, to be written."""

    round: int
    tensors: Mapping[str, Any]


Entry = Begun | RoundRecord | Kept | Copy
"""An entry that travels from another machine: a ``Copy`` is a checkpoint after the rounds before it."""


class Journal(ABC):
    """The place where a trial writes its rounds, and from which it goes on. A context manager.

    Args:
        seconds: the least time between two checkpoints; 0 for one after every round. When one is written depends on the
            time; the results of a resumed trial do not.

    Attributes:
        before: the rounds that are written already.
        saved: the folder of the last checkpoint, which need not exist; None for a new trial.
    """

    before: Sequence[RoundRecord]
    saved: Path | None

    def __init__(self, seconds: float) -> None:
        self._seconds, self._next = seconds, perf_counter() + seconds

    @abstractmethod
    def begin(self, before: Sequence[RoundRecord]) -> None:
        """Go on after these first rounds of ``before``; the others are done again."""

    @abstractmethod
    def add(self, line: RoundRecord) -> None:
        """Write a round."""

    @abstractmethod
    def keep(self, round: int, tensors: Mapping[str, Any]) -> None:
        """Write a round's model, torch's tensors by name, before the round: each written round has its model."""

    def save_when_due(self, server: Server | Nodes, engine: Engine) -> None:
        """Write a checkpoint, if the last one is old enough."""
        began = perf_counter()
        if began >= self._next:
            self._save(server, engine)
            done = perf_counter()
            self._next = done + (max(self._seconds, (done - began) / SHARE) if self._seconds else 0)

    @abstractmethod
    def _save(self, server: Server | Nodes, engine: Engine) -> None:
        """Write a checkpoint."""

    @abstractmethod
    def end(self) -> None:
        """Delete the checkpoint; the trial is over."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FolderJournal(Journal):
    """The journal in a run's folder.

    Args:
        trial: its owner.
        folder: of the run; ``records``, ``checkpoints`` and ``models`` in it are made.
        seconds: as for ``Journal``.

    Raises:
        ConfigError: the record is another trial's; or a link leads out of the folder.
        MissingDataError: the record is damaged.
    """

    def __init__(self, trial: Trial, folder: Path, seconds: float = SECONDS) -> None:
        super().__init__(seconds)
        self._header = header_of(trial)
        self._path = inside(folder, folder / "records") / trial.file_name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._models = inside(folder, folder / MODELS / self._path.stem)
        self._checkpoint = inside(folder, folder / CHECKPOINTS / self._path.stem)
        found = rounds_before(self._path, self._header, trial.experiment.evaluate.every)
        self.before: list[RoundRecord] = found or []
        self.saved = None if found is None else self._checkpoint
        self._record: Writer | None = None
        if found is None:
            Writer(self._path, self._header).close()  # a trial that fails at once has a record too

    @property
    def is_complete(self) -> bool:
        """Whether all rounds were written before."""
        return len(self.before) == self._header.rounds

    def begin(self, before: Sequence[RoundRecord]) -> None:
        """See ``Journal``; the record keeps the others until they are done again."""
        self.close()
        self._record = Writer(self._path, self._header, before, until=len(self.before))

    def add(self, line: RoundRecord) -> None:
        """See ``Journal``."""
        self._written.add(line)

    def keep(self, round: int, tensors: Mapping[str, Any]) -> None:
        """See ``Journal``; as ``models/TRIAL/roundN.pt``, a ``state_dict``."""
        self._models.mkdir(parents=True, exist_ok=True)
        write_model(tensors, self._models / f"round{round}.pt")

    def _save(self, server: Server | Nodes, engine: Engine) -> None:
        self._written.sync()  # the checkpoint's rounds are durable before it
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        _save(self._checkpoint, server, engine)

    def carried(self) -> Copy | None:
        """The last checkpoint as bytes, if there is one."""
        return _carried(self._checkpoint) if self.saved is not None and self._checkpoint.exists() else None

    def take(self, entry: Entry) -> Sequence[RoundRecord]:
        """Write an entry of another machine's ``SentJournal``; return the rounds in it."""
        if isinstance(entry, Begun):
            before = self.before[: entry.rounds]
            self.begin(before)
            return before
        if isinstance(entry, RoundRecord):
            self.add(entry)
            return (entry,)
        if isinstance(entry, Kept):
            self.keep(entry.round, entry.tensors)
        else:
            self._written.sync()
            _put(self._checkpoint, entry)
        return ()

    def end(self) -> None:
        """See ``Journal``; also of a run that was killed at the very end."""
        _delete_rows(self._checkpoint)
        if self._checkpoint.is_dir():
            with suppress(StoreError):
                remove(self._checkpoint)
                with suppress(OSError):  # an empty one that a killed run has left; other files stay
                    self._checkpoint.rmdir()

    def close(self) -> None:
        """Close the record."""
        if self._record is not None:
            self._record.close()

    @property
    def _written(self) -> Writer:
        assert self._record is not None, "begin comes first"
        return self._record


class SentJournal(Journal):
    """The journal of a trial whose run is on another machine, which writes what this one sends.

    A checkpoint lies here only while it is read or made: a worker may be killed at any time.

    Args:
        before: the rounds that are written there.
        copy: the checkpoint.
        seconds: as for ``Journal``.
        send: takes an entry.
    """

    def __init__(
        self, before: Sequence[RoundRecord], copy: Copy | None, seconds: float, send: Callable[[Entry], None]
    ) -> None:
        super().__init__(seconds)
        self.before, self._send = before, send
        self._place = _place()
        self.saved = Path(self._place.name, "server")
        if copy is not None:
            _put(self.saved, copy)

    def begin(self, before: Sequence[RoundRecord]) -> None:
        """See ``Journal``."""
        self.close()
        self._send(Begun(len(before)))

    def add(self, line: RoundRecord) -> None:
        """See ``Journal``."""
        self._send(line)

    def keep(self, round: int, tensors: Mapping[str, Any]) -> None:
        """See ``Journal``."""
        self._send(Kept(round, tensors))

    def _save(self, server: Server | Nodes, engine: Engine) -> None:
        with _place() as place:
            _save(Path(place, "server"), server, engine)
            self._send(_carried(Path(place, "server")))

    def end(self) -> None:
        """See ``Journal``; the other machine ends its own."""

    def close(self) -> None:
        """Delete the checkpoint that lies here."""
        self._place.cleanup()


def _place() -> "TemporaryDirectory[str]":
    return TemporaryDirectory(prefix="fedcore-trial-")


def is_complete(trial: Trial, folder: Path) -> bool:
    """Whether a trial's record has all its rounds.

    Raises:
        MissingDataError: the record is damaged.
    """
    path = folder / "records" / trial.file_name
    return path.exists() and started(path) and len(read(path).rounds) == trial.experiment.rounds


def header_of(trial: Trial) -> Header:
    """The header of a trial's record, by which it is recognised."""
    experiment = trial.experiment
    return Header(
        preset=experiment.name,
        title=experiment.title,
        algorithm=trial.method.label,
        order=trial.order,
        seed=trial.seed,
        rounds=experiment.rounds,
        version=__version__,
    )


def lengthen(trial: Trial, folder: Path) -> None:
    """Give a trial's record the header of its experiment, if it was begun with fewer rounds.

    Raises:
        ConfigError: the record is another trial's.
        MissingDataError: the record is damaged.
    """
    rounds_before(
        inside(folder, folder / "records") / trial.file_name, header_of(trial), trial.experiment.evaluate.every
    )


def rounds_before(path: Path, header: Header, every: int) -> list[RoundRecord] | None:
    """The rounds of a trial that was begun before, or None.

    The last of fewer rounds was evaluated because it was the last; a longer run evaluates only every ``every`` rounds.

    Raises:
        ConfigError: the record is another trial's.
    """
    if not path.exists():
        return None
    if not started(path):
        if not is_torn(path):
            raise ConfigError(f"{path}: it is not this trial's record: move it")
        path.unlink()
        return None
    record = read(path)
    if record.header.rounds < header.rounds and replace(record.header, rounds=header.rounds) == header:
        last = record.header.rounds - 1
        unlike = [line.round == last and (last + 1) % every != 0 for line in record.rounds]
        lines = [
            replace(line, accuracy=None, loss=None) if other else line
            for line, other in zip(record.rounds, unlike, strict=True)
        ]
        Writer(path, header, lines).close()
        return lines
    if record.header != header:
        pairs = [(one.name, getattr(record.header, one.name), getattr(header, one.name)) for one in fields(Header)]
        other = ", ".join(f"{name} {there!r} and not {due!r}" for name, there, due in pairs if there != due)
        raise ConfigError(f"{path}: it is the record of another trial, with {other}: take another folder")
    return record.rounds


def _save(folder: Path, server: Server | Nodes, engine: Engine) -> None:
    """Write a checkpoint.

    Rows that an engine's clients keep are written first, under their round's number, so that a kill between the two
    leaves those of the older checkpoint beside it.
    """
    rows = rows_file(folder, server.round_number)
    if isinstance(engine, KeepingClients):
        engine.save(rows)
    server.save(folder)
    _delete_rows(folder, but=[rows])


def _carried(folder: Path) -> Copy:
    """A checkpoint as bytes."""
    rows = {file.stem.rpartition("-")[2]: require_file(file).read_bytes() for file in _rows_files(folder)}
    return Copy(carried(folder), rows)


def _put(folder: Path, copy: Copy) -> None:
    """Write a checkpoint that was made elsewhere, in the same order as ``_save``."""
    files = {rows_file(folder, round): rows for round, rows in copy.rows.items()}
    for file, rows in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, "wb") as whole:
            whole.write(rows)
    put(folder, copy.files)
    _delete_rows(folder, but=files)


def rows_file(folder: Path, round: int | str) -> Path:
    """The file beside a checkpoint with its clients' own rows after so many rounds."""
    return folder.with_name(f"{folder.name}.rows-{round}.npz")


def _rows_files(folder: Path) -> list[Path]:
    name = re.compile(re.escape(folder.name) + r"\.rows-[0-9]+\.npz")
    there = folder.parent.iterdir() if folder.parent.is_dir() else ()
    return [file for file in there if name.fullmatch(file.name) and _is_archive(file)]


def _is_archive(file: Path) -> bool:
    """Whether a file is an archive of arrays, as an engine writes it; a link is not followed."""
    if file.is_symlink():
        return False
    with require_file(file).open("rb") as content:
        return content.read(2) == b"PK"


def _delete_rows(folder: Path, but: Collection[Path] = ()) -> None:
    for file in _rows_files(folder):
        if file not in but:
            file.unlink(missing_ok=True)
