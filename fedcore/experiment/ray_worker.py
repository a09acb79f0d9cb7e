"""A worker on Ray that runs trials: what runs in its own process, on whatever machine, and what it sends back."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from fedcore.engines import Engine
from fedcore.experiment.checkpoints import Clock, Copy, carried_copy, put_copy, save
from fedcore.experiment.nodes import Nodes
from fedcore.experiment.records import RoundRecord
from fedcore.experiment.trial import Trial
from fedcore.experiment.worker import Ended, outcome
from fedcore.registries import load_module
from fedcore.runtime import hide_warnings_of_others, set_threads
from fedcore.server import Server

SLICE = 0.25
"""Seconds of rounds that are sent together: a call costs some milliseconds, and a bar should move."""


@dataclass(frozen=True)
class Begun:
    """A trial goes on after so many of the rounds that it was given."""

    rounds: int


@dataclass(frozen=True)
class Copied:
    """A copy of the server, with the rounds that were sent so far behind it."""

    copy: Copy


@dataclass(frozen=True)
class Kept:
    """A round's model by name, to be written."""

    round: int
    tensors: Mapping[str, Any]


Message = Begun | RoundRecord | Copied | Kept | Ended


class SentJournal:
    """The journal of a trial whose run is on another machine: messages, for whoever writes it there.

    A copy of the server lies here no longer than it is read or made: a worker may be killed at any time.

    Args:
        before: the rounds that are written there.
        copy: of the server.
        seconds: the least time between two copies; 0 for one after every round.
        tell: what takes a message.
    """

    def __init__(
        self,
        before: Sequence[RoundRecord],
        copy: Copy | None,
        seconds: float,
        tell: Callable[[Message], None],
    ) -> None:
        self.before, self._tell = before, tell
        self._clock = Clock(seconds)
        self._place = _place()
        self.saved = Path(self._place.name, "server")
        if copy is not None:
            put_copy(self.saved, copy)

    def begin(self, before: Sequence[RoundRecord]) -> None:
        """See ``Journal``."""
        self.close()
        self._tell(Begun(len(before)))

    def add(self, line: RoundRecord) -> None:
        """See ``Journal``."""
        self._tell(line)

    def keep(self, round: int, tensors: Mapping[str, Any]) -> None:
        """See ``Journal``."""
        self._tell(Kept(round, tensors))

    def save_when_due(self, server: Server | Nodes, engine: Engine) -> None:
        """See ``Journal``."""
        if self._clock.is_due:
            with self._clock.copying(), _place() as place:
                save(Path(place, "server"), server, engine)
                self._tell(Copied(carried_copy(Path(place, "server"))))

    def end(self) -> None:
        """See ``Journal``; whoever writes it knows."""

    def close(self) -> None:
        """Delete what lies here."""
        self._place.cleanup()


class TrialWorker:
    """An object of a worker's process, which runs one trial at a time."""

    def prepare(self, imports: Sequence[str]) -> int:
        """Import what the trials need; returns the number of this process.

        Args:
            imports: modules, or paths of files.
        """
        hide_warnings_of_others()
        for name in imports:
            load_module(name)
        self._messages: list[Message] = []
        return os.getpid()

    def begin(self, trial: Trial, before: Sequence[RoundRecord], copy: Copy | None, seconds: float) -> list[Message]:
        """Begin a trial, or go on with one, and do some rounds; see ``SentJournal`` and ``go_on``."""
        self._lines = self._run(trial, before, copy, seconds)
        return self.go_on()

    def go_on(self) -> list[Message]:
        """Do some rounds; returns what the run is to know of them, and at last one ``Ended``, whatever happens."""
        until, is_over = perf_counter() + SLICE, True

        def some() -> None:
            nonlocal is_over
            for _ in self._lines:
                if perf_counter() >= until:
                    is_over = False
                    return

        ended = outcome(some)
        messages, self._messages = self._messages, []
        return [*messages, ended] if is_over else messages

    def _run(
        self, trial: Trial, before: Sequence[RoundRecord], copy: Copy | None, seconds: float
    ) -> Iterator[RoundRecord]:
        import torch

        from fedcore.experiment.loop import trial_rounds

        torch.set_num_threads(1)  # as in the processes of a run on one machine
        set_threads(trial.experiment.threads)
        with closing(SentJournal(before, copy, seconds, lambda message: self._messages.append(message))) as journal:
            yield from trial_rounds(trial, journal)


def _place() -> "TemporaryDirectory[str]":
    return TemporaryDirectory(prefix="fedcore-trial-")
