"""Records of trials (JSON lines: a header, then a line per round), their journals, and a table of results."""

import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TextIO, TypeVar

from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError

from fedcore.errors import ConfigError, MissingDataError, MissingDependencyError, StoreError
from fedcore.files import SAFE, draft_of, inside, read_bytes, read_text, reading, replacing
from fedcore.model import write_model
from fedcore.runtime import Closing, __version__
from fedcore.server import Server
from fedcore.sim.engines import AtWork, Engine, KeepingClients, Nodes
from fedcore.sim.experiment.changes import NO_RESULT, SIZES, number_of
from fedcore.sim.experiment.schema import WINDOW, Line, Trial, error_of
from fedcore.store import Carried, carried, put, remove
from fedcore.validation import absolute, shallow, shorten

if TYPE_CHECKING:
    import pandas

FORMAT = 1
CONFIG = "config.json"
RECORDS = "records"
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""Other programs may write records, so each line is validated strictly."""
TRIAL = ("run", "preset", "algorithm", "seed")
PHASES = ("broadcast", "local", "aggregate", "evaluate", "waited")
"""The phases of a round, in the order of the columns."""

T = TypeVar("T")
Number = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Header:
    """The first line of a record, which identifies the trial.

    Attributes:
        preset, title: name and title of the experiment.
        algorithm: the label of the algorithm.
        order: the algorithm's position in the comparison. Reports show differences from the algorithm at position 0.
        rounds: the number of rounds of the complete trial.
        version, format: the versions of fedcore and of this file format.
        data: a BLAKE2b hash of the examples, labels and clients of the data set (``config.data_hash``); None in older
            records.
        traces: the BLAKE2b hash of each file of traces, as ``b2sum -l 128`` prints it.
    """

    preset: Line
    title: Line
    algorithm: Line
    order: Number
    seed: Number
    rounds: Number
    version: Line
    format: Number = FORMAT
    data: Line | None = None
    traces: list[Line] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class RoundRecord:
    """The record of one round.

    Attributes:
        round: counted from 0.
        active: the clients that took part.
        accepted: the number of accepted updates (``heard`` in older records).
        rejected: the number of rejected updates (``refused`` in older records).
        accuracy: on the test set, in [0, 1]; None if the round was not evaluated.
        loss: mean cross-entropy on the test set; None if the round was not evaluated or the loss is not finite.
        lr: the clients' learning rate eta_t.
        gamma: the step length of the server; 0 if the model did not change.
        steps: the total number of local steps.
        uploads: model vectors sent to the server so far, including second vectors.
        norm: mean norm of the clients' mean gradients; None if the round accepted no update.
        bytes: the size of this round's updates.
        seconds: wall time by phase. Only this field may differ between two runs of one experiment. ``broadcast``:
            selecting the clients, and the broadcast. ``local``: client training, without ``waited``. ``waited``:
            waiting for worker processes (only on an engine with workers). ``aggregate``: the server's round.
            ``evaluate``: evaluation on the test set.
        uploadings: rounds so far times the vectors that a client sends per round, as in the MimiC paper, plus one after
            a warm start. This field and the following ones are None in older records.
        bytes_down: the size of the messages to the active clients.
        diversity, correction_norm, staleness: as in ``fedcore.Report``.
        together: whether the clients of the round were trained as a batch (see ``InProcess``).
        pending: the number of clients whose first update MIFA waits for before the model changes; else 0 (``awaited``
            in older records).
        stopped: True in the last round of a trial that stopped early (``evaluate.patience``), else None.
        clock: the virtual seconds from the start to the end of this round; None without a virtual clock.
        ages: of an asynchronous round, the age of each accepted update in rounds. ``active`` then has the clients of
            these updates, both in the order of arrival. None in synchronous rounds.
    """

    round: Number
    active: list[int]
    accepted: Annotated[Number, Field(validation_alias=AliasChoices("accepted", "heard"))]
    rejected: Annotated[Number, Field(validation_alias=AliasChoices("rejected", "refused"))]
    accuracy: Share | None
    loss: float | None
    lr: float
    gamma: float
    steps: Number
    uploads: Number
    norm: float | None
    bytes: Number
    seconds: dict[str, float]
    uploadings: Number | None = None
    bytes_down: Number | None = None
    diversity: float | None = None
    correction_norm: float | None = None
    staleness: float | None = None
    together: bool | None = None
    pending: Annotated[Number | None, Field(validation_alias=AliasChoices("pending", "awaited"))] = None
    stopped: bool | None = None
    clock: Annotated[float, Field(ge=0)] | None = None
    ages: list[Number] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


def finite(value: float | None) -> float | None:
    """Return the number if JSON can represent it, else None."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Record:
    """The contents of a record.

    Attributes:
        header, rounds: the parsed lines.
        torn: whether the last line is incomplete.
        window: the number of rounds at the end that reports judge (``report.window`` of the configuration).
        ends: the settings whose best value is the least or the greatest that a sweep tried, such as ``rate.lr``.
    """

    header: Header
    rounds: list[RoundRecord]
    torn: bool
    window: int = WINDOW
    ends: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the trial has ended."""
        return have_ended(self.rounds, self.header.rounds)


def have_ended(rounds: Sequence[RoundRecord], count: int) -> bool:
    """Whether these are all rounds of a trial, which has ``count`` rounds or stopped early."""
    return len(rounds) >= count or bool(rounds and rounds[-1].stopped)


_BEGINNING = b'{"preset": '
_HEADER, _ROUND = TypeAdapter(Header), TypeAdapter(RoundRecord)


class Writer(Closing):
    """Writes a record such that an interrupted run keeps every finished round. A context manager.

    Args:
        path: the file; it must not exist unless ``before`` is given.
        before: the rounds after which the trial resumes; a new file starts with them.
        until: the number of rounds in the old file. Once the new file has this number, or its trial stops early, it
            replaces the old one atomically.
    """

    def __init__(
        self, path: Path, header: Header, before: Iterable[RoundRecord] | None = None, *, until: int = 0
    ) -> None:
        self._path, self._until = path, until
        self._buffer: list[Header | RoundRecord] | None = None if before is None else [header, *before]
        self._file: TextIO | None = None
        if before is None:
            self._file = path.open("x", encoding="utf-8")
            self._write(header)
        else:
            self._replace_when_complete()

    def add(self, record: RoundRecord) -> None:
        """Write one round and flush it to the operating system."""
        if self._buffer is None:
            self._write(record)
        else:
            self._buffer.append(record)
            self._until = 0 if record.stopped else self._until
            self._replace_when_complete()

    def sync(self) -> None:
        """Make the rounds durable, before a checkpoint that depends on them is written."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        else:
            with reading(self._path) as file:  # the old file, which has these rounds and more
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _replace_when_complete(self) -> None:
        if self._buffer is None or len(self._buffer) - 1 < self._until:
            return
        with draft_of(self._path) as draft:
            self._file = os.fdopen(os.open(draft, os.O_WRONLY | SAFE), "w", encoding="utf-8")
            for line in self._buffer:
                self._write(line)
        self._buffer = None

    def _write(self, line: Header | RoundRecord) -> None:
        assert self._file is not None, "lines stay in _buffer until there is a file"
        self._file.write(json.dumps(asdict(line), allow_nan=False) + "\n")
        self._file.flush()


