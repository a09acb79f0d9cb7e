"""CIFAR-10 in its publisher's binary layout, from a directory or downloaded.

A record is one byte of label and 3,072 of pixels: 32 rows of 32, first all red, then all green, then all blue. What
counts is which records there are: mirrors deal them to the files in different orders, so they are put into one order of
our own, and the hash is taken of that.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedcore.data import files
from fedcore.data.dataset import Dataset
from fedcore.errors import MissingDataError

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
TRAIN = tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6))
TEST = ("cifar-10-batches-bin/test_batch.bin",)

RECORDS = 10_000
"""In each file."""
RECORD_BYTES = 1 + 3 * 32 * 32

# Of the ascending SHA-256 digests of the records of all files together.
TRAIN_SHA256 = "55a61f79a40ece2ceda9fb5f9f7078f6ea2fc4952489cef56682bcf92cfcc260"
TEST_SHA256 = "325704b01eb92e1e2a6215ae6a916bb7db7de054af0c496be1c7be2e0fcfbf5f"

MEAN = (0.49139968, 0.48215841, 0.44653091)
DEVIATION = (0.24703223, 0.24348513, 0.26158784)
"""Of the training pixels / 255, for each colour."""


def find() -> list[Path]:
    """The six files, as ``files.find`` finds or downloads them."""
    return files.find("cifar-10", [*TRAIN, *TEST], ADDRESS, md5=MD5)


def load(standardise: bool = False) -> Dataset:
    """CIFAR-10: pixels / 255 as float32[m, 3, 32, 32], 50,000 and 10,000 examples, 10 classes.

    The six files are read from ``$FEDCORE_DATA_DIR/cifar-10/cifar-10-batches-bin``; without that variable the archive
    is downloaded once, into pooch's cache.

    Args:
        standardise: subtract ``MEAN`` and divide by ``DEVIATION``, colour by colour.

    Raises:
        MissingDataError: a file is not there, cannot be downloaded, or the records are not those published.
        MissingDependencyError: a download is due and pooch is not installed.

    Determinism: the examples are in the order of their SHA-256 digests, whatever order the files have them in, so that
    a partition does not depend on where they came from.
    Cost: 740 MB of memory, and 370 MB more while it loads.

    Reference: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    paths = find()
    train_x, train_y = _examples(paths[: len(TRAIN)], TRAIN_SHA256, standardise)
    test_x, test_y = _examples(paths[len(TRAIN) :], TEST_SHA256, standardise)
    return Dataset("cifar-10", train_x, train_y, test_x, test_y, classes=10)


def _examples(
    paths: Sequence[Path], due: str, standardise: bool
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    records = np.concatenate([_read(path) for path in paths])
    digests = [sha256(record).digest() for record in records]
    order = sorted(range(len(records)), key=digests.__getitem__)
    came = sha256(b"".join(digests[index] for index in order)).hexdigest()
    if came != due:
        raise MissingDataError(
            f"{', '.join(map(str, paths))}: expected records with SHA-256 {due}, got {came}; "
            "delete the files and get them anew"
        )
    records = records[order]
    x = np.divide(records[:, 1:].reshape(-1, 3, 32, 32), np.float32(255), dtype=np.float32)
    if standardise:
        x -= np.array(MEAN, np.float32)[:, None, None]
        x /= np.array(DEVIATION, np.float32)[:, None, None]
    return x, records[:, 0].astype(np.int64)


def _read(path: Path) -> npt.NDArray[np.uint8]:
    """The records of one file, uint8[10000, 3073]."""
    due = RECORDS * RECORD_BYTES
    with path.open("rb") as file:
        content = file.read(due + 1)
    if len(content) != due:
        came = f"{len(content)}" if len(content) < due else "more"
        raise MissingDataError(f"{path}: expected {due} bytes, got {came}; delete the file and get it anew")
    records = np.frombuffer(content, np.uint8).reshape(RECORDS, RECORD_BYTES)
    if (highest := records[:, 0].max()) > 9:
        raise MissingDataError(f"{path}: expected labels 0 .. 9, got {highest}; delete the file and get it anew")
    return records
