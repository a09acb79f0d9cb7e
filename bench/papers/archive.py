"""Pack the complete trials of a run or a sweep into one small file, for reports and resumed runs on any machine.

    python -m bench.papers.archive runs/NAME bench/papers/NAME-records.tar.xz
    mkdir -p runs && tar -xf bench/papers/NAME-records.tar.xz -C runs

The archive has a folder NAME with the configurations, the builds and the records of every round. It omits incomplete
trials, whose servers would be needed too. Resume with the same version of fedcore and an unchanged preset. Vector
instructions that differ from those of the builds may round differently.
"""

import sys
import tarfile
from pathlib import Path

from fedcore.errors import MissingDataError
from fedcore.sim.experiment.results import CONFIG, begun_runs, read, started
from fedcore.sim.experiment.runner import BUILD


def pack(folder: Path, archive: Path) -> list[Path]:
    """Write the archive, whose bytes depend only on the files; return the paths of its records.

    Raises:
        MissingDataError: no trial is complete. An existing archive is unchanged.
    """
    records_of = {
        run: [path for path in sorted((run / "records").glob("*.jsonl")) if started(path) and read(path).is_complete]
        for run in begun_runs(folder)
    }
    if not any(records_of.values()):
        raise MissingDataError(f"{folder}: no trial has all its rounds; resume the run first")
    draft = archive.with_suffix(".draft")
    with tarfile.open(draft, "w:xz", preset=9) as tar:
        for run, records in records_of.items():
            for path in (run / CONFIG, run / BUILD, *records) if records else ():
                tar.add(path, Path(folder.name) / path.relative_to(folder), filter=_without_owner)
    draft.replace(archive)
    return [path for records in records_of.values() for path in records]


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(Path, sys.argv[1:])
    packed = pack(source.resolve(), target)
    print(f"{target}: {len(packed)} trials, {target.stat().st_size / 1000:,.0f} kB")
