"""The intent of a save or a cut of a cluster: what it makes and deletes, for whoever comes after a kill."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fedcore.cluster.manifest import NAME, manifest_at, replace_text
from fedcore.server.folder_checks import believed

INTENT = "cluster.json.intent"
"""Its file, beside the manifest, there while folders are made or deleted."""

Delete = Callable[[Sequence[str]], object]
"""Deletes folders, those of them that are stores and that nobody has."""


def declare(home: Path, *, made: Sequence[str], going: Sequence[str]) -> None:
    """Write down what is about to be done, durably.

    Args:
        home: the folder of the manifest, which the caller alone writes to.
        made: the folders of the shards that the new manifest will name, as it names them.
        going: those that go once it is there.

    What lies beside the manifest is told by its name: who copies the whole elsewhere deletes nothing in its old place.
    """
    said = {"made": [_told(home, folder) for folder in made], "going": [_told(home, folder) for folder in going]}
    replace_text(home / INTENT, json.dumps(said))


def finish(home: Path, delete: Delete, *, goes: bool = True) -> None:
    """Delete what ended anywhere has left: what it made, or, if its manifest is there, what goes then.

    Args:
        home: as for ``declare``.
        delete: what can reach the folders.
        goes: False leaves what goes for the next time.
    """
    if not (home / INTENT).exists():
        return
    with believed(home / INTENT):
        said = json.loads((home / INTENT).read_text())
        made, going = ([str(folder) for folder in said[key]] for key in ("made", "going"))
    there = manifest_at(home / NAME)
    is_done = there is not None and [_told(home, folder) for folder in there[1].folders or ()] == made
    if is_done and not goes:
        return
    delete([os.path.abspath(home / folder) for folder in (going if is_done else made)])
    (home / INTENT).unlink()


def _told(home: Path, folder: str) -> str:
    path = Path(os.path.abspath(home / folder))
    return path.name if path.parent == home else str(path)
