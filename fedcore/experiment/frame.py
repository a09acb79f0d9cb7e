"""The records of runs and sweeps as one pandas frame."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcore.arguments import absolute
from fedcore.atomic_file import require_file
from fedcore.errors import MissingDataError, MissingDependencyError
from fedcore.experiment.changes import BESIDES, SIZES, plain
from fedcore.experiment.results import Record, RoundRecord, read_folder
from fedcore.experiment.run_folder import CONFIG, begun_runs

if TYPE_CHECKING:
    import pandas

TRIAL = ("run", "preset", "algorithm", "seed")
PARTS = ("broadcast", "local", "aggregate", "evaluate", "waited")
"""What a round's time went to, in the order of the columns."""


def read_records(folder: str | os.PathLike[str]) -> "pandas.DataFrame":
    """Return the records of a run or a sweep, finished or not, as a pandas frame: a row for each round of each trial.

    Columns, in this order:

    - ``run`` (the run's folder below ``folder``, "" where it is that), ``preset``, ``algorithm`` (its label), ``seed``;
    - a column for each setting in which the trials differ, by its dotted key, as ``--set`` takes it: ``rate.lr``,
      ``participation.p``, or ``algorithms.beta`` for an option of the trial's own algorithm; none where all agree;
    - ``round``, counted from 0, and what else ``fedcore.experiment.results.RoundRecord`` has: ``active`` (a tuple of
      clients), ``heard``, ``refused``, ``accuracy`` and ``loss`` (NaN where the round was not evaluated), ``lr``,
      ``gamma``, ``steps``, ``uploads``, ``norm``, ``bytes``, ``uploadings``, ``bytes_down``, ``diversity``,
      ``correction_norm``, ``staleness``, ``together``, ``awaited``;
    - ``seconds_broadcast``, ``seconds_local``, ``seconds_aggregate``, ``seconds_evaluate``,
      ``seconds_waited`` (for updates that other processes make; NaN where none do): what its time went to.

    Args:
        folder: written by ``fedcore run``; it is only read.

    Raises:
        MissingDependencyError: pandas is not installed.
        MissingDataError: there are no records in it, or one is damaged.

    Cost: every record is parsed and checked; 20,000 rounds take about a second.

    Example, a table of conditions by methods, of a sweep with ``grid={'participation.p'=[0.1, 0.5]}``:

        frame = read_records("runs/sweep-full")
        last = frame[frame["round"] == frame.groupby("run")["round"].transform("max")]
        last.pivot_table("accuracy", "participation.p", "algorithm")
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise MissingDependencyError.of("read_records", "pandas", extra="pandas") from None
    folder = absolute(folder)
    trials = list(_trials(folder))
    settings = [settings for _, _, settings in trials]
    varied = [key for key in dict.fromkeys(key for one in settings for key in one) if _differs(key, settings)]
    rows = [
        {
            **dict(zip(TRIAL, (run, record.header.preset, record.header.algorithm, record.header.seed), strict=True)),
            **{key: own.get(key) for key in varied},
            **_columns(line),
        }
        for run, record, own in trials
        for line in record.rounds
    ]
    of_rounds = [field.name for field in fields(RoundRecord) if field.name != "seconds"]
    seconds = [f"seconds_{part}" for part in PARTS]
    return pandas.DataFrame(rows, columns=[*TRIAL, *varied, *of_rounds, *seconds]).astype(
        {"accuracy": float, "loss": float, "norm": float, "seconds_waited": float}
    )


def _trials(folder: Path) -> Iterator[tuple[str, Record, dict[str, Any]]]:
    """Each trial's run, its record, and its settings by dotted key."""
    for run in begun_runs(folder):
        tables = _tables(run / CONFIG)
        for record in read_folder(run):
            name = run.relative_to(folder).as_posix() if run != folder else ""
            yield name, record, _settings(tables, record.header.algorithm)


def _tables(config: Path) -> Mapping[str, Any]:
    try:
        tables = json.loads(require_file(config).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise MissingDataError(f"{config}: expected a run's configuration: {error}") from None
    if not isinstance(tables, dict):
        raise MissingDataError(f"{config}: expected a run's configuration, got {type(tables).__name__}")
    return tables


def _settings(tables: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The settings of one trial of a configuration, those of other algorithms left out."""
    methods = tables.get("algorithms", ())
    own = next((one for one in methods if isinstance(one, dict) and one.get("label") == label), {})
    shared = {key: value for key, value in tables.items() if key not in (*BESIDES, *SIZES, "algorithms", "grid")}
    options = {key: value for key, value in own.items() if key not in ("name", "label")}
    return dict(_flat("", shared)) | dict(_flat("algorithms.", options))


def _flat(prefix: str, tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, entry in tables.items():
        value = plain(entry)
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield prefix + key, json.dumps(value) if isinstance(value, list) else value


def _differs(key: str, settings: list[dict[str, Any]]) -> bool:
    return len({json.dumps(own.get(key)) for own in settings}) > 1


def _columns(line: RoundRecord) -> dict[str, Any]:
    columns = asdict(line)
    columns["active"] = tuple(columns["active"])
    seconds = columns.pop("seconds")
    return columns | {f"seconds_{part}": seconds.get(part) for part in PARTS}
