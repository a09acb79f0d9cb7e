"""MNIST and Fashion-MNIST, from a directory or from their publishers.

The content is what counts: its SHA-256 is verified at every load, wherever the file came from.
"""

from pathlib import Path

import numpy as np

from fedcore.data import files, idx
from fedcore.data.dataset import Dataset

ADDRESSES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}

# Of the decompressed content.
SHA256 = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
}


def find(name: str) -> list[Path]:
    """The four files, as ``files.find`` finds or downloads them."""
    return files.find(name, list(SHA256[name]), ADDRESSES[name])


def load(name: str) -> Dataset:
    """MNIST or Fashion-MNIST: pixels / 255 as float32[m, 1, 28, 28], 60,000 and 10,000 examples, 10 classes.

    The four files are read from ``$FEDCORE_DATA_DIR/<name>``; without that variable they are downloaded once,
    into pooch's cache.

    Args:
        name: "mnist" or "fashion-mnist".

    Raises:
        MissingDataError: a file is not there, cannot be downloaded, or its content is not what was published.
        MissingDependencyError: a download is due and pooch is not installed.

    Cost: 220 MB of memory.

    Reference: Y. LeCun, C. Cortes, C. Burges, "The MNIST database", 1998; H. Xiao, K. Rasul, R. Vollgraf,
    "Fashion-MNIST", arXiv 1708.07747, 2017.
    """
    hashes = SHA256[name]
    arrays = [
        idx.read(path, ndim=3 if "idx3" in file else 1, sha256=sha256)
        for path, (file, sha256) in zip(find(name), hashes.items(), strict=True)
    ]
    train_x, test_x = (np.divide(x[:, None], np.float32(255), dtype=np.float32) for x in arrays[::2])
    train_y, test_y = (y.astype(np.int64) for y in arrays[1::2])
    return Dataset(name, train_x, train_y, test_x, test_y, classes=10)
