"""The files of a data set: under ``$FEDCORE_DATA_DIR``, or downloaded once into pooch's cache."""

import os
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

from fedcore.arguments import absolute
from fedcore.errors import MissingDataError, MissingDependencyError


def find(name: str, files: Sequence[str], address: str, *, md5: str | None = None) -> list[Path]:
    """The paths of a data set's files, in their order.

    With ``FEDCORE_DATA_DIR`` they must lie in ``$FEDCORE_DATA_DIR/<name>``, and nothing is downloaded.

    Args:
        name: the data set's folder.
        files: paths inside that folder, and inside the archive if there is one.
        address: of the publisher's folder that holds the files, ending in a slash, or of the archive.
        md5: of the archive, as its publisher gives it; None if ``address`` is a folder. Single files have none: two
            mirrors may compress the same content differently, so their content is verified by who reads it.

    Raises:
        MissingDataError: a file is not there, or cannot be downloaded, or the archive is not the published one.
        MissingDependencyError: a download is due and pooch is not installed.
    """
    directory = os.environ.get("FEDCORE_DATA_DIR")
    if not directory:
        return _download(name, files, address, md5)
    place = absolute(directory) / name
    paths = [place / file for file in files]
    if missing := [file for file, path in zip(files, paths, strict=True) if not path.is_file()]:
        how = "put the files there, from" if md5 is None else "unpack there"
        raise MissingDataError(
            f"{name}: expected {', '.join(missing)} in {place}; {how} {address}, "
            "or unset FEDCORE_DATA_DIR to have it downloaded"
        )
    return paths


def _download(name: str, files: Sequence[str], address: str, md5: str | None) -> list[Path]:
    try:
        import pooch
    except ImportError as error:
        needed = "pooch to download it"
        raise MissingDependencyError.of(name, needed, extra="sim", instead="set FEDCORE_DATA_DIR") from error
    folder = pooch.os_cache("fedcore") / name
    try:
        if md5 is None:
            cache = pooch.create(folder, address, registry=dict.fromkeys(files))
            return [Path(cache.fetch(file)) for file in files]
        archive = pooch.retrieve(address, f"md5:{md5}", address.rpartition("/")[2], folder)
        return _unpack(Path(archive), files)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong hash is a ValueError
        raise MissingDataError(
            f"{name}: {', '.join(files)} could not be downloaded from {address} ({error}); "
            f"put the files into a directory {name!r} and set FEDCORE_DATA_DIR to its parent"
        ) from error


def _unpack(archive: Path, files: Sequence[str]) -> list[Path]:
    """The files of an archive, unpacked beside it where they are not yet."""
    paths = [archive.parent / file for file in files]
    for file, path in zip(files, paths, strict=True):
        if path.is_file():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as fresh:
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as unzipped, unzipped.open(file) as packed:
                    shutil.copyfileobj(packed, fresh)
            else:
                with tarfile.open(archive) as untarred, untarred.extractfile(file) as packed:  # type: ignore[union-attr]
                    shutil.copyfileobj(packed, fresh)
        os.replace(fresh.name, path)  # whole or not at all: another process of the run may read it already
    return paths