def read(path: Path) -> Record:
    """Read the record of a trial; raise a MissingDataError if its header or a line before the last one is damaged.

    ``torn`` is true if the last line is incomplete, as a killed process leaves it; this line is skipped. The same holds
    for everything after the first NUL byte, which a power failure leaves in place of lost data.
    """
    lines, torn = _complete_lines(path)
    if not lines:
        raise MissingDataError(f"{path}: line 1 must be the header of a record; the file has no complete line")
    header = _parse(path, 1, lines[0], _HEADER, "the header of a record")
    if header.format != FORMAT:
        raise MissingDataError(f"{path}: format {header.format} is not supported; must be {FORMAT}")
    rounds: list[RoundRecord] = []
    for number, line in enumerate(lines[1:], start=2):
        record = _parse(path, number, line, _ROUND, "a round")
        if record.round != len(rounds):
            raise MissingDataError(f"{path}: line {number}: expected round {len(rounds)}, got round {record.round}")
        rounds.append(record)
    return Record(header, rounds, torn)


def read_header(path: Path) -> Header | None:
    """Return the first line of a record; None if it is incomplete."""
    lines, _ = _complete_lines(path)
    return _parse(path, 1, lines[0], _HEADER, "the header of a record") if lines else None


def read_folder(folder: Path) -> list[Record]:
    """Return all records in a run's folder that have a header, in the order of the comparison, then by seed."""
    records = [read(path) for path in sorted(inside(folder, folder / RECORDS).glob("*.jsonl")) if started(path)]
    if not records:
        raise MissingDataError(f"{folder}: no records found; `fedcore run` writes them to {RECORDS}/*.jsonl")
    return sorted(records, key=lambda record: (record.header.order, record.header.seed))


