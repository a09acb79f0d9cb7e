"""Files that are replaced as a whole or stay as they were."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from fedcore.errors import ConfigError


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Make an empty file beside ``path``, which takes its name once the block is done; an error deletes it.

    Nobody can guess its name, so that a link in a folder of several users leads nowhere. Its mode follows the umask.
    """
    draft = path.with_name(f".{path.name}.{uuid4().hex[:12]}")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield draft
        with open(draft, "rb") as written:
            os.fsync(written.fileno())
        os.replace(draft, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(draft)
        if isinstance(error, OSError) and error.filename2 is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from None  # without the draft's name
        raise


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a new file that takes the name ``path`` once the block is done: see ``draft_of``.

    Args:
        mode: "w" for text in UTF-8, "wb" for bytes.
    """
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    with draft_of(path) as draft, open(draft, mode, **text) as file:
        yield file


def inside(home: Path, place: Path) -> Path:
    """Return a path below a folder, unless a link on the way leads elsewhere: the folder may be a stranger's.

    Raises:
        ConfigError: it does, or the path is not below the folder.
    """
    steps = place.relative_to(home).parts if place.is_relative_to(home) else ("..",)
    for n in range(1, len(steps) + 1):
        step = home.joinpath(*steps[:n])
        if step.name == ".." or step.is_symlink():
            raise ConfigError(f"{place}: expected a place inside {home}, got one elsewhere, or a link at {step}")
    return place


def write_text(path: Path, text: str) -> None:
    """Put a text in UTF-8 in the place of a file: see ``draft_of``."""
    with replacing(path) as file:
        file.write(text)
