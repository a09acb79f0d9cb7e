"""EMNIST: handwritten letters and digits in MNIST's format, in five splits, from a directory or downloaded.

Its files have no published hashes, so their form is all that can be verified of files that were put into a directory;
the archive that is downloaded is verified as a whole.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedcore.data import files, idx
from fedcore.data.dataset import Dataset

ADDRESS = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
MD5 = "58c8d27c78d21e728a6bc7b3cc06412e"

CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10}
"""The splits. ``byclass`` is 0-9, A-Z, a-z; ``bymerge`` and ``balanced`` do not tell apart the cases of 15 letters."""


def find(split: str) -> list[Path]:
    """The four files of a split, as ``files.find`` finds or downloads them."""
    due = [
        f"gzip/emnist-{split}-{part}-{kind}-ubyte.gz"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    ]
    return files.find("emnist", due, ADDRESS, md5=MD5)


def load(split: str) -> Dataset:
    """One split of EMNIST: pixels / 255 as float32[m, 1, 28, 28].

    The four files are read from ``$FEDCORE_DATA_DIR/emnist/gzip``; without that variable the archive (536 MB) is
    downloaded once, into pooch's cache. The publisher stores the images transposed; here they stand upright. The
    labels of ``letters``, 1 .. 26 in its files, are counted from 0.

    Args:
        split: a key of ``CLASSES``.

    Raises:
        MissingDataError: a file is not there, cannot be downloaded, or its content has not the form it must have.
        MissingDependencyError: a download is due and pooch is not installed.

    Cost: 4 bytes a pixel, 2.6 GB of memory for ``byclass`` and ``bymerge``, and a quarter more while it loads.

    Reference: G. Cohen, S. Afshar, J. Tapson, A. van Schaik, "EMNIST: Extending MNIST to handwritten letters", 2017.
    """
    train_images, train_labels, test_images, test_labels = find(split)
    train_x, train_y = _read(train_images, train_labels, split)
    test_x, test_y = _read(test_images, test_labels, split)
    return Dataset(f"emnist-{split}", train_x, train_y, test_x, test_y, CLASSES[split])


def _read(images: Path, labels: Path, split: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    pixels = idx.read(images, ndim=3)
    if pixels.shape[1:] != (28, 28) or not len(pixels):
        raise idx.corrupt(images, "expected images of 28 x 28", f"{list(pixels.shape)}")
    raw = idx.read(labels, ndim=1)
    if len(raw) != len(pixels):
        raise idx.corrupt(labels, f"expected {len(pixels)} labels, one for each image", f"{len(raw)}")
    first = 1 if split == "letters" else 0
    last = first + CLASSES[split] - 1
    if not first <= raw.min() <= raw.max() <= last:
        raise idx.corrupt(labels, f"expected labels {first} .. {last}", f"{raw.min()} .. {raw.max()}")
    upright = pixels.transpose(0, 2, 1)[:, None]
    # order="C": NumPy would otherwise keep the transposed memory, and every minibatch would be gathered column-wise.
    x = np.divide(upright, np.float32(255), dtype=np.float32, order="C")
    return x, raw.astype(np.int64) - first
