"""The run of one trial, from the data to the last line of its record, and its rounds."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from fedcore.engines import InProcess
from fedcore.experiment.build import MakeEngine, TrialParts, build
from fedcore.experiment.checkpoints import SECONDS
from fedcore.experiment.journal import FolderJournal, Journal
from fedcore.experiment.records import RoundRecord, finite
from fedcore.experiment.trial import Trial
from fedcore.server import Update


def run_trial(
    trial: Trial,
    folder: Path,
    on_round: Callable[[RoundRecord], None] = lambda _: None,
    *,
    checkpoint_seconds: float = SECONDS,
    make_engine: MakeEngine = InProcess,
) -> None:
    """Run one trial and write its record; one that was stopped goes on where its last checkpoint left it.

    Args:
        trial: what to run.
        folder: of the run, with ``records`` in it; ``checkpoints`` is made.
        on_round: called with each round after it was written, and with those that a record holds already.
        checkpoint_seconds: the least time between two checkpoints.
        make_engine: who does the clients' work.

    Raises:
        FedcoreError: the data is missing, the model diverged, ...; the rounds before it are in the record.

    Determinism: all but ``seconds`` depends on the trial alone, on one machine and for one number of torch's
    threads (which this function leaves as it is).
    """
    with (
        FolderJournal(trial, folder, checkpoint_seconds) as journal,
        closing(trial_rounds(trial, journal, make_engine)) as lines,
    ):
        for line in lines:
            on_round(line)


def trial_rounds(
    trial: Trial, journal: Journal, make_engine: MakeEngine = InProcess
) -> Generator[RoundRecord, None, None]:
    """Run one trial from where its journal stands; see ``run_trial``.

    Args:
        trial: what to run.
        journal: where it is written.
        make_engine: who does the clients' work.

    Yields:
        Each round after it was written; at first those that were written before.
    """
    experiment = trial.experiment
    if len(journal.before) == experiment.rounds:
        journal.end()
        yield from journal.before
        return
    parts = build(trial, journal.saved, make_engine)
    if parts.server.round_number > len(journal.before):  # a copy of rounds that the record has lost leads nowhere
        parts.engine.close()
        parts = build(trial, None, make_engine)
    before = journal.before[: parts.server.round_number]
    with closing(parts.engine):
        journal.begin(before)
        yield from before
        uploads, every = before[-1].uploads if before else parts.uploads, experiment.evaluate.every
        for line in rounds(parts, count=experiment.rounds, evaluate_every=every, uploads=uploads):
            if experiment.evaluate.keeps(line.round, experiment.rounds):
                journal.keep(line.round, parts.model())
            journal.add(line)
            yield line
            journal.save_when_due(parts.server, parts.engine)
    journal.end()


def rounds(parts: TrialParts, *, count: int, evaluate_every: int, uploads: int = 0) -> Iterator[RoundRecord]:
    """Run the server's rounds up to ``count``, and yield what happened in each.

    Args:
        parts: of the trial.
        uploads: what was sent in the rounds before.

    Raises:
        DivergedError: a step would make the model infinite or NaN.
    """
    server = parts.server
    for round in range(server.round_number, count):
        begun = perf_counter()
        parts.begin(round)
        active = parts.pattern.active(round)
        broadcast = server.broadcast(active.clients)
        stream, waited = _Timed(parts.engine.updates(broadcast, active)), -parts.engine.waited
        start = perf_counter()
        report = server.round(stream)
        parts.end(report)
        folded, waited = perf_counter(), waited + parts.engine.waited
        evaluate = (round + 1) % evaluate_every == 0 or round + 1 == count
        evaluation = parts.evaluate(round, server.x) if evaluate else None
        done = perf_counter()
        uploads += stream.seen * server.algorithm.uploads
        yield RoundRecord(
            round=round,
            active=active.clients.tolist(),
            heard=len(report.heard),
            refused=len(report.refused),
            accuracy=evaluation.accuracy if evaluation else None,
            loss=finite(evaluation.loss) if evaluation else None,
            lr=broadcast.lr,
            gamma=report.gamma,
            steps=report.steps,
            uploads=uploads,
            norm=finite(float(np.mean(report.norms))) if len(report.norms) else None,
            bytes=report.bytes,
            seconds={
                "broadcast": start - begun,
                "local": stream.seconds - waited,
                "aggregate": folded - start - stream.seconds,
                "evaluate": done - folded,
                **({"waited": waited} if waited else {}),
            },
            uploadings=(round + 1) * server.algorithm.uploads + (parts.uploads > 0),
            bytes_down=broadcast.bytes + parts.bytes_more,
            diversity=finite(report.diversity),
            correction_norm=finite(report.correction_norm),
            staleness=report.staleness,
            together=parts.engine.together,
            awaited=report.awaited,
        )


@dataclass
class _Timed:
    """Passes updates on, counts them, and adds up the time that making them took."""

    updates: Iterable[Update]
    seconds: float = 0.0
    seen: int = 0

    def __iter__(self) -> Iterator[Update]:
        start = perf_counter()
        for update in self.updates:
            self.seconds += perf_counter() - start
            self.seen += 1
            yield update
            start = perf_counter()
        self.seconds += perf_counter() - start
