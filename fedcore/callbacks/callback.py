"""A logger of rounds: of a server's, by ``on_report``, and of an experiment's, by ``on_event`` or from its records."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fedcore.arguments import absolute
from fedcore.callbacks.figures import Figures, of_record, of_report
from fedcore.server import RoundReport

if TYPE_CHECKING:
    from fedcore.experiment import Event  # which needs the simulator: a server's operator need not have it
    from fedcore.experiment.records import Header


class Callback(ABC):
    """The ways to log rounds that every logger has; a subclass says how figures are written, and how it ends.

    ``Server(on_report=callback)`` logs a server's rounds, ``run_experiment(..., on_event=callback.event)`` and
    ``run_sweep`` those of each trial as it runs, ``callback.replay(DIR)`` those of a run or sweep that is there, one
    that the command line made, say. A context manager, which closes it.
    """

    def __call__(self, report: RoundReport) -> None:
        """Log a server's round."""
        self.write("", report.round, of_report(report), {})

    def event(self, event: "Event") -> None:
        """Log an experiment's round, if that is what the event is; its run is ``PRESET/POINT/ALGORITHM-seedN``."""
        if event.round is not None:
            trial, group = event.trial, event.job.group.replace(" ", "/")
            preset = trial.experiment.name
            about = {"preset": preset, "algorithm": trial.method.label, "seed": str(trial.seed)}
            self.write(_name(group or preset, *_whose(about)), event.round.round, of_record(event.round), about)

    def replay(self, folder: str | os.PathLike[str]) -> None:
        """Log every round in the records of a run or a sweep.

        Raises:
            MissingDataError: there are none, or one is damaged.
        """
        from fedcore.experiment.records import read_folder
        from fedcore.experiment.run_folder import begun_runs

        place = absolute(folder)
        for run in begun_runs(place):
            below = run.relative_to(place).as_posix()
            for record in read_folder(run):
                about = _about(record.header)
                name = _name(about["preset"] if below == "." else below, *_whose(about))
                for line in record.rounds:
                    self.write(name, line.round, of_record(line), about)

    @abstractmethod
    def write(self, run: str, round: int, figures: Figures, about: Mapping[str, str]) -> None:
        """Write a round's figures.

        Args:
            run: the name of the trial; "" for a server.
            round: counted from 0.
            figures: by name.
            about: the trial's preset, algorithm and seed.
        """

    def close(self) -> None:  # noqa: B027  # many hold nothing open
        """Write what is left, and let files and connections go."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _about(header: "Header") -> dict[str, str]:
    return {"preset": header.preset, "algorithm": header.algorithm, "seed": str(header.seed)}


def _whose(about: Mapping[str, str]) -> tuple[str, str]:
    return about["algorithm"], about["seed"]


def _name(group: str, algorithm: str, seed: str) -> str:
    return f"{group}/{algorithm}-seed{seed}".replace("\\", "_").replace(" ", "_")
