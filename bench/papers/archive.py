"""The complete trials of a run or a sweep as one small file, from which it is reported, and goes on, on any machine.

    python -m bench.papers.archive runs/NAME bench/papers/NAME-records.tar.xz
    tar -xf bench/papers/NAME-records.tar.xz -C runs

The archive has a folder NAME with the configurations, the builds and the records of every round. Trials that are not
complete are left out: they would need their servers, too.
"""

import sys
import tarfile
from pathlib import Path

from fedcore.experiment.records import read, started
from fedcore.experiment.run_folder import BUILD, CONFIG, begun_runs


def pack(folder: Path, archive: Path) -> list[Path]:
    """Write the archive, of the same bytes for the same files; return the records in it."""
    packed: list[Path] = []
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for run in begun_runs(folder):
            complete = [path for path in sorted((run / "records").glob("*.jsonl")) if _is_complete(path)]
            for path in (run / CONFIG, run / BUILD, *complete) if complete else ():
                tar.add(path, Path(folder.name) / path.relative_to(folder), filter=_anybody_s)
            packed += complete
    return packed


def _is_complete(path: Path) -> bool:
    return started(path) and len((record := read(path)).rounds) == record.header.rounds


def _anybody_s(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    records = pack(source.resolve(), target)
    print(f"{target}: {len(records)} trials, {target.stat().st_size / 1000:,.0f} kB")
