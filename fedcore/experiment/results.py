"""Records of trials: a file of JSON lines, a header and then one line a round."""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, ClassVar, Self, TextIO, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fedcore.atomic_file import draft_of, inside, require_file
from fedcore.errors import MissingDataError
from fedcore.experiment.schema import Line

FORMAT = 1
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""A line that this package did not write is refused: a record may come from elsewhere."""

T = TypeVar("T")
Number = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Header:
    """The first line of a record's file, which identifies the trial.

    Attributes:
        preset: the name of the experiment.
        title: its title.
        algorithm: the label of the algorithm.
        order: its place among the algorithms compared; differences are taken to number 0.
        seed: the seed.
        rounds: how many rounds were asked for.
        version: the version of fedcore.
        format: the version of this file format.
    """

    preset: Line
    title: Line
    algorithm: Line
    order: Number
    seed: Number
    rounds: Number
    version: Line
    format: Number = FORMAT

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class RoundRecord:
    """The record of one round.

    Attributes:
        round: counted from 0.
        active: the clients that took part.
        heard: how many of them sent an update that was used.
        refused: how many sent an update that was not used.
        accuracy: on the test set, in [0, 1]; None if the round was not evaluated.
        loss: mean cross-entropy on the test set, or None; also None if it is not finite.
        lr: the clients' rate eta_t.
        gamma: the server's step; 0 if the model did not change.
        steps: local steps of all clients together.
        uploads: model vectors sent to the server so far, second vectors counted.
        norm: mean length of the clients' mean gradients; None if no update was used.
        bytes: the size of this round's updates.
        seconds: wall time by phase: the only field that may differ between two runs of one experiment.
            ``broadcast``: the active clients and the broadcast. ``local``: the clients' work with their offsets.
            ``waited``: for updates from other processes, on an engine that has them (``local`` is then the rest).
            ``aggregate``: the server's round. ``evaluate``: the test set.
        uploadings: rounds so far times the vectors that a client sends in one, as the MimiC paper counts, and one for a
            warm start; this and the following fields have no value in older records.
        bytes_down: the size of the messages to the active clients.
        diversity, correction_norm, staleness: those of ``fedcore.Report``.
        together: whether the clients of the round were trained together (see ``engines.InProcess``).
        awaited: the clients without any update so far, for which the model waits (MIFA); 0 if it does not.
    """

    round: Number
    active: list[int]
    heard: Number
    refused: Number
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
    awaited: Number | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


def finite(value: float | None) -> float | None:
    """The number, if JSON can hold it; else None."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Record:
    """One trial's file, as read: its header, its rounds, and whether its last line was torn off."""

    header: Header
    rounds: list[RoundRecord]
    torn: bool

    @property
    def is_complete(self) -> bool:
        """Whether it has all the rounds that were asked for."""
        return len(self.rounds) >= self.header.rounds


_BEGINS = b'{"preset": '
_HEADER, _ROUND = TypeAdapter(Header), TypeAdapter(RoundRecord)


