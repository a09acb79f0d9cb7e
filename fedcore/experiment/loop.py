"""The rounds of one trial: who is active, what they send, what the server makes of it, how good that is."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from fedcore.experiment.build import Parts
from fedcore.experiment.records import RoundRecord, finite
from fedcore.server import Update


def rounds(parts: Parts, *, count: int, evaluate_every: int, uploads: int = 0) -> Iterator[RoundRecord]:
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
            bytes_down=broadcast.bytes,
            diversity=finite(report.diversity),
            correction_norm=finite(report.correction_norm),
            staleness=report.staleness,
            together=parts.engine.together,
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