def readable(paths: Iterable[Path]) -> Iterator[tuple[Path, Record]]:
    """Yield the undamaged records that have a header, sorted by path. Each trial reports its own damaged record."""
    for path in sorted(paths):
        with suppress(MissingDataError):
            if started(path):
                yield path, read(path)


def started(path: Path) -> bool:
    """Whether a record has its header."""
    return bool(_complete_lines(path)[0])


def is_torn(path: Path) -> bool:
    """Whether a file is the beginning of a record, as a killed process leaves it."""
    text = read_bytes(path).partition(b"\0")[0]
    return text.startswith(_BEGINNING) or _BEGINNING.startswith(text)


def _complete_lines(path: Path) -> tuple[list[str], bool]:
    """Return the complete lines of a record, and whether other bytes follow them."""
    text, lost, _ = read_bytes(path).decode("utf-8", "replace").partition("\0")
    *lines, rest = text.split("\n")
    return lines, bool(rest or lost)


def _parse(path: Path, number: int, line: str, kind: TypeAdapter[T], noun: str) -> T:
    try:
        return kind.validate_json(line)
    except ValueError as error:  # no JSON, a lone surrogate, or other fields
        is_json = isinstance(error, ValidationError) and error.errors()[0]["type"] != "json_invalid"
        what = f"is not {noun}" if is_json else "is damaged"
        raise MissingDataError(f"{path}: line {number} {what}: {shorten(error_of(error)[0])}") from None


def runs_in(folder: Path) -> list[Path]:
    """Return the folder if it is a run's, else all runs below it. A folder without runs is returned too."""
    if (folder / CONFIG).exists():
        return [folder]
    return sorted(path.parent for path in folder.rglob(CONFIG)) or [folder]


def begun_runs(folder: Path) -> list[Path]:
    """Return the runs in a folder that have records. If no run has any, raise a MissingDataError."""
    if runs := [run for run in runs_in(folder) if any((run / RECORDS).glob("*.jsonl"))]:
        return runs
    raise MissingDataError(f"{folder}: no records found; name the folder of a run or a sweep")


def load_results(folder: str | os.PathLike[str]) -> "pandas.DataFrame":
    """Return the records of a run or sweep, complete or not, as a pandas frame with one row per round and trial.

    Columns, in this order:

    - ``run`` (the run's folder relative to ``folder``, "" if they are the same), ``preset``, ``algorithm`` (the label),
      ``seed``;
    - a column for each setting that differs between trials, named by its dotted key as in ``--set``: ``rate.lr``,
      ``participation.p``, or ``algorithms.beta`` for an option of the trial's algorithm;
    - ``round``, counted from 0, and the other fields of ``results.RoundRecord``: ``active`` (a tuple of clients),
      ``accepted``, ``rejected``, ``accuracy`` and ``loss`` (NaN if the round was not evaluated; infinite if the loss is
      not finite), ``lr``, ``gamma``, ``steps``, ``uploads``, ``norm``, ``bytes``, ``uploadings``, ``bytes_down``,
      ``diversity``, ``correction_norm``, ``staleness``, ``together``, ``pending``, ``stopped``, ``clock``, ``ages``;
    - the time of each phase of the round: ``seconds_broadcast``, ``seconds_local``, ``seconds_aggregate``,
      ``seconds_evaluate``, ``seconds_waited`` (NaN without worker processes).

    Raises:
        MissingDependencyError: pandas is not installed.
        MissingDataError: the folder has no records, or a record is damaged.

    Cost: every record is parsed and validated; 20,000 rounds take about a second.

    Example, a table of conditions by methods for a sweep with ``grid={'participation.p'=[0.1, 0.5]}``:

        frame = load_results("runs/sweep-full")
        last = frame[frame["round"] == frame.groupby("run")["round"].transform("max")]
        last.pivot_table("accuracy", "participation.p", "algorithm")
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise MissingDependencyError.of("load_results", "pandas", extra="pandas") from None
    folder = absolute(folder, "folder")
    trials: list[tuple[str, Record, dict[str, Any]]] = []
    for run in begun_runs(folder):
        name, tables = "" if run == folder else run.relative_to(folder).as_posix(), _config_tables(run / CONFIG)
        trials += [(name, record, _settings(tables, record.header.algorithm)) for record in read_folder(run)]
    settings = [own for _, _, own in trials]
    keys = dict.fromkeys(key for own in settings for key in own)
    varied = [key for key in keys if len({json.dumps(own.get(key)) for own in settings}) > 1]
    rows = []
    for run_name, record, own in trials:
        header = record.header
        identity = (run_name, header.preset, header.algorithm, header.seed)
        shared = dict(zip(TRIAL, identity, strict=True)) | {key: own.get(key) for key in varied}
        for line in record.rounds:
            phases = {f"seconds_{phase}": line.seconds.get(phase) for phase in PHASES}
            loss = math.inf if line.loss is None and line.accuracy is not None else line.loss
            rows.append(shared | asdict(line) | phases | {"active": tuple(line.active), "loss": loss})
    of_rounds = [field.name for field in fields(RoundRecord) if field.name != "seconds"]
    columns = [*TRIAL, *varied, *of_rounds, *(f"seconds_{phase}" for phase in PHASES)]
    floats = dict.fromkeys(("accuracy", "loss", "norm", "seconds_waited"), float)
    return pandas.DataFrame(rows, columns=columns).astype(floats)


def parse_tables(text: str) -> dict[str, Any]:
    """Return the tables of a JSON file; raise a ValueError if the text does not hold tables."""
    try:
        tables = shallow(json.loads(text))
    except RecursionError as error:
        raise ValueError(error) from None
    if not isinstance(tables, dict):
        raise ValueError(f"the top level must be a table, got {type(tables).__name__}")
    return tables


def _config_tables(config: Path) -> Mapping[str, Any]:
    try:
        return parse_tables(read_text(config))
    except FileNotFoundError:
        return {}
    except (StoreError, ValueError) as error:
        raise MissingDataError(f"{config}: not the configuration of a run: {error}") from None


def _settings(tables: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return the settings of a trial by dotted key, without those of other algorithms."""
    methods = tables.get("algorithms", ())
    method = next((one for one in methods if isinstance(one, dict) and one.get("label") == label), {})
    shared = {key: value for key, value in tables.items() if key not in (*NO_RESULT, *SIZES, "algorithms", "grid")}
    options = {key: value for key, value in method.items() if key not in ("name", "label")}
    return dict(_flat("", shared)) | dict(_flat("algorithms.", options))


