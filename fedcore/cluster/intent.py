"""The intent of a save or a cut of a cluster: which shards it makes and deletes, for the next one after a kill."""

import json
import logging
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from fedcore.cluster.manifest import NAME, Manifest, manifest_at, replace_text, require_own_file
from fedcore.cluster.shard import shard_in
from fedcore.errors import CheckpointError
from fedcore.server.folder_checks import believed

LOGGER = logging.getLogger("fedcore.cluster")
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
    said = {"made": _told(home, made), "going": None if going is None else _told(home, going)}
    replace_text(home / INTENT, json.dumps(said))


def finish(home: Path, delete: Delete, *, goes: bool = True, named: Collection[str] = ()) -> None:
    """Delete the shards that a save or a cut has left: those it made, or, if its manifest is there, those that go then.

    The intent itself proves little, since other users may write to the folder. It must be this user's, and it deletes
    shards beside it, by names that fedcore gives, or folders that the caller names now. ``delete`` looks into each.

    Args:
        home: as for ``declare``.
        goes: False leaves what goes for the next time.
        named: folders elsewhere that the caller has named.

    Raises:
        StoreError: the intent is another user's, or a link.
        CheckpointError: the intent is damaged.
    """
    if not os.path.lexists(home / INTENT):
        return
    require_own_file(home / INTENT)
    there = manifest_at(home / NAME)
    try:
        with believed(home / INTENT):
            said = json.loads((home / INTENT).read_text())
            made, going = said["made"], said["going"]
            is_done = there is not None and _told(home, there[1]) == made
            over = going if is_done else made
            cluster = None if over is None else str(over["cluster"])
            folders = [] if over is None else [str(folder) for folder in over["folders"]]
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; delete {home / INTENT}: it only lists the shards that a stopped save or cut has left; they stay"
        ) from error
    if is_done and not goes:
        return
    inside = [str(home / folder) for folder in folders if shard_in(folder) is not None]
    outside = [folder for folder in folders if shard_in(folder) is None]
    if left := [folder for folder in outside if folder not in named]:
        LOGGER.warning("%s: shards in other folders are not deleted; delete them by hand: %s", home / INTENT, left)
    if cluster is None or delete(cluster, [*inside, *(folder for folder in outside if folder in named)]):
        (home / INTENT).unlink()  # else the next time may do it


def _told(home: Path, manifest: Manifest) -> dict[str, Any]:
    """The shards of a manifest; one that lies beside it by its name, whatever the folder is called later."""
    paths = [Path(os.path.abspath(home / folder)) for folder in manifest.folders or ()]
    folders = [path.name if path.parent == home and shard_in(path.name) is not None else str(path) for path in paths]
    return {"cluster": manifest.cluster, "folders": folders}
