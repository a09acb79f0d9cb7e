"""The complete trials of a run or a sweep as one small file, from which it is reported, and goes on, on any machine.

    python -m bench.papers.archive runs/NAME bench/papers/NAME-records.tar.xz
    mkdir -p runs && tar -xf bench/papers/NAME-records.tar.xz -C runs

The archive has a folder NAME with the configurations, the builds and the records of every round. Trials that are not
complete are left out: they would need their servers, too. It goes on by a fedcore of the same version, whose preset
says the same; other vector instructions than those of the builds round otherwise.
"""

import sys
import tarfile
from pathlib import Path

from fedcore.errors import MissingDataError
from fedcore.experiment.results import read, started
from fedcore.experiment.run_folder import BUILD, CONFIG, begun_runs


def pack(folder: Path, archive: Path) -> list[Path]:
    """Write the archive, of the same bytes for the same files; return the records in it.

    Raises:
        MissingDataError: no trial is complete; an archive that is there stays.
    """
    found = {
        run: [path for path in sorted((run / "records").glob("*.jsonl")) if started(path) and read(path).is_complete]
        for run in begun_runs(folder)
    }
    if not any(found.values()):
        raise MissingDataError(f"{folder}: expected trials with all their rounds, found none: go on with its command")
    draft = archive.with_suffix(".draft")
    with tarfile.open(draft, "w:xz", preset=9) as tar:
        for run, records in found.items():
            for path in (run / CONFIG, run / BUILD, *records) if records else ():
                tar.add(path, Path(folder.name) / path.relative_to(folder), filter=_anybody_s)
    draft.replace(archive)
    return [path for records in found.values() for path in records]


def _anybody_s(entry: tarfile.TarInfo) -> tarfile.TarInfo:
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