def _flat(prefix: str, tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, entry in tables.items():
        value = number_of(entry)
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield prefix + key, json.dumps(value) if isinstance(value, list) else value


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

    def end(self) -> None:
        """Delete the checkpoint of a complete trial; with the folder on a different machine, that machine does it."""

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
        self._header, self._keeps = header_of(trial), trial.experiment.evaluate.keeps
        self._path = record_of(trial, folder)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._models = inside(folder, folder / MODELS / self._path.stem)
        self._checkpoint = inside(folder, folder / CHECKPOINTS / self._path.stem)
        before = rounds_before(trial, folder)
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
            if not self._keeps(last := len(self.before) - 1, self._header.rounds):  # the last round of a shorter run
                (self._models / f"round{last}.pt").unlink(missing_ok=True)
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
        recorded = read_header(self._path)
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
    return path.exists() and started(path) and have_ended(read(path).rounds, trial.experiment.rounds)


def header_of(trial: Trial) -> Header:
    """Return the header of a trial's record, which identifies the trial."""
    own, label = trial.experiment, trial.method.label
    return Header(own.name, own.title, label, trial.order, trial.seed, own.rounds, __version__)


def rounds_before(trial: Trial, folder: Path) -> list[RoundRecord] | None:
    """Return the recorded rounds of a trial; None if it has no record. Reject the record of a different trial.

    If the trial was begun with fewer rounds, rewrite its header. The result lacks the evaluations of rounds that were
    evaluated only because they were then among its last ones; the record keeps them until the new one replaces it.
    """
    path, header = record_of(trial, folder), header_of(trial)
    if not path.exists():
        return None
    if not started(path):
        if not is_torn(path):
            raise ConfigError(f"{path}: is not a record of a trial; move the file elsewhere")
        path.unlink()
        return None
    record = read(path)
    header = replace(header, data=record.header.data, traces=record.header.traces)
    if record.header.rounds < header.rounds and replace(record.header, rounds=header.rounds) == header:
        record = replace(record, header=header, rounds=[replace(line, stopped=None) for line in record.rounds])
        Writer(path, header, record.rounds).close()
    if record.header != header:
        pairs = [(one.name, getattr(record.header, one.name), getattr(header, one.name)) for one in fields(Header)]
        unequal = ", ".join(f"{name} is {was!r}, expected {now!r}" for name, was, now in pairs if was != now)
        raise ConfigError(f"{path}: is the record of a different trial ({unequal}); choose a different folder")
    is_due, count = trial.experiment.evaluate.is_due, header.rounds
    return [one if is_due(one.round, count) else replace(one, accuracy=None, loss=None) for one in record.rounds]


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
