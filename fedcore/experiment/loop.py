"""The run of one trial, from the data to the last line of its record, and its rounds."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from fedcore.engines import InProcess
from fedcore.errors import ConfigError
from fedcore.experiment.build import MakeEngine, TrialParts, build
from fedcore.experiment.checkpoints import SECONDS, Checkpoints
from fedcore.experiment.records import Header, RoundRecord, Writer, finite, read, started
from fedcore.experiment.trial import CHECKPOINTS, Trial
from fedcore.runtime import __version__
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
    experiment = trial.experiment
    header = Header(
        preset=experiment.name,
        title=experiment.title,
        algorithm=trial.method.label,
        order=trial.order,
        seed=trial.seed,
        rounds=experiment.rounds,
        version=__version__,
    )
    path = folder / "records" / trial.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    before = _rounds_before(path, header)
    checkpoints = Checkpoints(folder / CHECKPOINTS / path.stem, checkpoint_seconds)
    if before is not None and len(before) == experiment.rounds:
        checkpoints.remove()  # a run that was killed at the very end leaves one
        for line in before:
            on_round(line)
        return
    if before is None:
        Writer(path, header).close()  # a trial that fails at once has a record too
    parts = build(trial, None if before is None else checkpoints.folder, make_engine)
    if parts.server.round_number > len(before or []):  # a copy of rounds that the record has lost leads nowhere
        parts.engine.close()
        parts = build(trial, None, make_engine)
    before = (before or [])[: parts.server.round_number]
    with closing(parts.engine), Writer(path, header, before) as record:
        for line in before:
            on_round(line)
        uploads, every = before[-1].uploads if before else parts.uploads, experiment.evaluate.every
        for line in rounds(parts, count=experiment.rounds, evaluate_every=every, uploads=uploads):
            record.add(line)
            on_round(line)
            checkpoints.save_when_due(parts.server, record, parts.engine)
    checkpoints.remove()


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
        stream = _Timed(parts.engine.updates(broadcast, active))
        start = perf_counter()
        report = server.round(stream)
        parts.end(report)
        folded = perf_counter()
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
                "local": stream.seconds,
                "aggregate": folded - start - stream.seconds,
                "evaluate": done - folded,
            },
            uploadings=(round + 1) * server.algorithm.uploads + (parts.uploads > 0),
            bytes_down=broadcast.bytes + parts.bytes_more,
            diversity=finite(report.diversity),
            correction_norm=finite(report.correction_norm),
            staleness=report.staleness,
            together=parts.engine.together,
        )


def _rounds_before(path: Path, header: Header) -> list[RoundRecord] | None:
    """The rounds of a trial that was begun before, or None.

    Raises:
        ConfigError: the record is another trial's.
    """
    if not path.exists():
        return None
    if not started(path):
        path.unlink()
        return None
    record = read(path)
    if record.header != header:
        raise ConfigError(f"{path}: expected the record of {header}, got that of {record.header}")
    return record.rounds


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
