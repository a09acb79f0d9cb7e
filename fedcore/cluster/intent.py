"""The intent of a save or a cut of a cluster: what it makes and deletes, for whoever comes after a kill."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedcore.cluster.manifest import NAME, Manifest, manifest_at, replace_text
from fedcore.server.folder_checks import believed

INTENT = "cluster.json.intent"
"""Its file, beside the manifest, there while folders are made or deleted."""

Delete = Callable[[str, Sequence[str]], bool]
"""Deletes a cluster's shards, by its name, from folders, where they are that cluster's; tells whether all are gone."""


def declare(home: Path, *, made: Manifest, going: Manifest | None) -> None:
    """Write down what is about to be done, durably.

    Args:
        home: the folder of the manifest, which the caller alone writes to.
        made: whose shards are made.
        going: whose shards go once the manifest of those is there.
    """
    said = {"home": str(home), "made": _told(home, made), "going": None if going is None else _told(home, going)}
    replace_text(home / INTENT, json.dumps(said))


def finish(home: Path, delete: Delete, *, goes: bool = True) -> None:
    """Delete what ended anywhere has left: what it made, or, if its manifest is there, what goes then.

    Where the folder was copied, shards that lie elsewhere are the other one's, and stay.

    Args:
        home: as for ``declare``.
        goes: False leaves what goes for the next time.
    """
    if not (home / INTENT).exists():
        return
    there = manifest_at(home / NAME)
    with believed(home / INTENT):
        said = json.loads((home / INTENT).read_text())
        made, going = said["made"], said["going"]
        is_done = there is not None and _told(home, there[1]) == made
        over = going if is_done else made
        folders = [] if over is None else [str(folder) for folder in over["folders"]]
        if said["home"] != str(home):
            folders = [folder for folder in folders if not os.path.isabs(folder)]
        cluster = None if over is None else str(over["cluster"])
    if is_done and not goes:
        return
    if cluster is None or delete(cluster, [os.path.abspath(home / folder) for folder in folders]):
        (home / INTENT).unlink()  # else the next time may do it


def _told(home: Path, manifest: Manifest) -> dict[str, Any]:
    """The shards of a manifest; one that lies beside it by its name, whatever the folder is called later."""
    paths = [Path(os.path.abspath(home / folder)) for folder in manifest.folders or ()]
    folders = [path.name if path.parent == home else str(path) for path in paths]
    return {"cluster": manifest.cluster, "folders": folders}
