"""A named copy of a store."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcore.errors import StoreError
from fedcore.store.content import Content
from fedcore.store.making import draft


def save(content: Content, path: Path, vectors: Mapping[str, Any] | None, state: str | None) -> None:
    """Write a copy to a folder, without the slots that are free.

    Args:
        content: what is copied, as it was committed last.
        path: the folder: new, empty, or an older copy.
        vectors, state: in place of the content's own, where they are not None.
    """
    if content.folder is not None and path.resolve() == content.folder.path.resolve():
        raise StoreError(f"{path}: expected another folder than the store's own, which every commit writes")
    with draft(path, content.form, content.registry, replacing=True) as folder:
        copy = Content.read(folder)
        entries = content.copy_to(copy, vectors)
        state = content.state if state is None else state
        head = replace(folder.head, round=content.round, state=state, vectors=copy.vectors.table)
        folder.publish(head, entries, (), ())
