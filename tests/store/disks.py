"""Small disks of real file systems, in image files: made, mounted, and filled."""

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

SIZES = {"ext4": 48 << 20, "xfs": 300 << 20, "btrfs": 128 << 20}
"""Bytes of an image, near the least that each file system can be."""
MOUNTING = {"xfs": "loop,nouuid"}  # a copy of a mounted one has the same id


@contextmanager
def mounted(image, place):
    """Mount an image at a new folder; it is unmounted, and its loop device given back, whatever happens."""
    kind = image.suffix[1:]
    place.mkdir()
    options = MOUNTING.get(kind, "loop")
    run = subprocess.run(["mount", "-t", kind, "-o", options, image, place], capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"this system mounts no {kind} image: {run.stderr.strip()}")
    try:
        yield place
    finally:
        if subprocess.run(["umount", place], capture_output=True).returncode:
            subprocess.run(["umount", "--lazy", place], check=True)  # a file may still be open


def image(kind, folder):
    """A new, empty file system in an image file; the test is skipped where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount images")
    make = shutil.which(f"mkfs.{kind}")
    if make is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    path = folder / f"disk.{kind}"
    with open(path, "wb") as file:
        file.truncate(SIZES[kind])
    subprocess.run([make, "-q", path], check=True, capture_output=True)
    return path


def fill(folder, leave):
    """Write until the disk is full, and then give back so many bytes."""
    filler = Path(folder, "filler")
    with open(filler, "wb", buffering=0) as file:
        for piece in (1 << 20, 4096):
            try:
                while True:
                    file.write(os.urandom(piece))
                    os.fsync(file.fileno())
            except OSError:
                pass
        file.truncate(max(0, os.fstat(file.fileno()).st_size - leave))
        os.fsync(file.fileno())
    return filler
