"""Shards' folders that go: a cluster's own, and nothing that somebody has put in their place."""

import os
from pathlib import Path
from typing import Any

from fedcore.errors import FedcoreError
from fedcore.server.folder_checks import believed
from fedcore.store import ClientStore
from fedcore.store.files.atomic_folder import remove
from fedcore.store.files.inventory import INDEX


def delete_shard(cluster: str, folder: str) -> bool:
    """Delete a cluster's shard and what drafts of it were left; another store stays, and one that somebody has.

    Returns:
        whether it is gone, or was never that cluster's.
    """
    try:
        if (Path(folder) / INDEX).exists() and _cluster_of(folder) != cluster:
            return True
        remove(Path(folder))
    except FedcoreError:
        return not os.path.exists(folder)
    return True


def _cluster_of(folder: str) -> Any:
    with ClientStore.open(folder, readonly=True) as rows, believed(folder):
        said: Any = rows.state
        return said["place"]["cluster"] if said and "place" in said else None