class Writer:
    """Writes a record, so that no stop of the run loses a finished round.

    A context manager.

    Args:
        path: the file; it must not exist yet.
        before: rounds to go on after. The file is then replaced, at once, by one with the header and these.
        until: how many rounds the present file has. It is replaced once there are as many again, so that an interrupt
            while some of them are repeated loses none.
    """

    def __init__(
        self, path: Path, header: Header, before: Iterable[RoundRecord] | None = None, *, until: int = 0
    ) -> None:
        self._path, self._until = path, until
        self._again: list[Header | RoundRecord] | None = None if before is None else [header, *before]
        self._file: TextIO | None = None
        if before is None:
            self._file = path.open("x", encoding="utf-8")
            self._line(header)
        else:
            self._replace_when_due()

    def add(self, record: RoundRecord) -> None:
        """Write one round and hand it to the operating system."""
        if self._again is None:
            self._line(record)
        else:
            self._again.append(record)
            self._replace_when_due()

    def sync(self) -> None:
        """Make the rounds durable, before a checkpoint that depends on them."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        else:
            with self._path.open("rb") as file:  # the old file, which has these rounds, and more
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _replace_when_due(self) -> None:
        if self._again is None or len(self._again) - 1 < self._until:
            return
        with draft_of(self._path) as draft:
            self._file = draft.open("w", encoding="utf-8")
            for line in self._again:
                self._line(line)
        self._again = None

    def _line(self, line: Header | RoundRecord) -> None:
        assert self._file is not None, "lines wait in _again until there is a file"
        self._file.write(json.dumps(asdict(line), allow_nan=False) + "\n")
        self._file.flush()


def read(path: Path) -> Record:
    """Read one trial's record.

    A last line that was cut off, as a killed process leaves it, is left out, and ``torn`` is true. So is all that
    follows the first NUL byte, which a loss of power leaves in the place of lost data.

    Raises:
        MissingDataError: the file has no header, or a line before the last is damaged.
    """
    text, lost, _ = require_file(path).read_text(encoding="utf-8", errors="replace").partition("\0")
    lines = text.split("\n")
    torn = lines.pop() != "" or lost != ""
    if not lines:
        raise MissingDataError(f"{path}: expected the header of a record in line 1, got none")
    header = _read_line(path, 1, lines[0], _HEADER, "the header of a record")
    if header.format != FORMAT:
        raise MissingDataError(f"{path}: expected a record of format {FORMAT}, got format {header.format}")
    rounds: list[RoundRecord] = []
    for number, line in enumerate(lines[1:], start=2):
        record = _read_line(path, number, line, _ROUND, "a round")
        if record.round != len(rounds):
            raise MissingDataError(f"{path}: line {number}: expected round {len(rounds)}, got round {record.round}")
        rounds.append(record)
    return Record(header, rounds, torn)


def read_header(path: Path) -> Header | None:
    """Read only the first line of a record; None if it is incomplete.

    Raises:
        MissingDataError: it is no header.
    """
    with require_file(path).open("rb") as file:
        line, lost, _ = file.readline().decode("utf-8", "replace").partition("\0")
    if lost or not line.endswith("\n"):
        return None
    return _read_line(path, 1, line, _HEADER, "the header of a record")


def read_folder(folder: Path) -> list[Record]:
    """All records of a run's folder, in the order of the comparison, then by seed.

    Files that hold no complete header yet are left out.

    Raises:
        MissingDataError: there is no record in it, or one is damaged.
    """
    records = [read(path) for path in sorted(inside(folder, folder / "records").glob("*.jsonl")) if started(path)]
    if not records:
        raise MissingDataError(f"{folder}: expected records (records/*.jsonl) as `fedcore run` writes them, found none")
    return sorted(records, key=lambda record: (record.header.order, record.header.seed))


def started(path: Path) -> bool:
    """Whether a record has its header."""
    return b"\n" in require_file(path).read_bytes().partition(b"\0")[0]


def is_torn(path: Path) -> bool:
    """Whether a file is the beginning of a record, as a killed process leaves it."""
    text = require_file(path).read_bytes().partition(b"\0")[0]
    return text.startswith(_BEGINS) or _BEGINS.startswith(text)


def _read_line(path: Path, number: int, line: str, kind: TypeAdapter[T], what: str) -> T:
    try:
        return kind.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        if first["type"] == "json_invalid":
            raise MissingDataError(f"{path}: line {number} is damaged: {first['msg']}") from None
        where = ".".join(map(str, first["loc"]))[:100]
        raise MissingDataError(f"{path}: line {number} is not {what}: {where}: {first['msg']}") from None
    except ValueError as error:  # a lone surrogate in the text itself
        raise MissingDataError(f"{path}: line {number} is damaged: {str(error)[:100]}") from None
