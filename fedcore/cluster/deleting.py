"""The deletion of shards: a cluster's own, and nothing else that lies in their place."""

import os
from pathlib import Path
from typing import Any

from fedcore.errors import FedcoreError
from fedcore.server.folder_checks import believed
from fedcore.store import ClientStore
from fedcore.store.files.atomic_folder import remove, sweep
from fedcore.store.files.inventory import INDEX, is_disposable, is_own_folder


def delete_shard(cluster: str, folder: str, shard: int | None) -> bool:
    """Delete a cluster's shard and what drafts of it were left.

    Only a folder of this user goes, and only with a proof inside: a store whose state names this cluster and shard, or
    a lock file that says that the folder is a draft or the rest of a deleted store.

    Args:
        shard: its number, as its folder's name says; None for a folder that the caller has named.

    Returns:
        whether it is gone, or is not that shard; False where another process has it.
    """
    path = Path(folder)
    try:
        sweep(path)
        if os.path.lexists(path):
            found = os.lstat(path)
            if is_own_folder(path) and _is_of(cluster, shard, path):
                remove(path, found)
    except FedcoreError:
        return not os.path.lexists(path)
    return True


def _is_of(cluster: str, shard: int | None, path: Path) -> bool:
    if not (path / INDEX).exists():
        return is_disposable(path)
    with ClientStore.open(path, readonly=True) as rows, believed(path):
        said: Any = rows.state
        place = (said or {}).get("place") or {}
        return place.get("cluster") == cluster and shard in (None, place["shard"])
