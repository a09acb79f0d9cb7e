"""Records of experiments for pandas, which is imported when it is asked for."""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fedcore.arguments import absolute
from fedcore.errors import MissingDependencyError

if TYPE_CHECKING:
    import pandas


def read_records(folder: str | os.PathLike[str]) -> "pandas.DataFrame":
    """The records of a run or a sweep, finished or not, as a pandas frame: a row for each round of each trial.

    Columns, in this order:

    - ``run`` (the run's folder below ``folder``, "" where it is that), ``preset``, ``algorithm`` (its label), ``seed``;
    - a column for each setting in which the trials differ, by its dotted key, as ``--set`` takes it: ``rate.lr``,
      ``participation.p``, or ``algorithms.beta`` for an option of the trial's own algorithm; none where all agree;
    - ``round``, counted from 0, and what else ``fedcore.experiment.records.RoundRecord`` has: ``active`` (a tuple of
      clients), ``heard``, ``refused``, ``accuracy`` and ``loss`` (NaN where the round was not evaluated), ``lr``,
      ``gamma``, ``steps``, ``uploads``, ``norm``, ``bytes``, ``uploadings``, ``bytes_down``, ``diversity``,
      ``correction_norm``, ``staleness``, ``together``,
      ``awaited``;
    - ``seconds_broadcast``, ``seconds_local``, ``seconds_aggregate``, ``seconds_evaluate``,
      ``seconds_waited`` (for updates that other processes make; NaN where none do): what its time went to.

    Args:
        folder: what ``fedcore run`` or ``fedcore sweep`` wrote; it is only read.

    Raises:
        MissingDependencyError: pandas or pydantic is not installed.
        MissingDataError: there are no records in it, or one is damaged.

    Cost: every record is parsed and checked; 20,000 rounds take about a second.

    Example, a table of conditions by methods, of a sweep with ``grid={'participation.p'=[0.1, 0.5]}``:

        frame = fedcore.read_records("runs/sweep-full")
        last = frame[frame["round"] == frame.groupby("run")["round"].transform("max")]
        last.pivot_table("accuracy", "participation.p", "algorithm")
    """
    missing = [package for package in ("pandas", "pydantic") if find_spec(package) is None]
    if missing:
        raise MissingDependencyError.of("read_records", ", ".join(missing), extra="pandas")
    from fedcore.experiment.frame import frame_of

    return frame_of(absolute(folder))
