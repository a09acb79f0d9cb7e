"""The journal of a trial: the record of its rounds and, now and then, a copy of its server."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from fedcore.atomic_file import inside
from fedcore.engines import Engine
from fedcore.experiment.checkpoints import SECONDS, Checkpoints, Copy
from fedcore.experiment.nodes import Nodes
from fedcore.experiment.records import RoundRecord, Writer
from fedcore.experiment.trial import CHECKPOINTS, MODELS, Trial, header_of, rounds_before
from fedcore.model_files import write_model
from fedcore.server import Server


class Journal(Protocol):
    """The place where a trial writes what it has done, and from which it goes on."""

    @property
    def before(self) -> Sequence[RoundRecord]:
        """The rounds that are written already."""

    @property
    def saved(self) -> Path | None:
        """The folder of the server's last copy, which need not be there; None for a new trial."""

    def begin(self, before: Sequence[RoundRecord]) -> None:
        """Go on after these rounds, the first ones of ``before``; the others are done again."""

    def add(self, line: RoundRecord) -> None:
        """Write a round."""

    def keep(self, round: int, tensors: Mapping[str, Any]) -> None:
        """Write a round's model, torch's tensors by name, before the round: one that is written has its model."""

    def save_when_due(self, server: Server | Nodes, engine: Engine) -> None:
        """Copy the server, if the last copy is old enough."""

    def end(self) -> None:
        """Forget the copy; the trial is over."""


class FolderJournal:
    """The journal in a run's folder. A context manager.

    Args:
        trial: whose it is.
        folder: of the run; ``records``, ``checkpoints`` and ``models`` in it are made.
        seconds: the least time between two copies of the server; 0 for one after every round.

    Raises:
        ConfigError: the record is another trial's; or a link leads out of the folder.
        MissingDataError: the record is damaged.
    """

    def __init__(self, trial: Trial, folder: Path, seconds: float = SECONDS) -> None:
        self._header, self._every = header_of(trial), trial.experiment.evaluate.every
        self._path = inside(folder, folder / "records") / trial.file_name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._models = inside(folder, folder / MODELS / self._path.stem)
        self._checkpoints = Checkpoints(inside(folder, folder / CHECKPOINTS / self._path.stem), seconds)
        found = rounds_before(self._path, self._header, self._every)
        self.before: list[RoundRecord] = found or []
        self.saved = None if found is None else self._checkpoints.folder
        self._record: Writer | None = None
        if found is None:
            Writer(self._path, self._header).close()  # a trial that fails at once has a record too

    @property
    def is_complete(self) -> bool:
        """Tell whether all rounds were written before."""
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

    def save_when_due(self, server: Server | Nodes, engine: Engine) -> None:
        """See ``Journal``; the rounds are durable in the record before."""
        self._checkpoints.save_when_due(server, engine, self._written)

    def carried(self) -> Copy | None:
        """The server's last copy as bytes, if there is one."""
        return self._checkpoints.carried() if self.saved is not None else None

    def put(self, copy: Copy) -> None:
        """Take in a copy that was made elsewhere, of a server that has done the rounds of the record."""
        self._checkpoints.put(copy, self._written)

    def end(self) -> None:
        """See ``Journal``."""
        self._checkpoints.remove()  # of a run too that was killed at the very end

    def close(self) -> None:
        """Close the record."""
        if self._record is not None:
            self._record.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _written(self) -> Writer:
        assert self._record is not None, "begin comes first"
        return self._record
