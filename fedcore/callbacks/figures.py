"""The figures of a round that loggers and monitors show, by name."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from fedcore.server import RoundReport

if TYPE_CHECKING:
    from fedcore.experiment.records import RoundRecord  # which needs the simulator

Figures = dict[str, float]


def of_report(report: RoundReport) -> Figures:
    """The figures of a server's round: counts of clients, and what is known and finite of the other numbers.

    ``norm`` and ``largest_norm`` are the mean and the largest of ``RoundReport.norms``; the others have its names.

    >>> of_report(RoundReport(3, heard=(1, 2), steps=9))
    {'heard': 2.0, 'refused': 0.0, 'steps': 9.0, 'gamma': 0.0, 'awaited': 0.0, 'seconds': 0.0, 'bytes': 0.0}
    """
    norms = {"norm": float(report.norms.mean()), "largest_norm": float(report.norms.max())} if len(report.norms) else {}
    return _finite(
        {
            "heard": len(report.heard),
            "refused": len(report.refused),
            "steps": report.steps,
            "gamma": report.gamma,
            "awaited": report.awaited,
            "seconds": report.seconds,
            "bytes": report.bytes,
            "diversity": report.diversity,
            "staleness": report.staleness,
            "correction_norm": report.correction_norm,
            **norms,
        }
    )


def of_record(record: "RoundRecord") -> Figures:
    """The figures of an experiment's round: the numbers of its record, ``active`` counted, each part of ``seconds``."""
    told = asdict(record)
    told["active"] = len(record.active)
    del told["round"], told["together"]
    seconds = told.pop("seconds")
    return _finite(told | {f"seconds_{part}": value for part, value in seconds.items()})


def _finite(told: dict[str, float | None]) -> Figures:
    return {name: float(value) for name, value in told.items() if value is not None and math.isfinite(value)}
