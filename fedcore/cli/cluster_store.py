"""The commands on a cluster's folders: what is in them, whether they are sound, and another number of shards."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from fedcore import cluster
from fedcore.cli.pairs import bytes_of, show_json, show_pairs
from fedcore.cli.status import FAILED
from fedcore.cluster.coordinator import least
from fedcore.cluster.manifest import Manifest
from fedcore.errors import CheckpointError
from fedcore.server.invariant import folder_problems
from fedcore.server.transactions import transactions


def info(file: Path, manifest: Manifest, as_json: bool, folders: list[Path] | None) -> None:
    """Show what each shard holds."""
    layout, shards = manifest.layout, []
    pairs = [("manifest", str(file)), ("parameters", f"{layout.n_parameters:,} of {layout.n:,} elements")]
    for place, span in zip(manifest.places(file.parent, folders), manifest.ranges, strict=True):
        with place.open(readonly=True) as opened:
            found, last = opened.info(), transactions(opened)
        shards.append(asdict(found) | {"transactions": last._asdict(), "range": span._asdict()})
        said = f"transaction {last.last}, {found.rows:,} rows, {bytes_of(found.bytes)} on disk"
        pairs.append((f"shard {place.shard}", f"[{span.start:,}, {span.stop:,}), {said}, {place.folder}"))
    if as_json:
        show_json({"manifest": file, "parameters": layout.n_parameters, "elements": layout.n, "shards": shards})
    else:
        show_pairs(pairs)


def verify(file: Path, manifest: Manifest, as_json: bool, folders: list[Path] | None) -> None:
    """Compare everything in all shards with its checksums, their sums with their rows, and them with each other."""
    problems, held, rows, to = [], [], 0, None
    places = manifest.places(file.parent, folders)
    for place in places:
        with place.open(readonly=True) as opened:
            found = opened.verify() or folder_problems(opened)
            held.append(transactions(opened))
            rows = max(rows, len(opened))
        problems += [f"shard {place.shard}: {problem}" for problem in found]
    try:
        to = least(held, places)
    except CheckpointError as error:
        problems.append(str(error))
    if as_json:
        last = [one.last for one in held]
        show_json({"sound": not problems, "problems": problems, "rows": rows, "transaction": to, "shards": last})
    else:
        for problem in problems:
            print(problem)
    if problems:
        sys.exit(FAILED)
    ahead = sum(one.last != to for one in held)
    said = f"; {ahead} more than that, to be taken back when a server is opened"
    if not as_json:
        print(f"sound: {len(places)} shards at transaction {to}, {rows:,} rows{said if ahead else ''}")


def reshard(
    path: Path,
    shards: int,
    to: Path | None,
    folders: list[Path] | None,
    current_folders: list[Path] | None = None,
) -> None:
    """Cut a cluster, or a server's folder, into another number of shards."""
    with _bar("rows written") as show:
        file = cluster.reshard(path, shards, to=to, folders=folders, current_folders=current_folders, progress=show)
    print(f"{shards} shards: {file}")


@contextmanager
def _bar(words: str) -> Iterator[Callable[[int, int], object]]:
    """A bar on a terminal, where the library that draws one is installed."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda done, due: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(words, total=None)
        yield lambda done, due: bars.update(bar, completed=done, total=due)
