import gzip
import hashlib
import struct
import zipfile

import numpy as np
import pytest

from fedcore.data import emnist, load
from fedcore.errors import MissingDataError

SIZES = {"train": 6, "test": 3}


def images(part):
    return np.random.default_rng(SIZES[part]).integers(0, 256, (SIZES[part], 28, 28), np.uint8)


def idx3(array):
    return b"\0\0\x08\x03" + struct.pack(">3I", *array.shape) + array.tobytes()


def idx1(labels):
    return b"\0\0\x08\x01" + struct.pack(">I", len(labels)) + bytes(labels)


def labels(split, part):
    """The lowest and the highest label of a split, and some between."""
    first = 1 if split == "letters" else 0
    return [first, first + emnist.CLASSES[split] - 1, *range(first + 1, first + 5)][: SIZES[part]]


def made(split):
    """The four files of a split, by their names."""
    return {
        f"emnist-{split}-{part}-{kind}-ubyte.gz": gzip.compress(content)
        for part in SIZES
        for kind, content in (("images-idx3", idx3(images(part))), ("labels-idx1", idx1(labels(split, part))))
    }


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    folder = tmp_path / "emnist" / "gzip"
    folder.mkdir(parents=True)
    for split in emnist.CLASSES:
        for name, content in made(split).items():
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("split", emnist.CLASSES)
def test_a_split(directory, split):
    dataset = load(f"emnist-{split}")
    assert (dataset.name, dataset.classes) == (f"emnist-{split}", emnist.CLASSES[split])
    due = images("train")[2].T / np.float32(255)  # the publisher's images are transposed
    np.testing.assert_array_equal(dataset.train_x[2, 0], due)
    assert dataset.train_x.flags.c_contiguous
    assert dataset.test_x.shape == (3, 1, 28, 28)
    assert (dataset.test_y.min(), dataset.test_y.max()) == (0, dataset.classes - 1)


def test_all_missing_files_are_named_with_where_to_get_them(directory):
    for path in directory.glob("emnist-bymerge-test-*"):
        path.unlink()
    with pytest.raises(MissingDataError) as caught:
        load("emnist-bymerge")
    for part in (
        "gzip/emnist-bymerge-test-images-idx3-ubyte.gz",
        "gzip/emnist-bymerge-test-labels-idx1-ubyte.gz",
        emnist.ADDRESS,
        str(directory.parent),
    ):
        assert part in str(caught.value)
    assert "train" not in str(caught.value)


@pytest.mark.parametrize(
    ("split", "kind", "content", "due"),
    [
        ("digits", "images-idx3", idx3(images("train")[:, :27]), r"images of 28 x 28, got \[6, 27, 28\]"),
        ("digits", "images-idx3", idx3(images("train")[:0]), r"images of 28 x 28, got \[0, 28, 28\]"),
        ("digits", "images-idx3", idx3(images("train"))[:-5], r"expected 4704 bytes for \[6, 28, 28\], got 4699"),
        ("digits", "images-idx3", idx1(range(6)), "expected 3 dimensions, got 1"),
        ("digits", "images-idx3", b"\0\0\x08\x03" + struct.pack(">3I", 2**31, 28, 28), "expected at most"),
        ("digits", "labels-idx1", idx1([1, 2, 3, 4, 5]), "expected 6 labels, one for each image, got 5"),
        ("digits", "labels-idx1", idx1([1, 2, 3, 4, 5, 10]), "expected labels 0 .. 9, got 1 .. 10"),
        ("letters", "labels-idx1", idx1([0, 2, 3, 4, 5, 6]), "expected labels 1 .. 26, got 0 .. 6"),
        ("bymerge", "labels-idx1", idx1([0, 2, 3, 4, 5, 47]), "expected labels 0 .. 46, got 0 .. 47"),
    ],
)
def test_hostile_files_are_refused(directory, split, kind, content, due):
    path = directory / f"emnist-{split}-train-{kind}-ubyte.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(MissingDataError, match=due) as caught:
        load(f"emnist-{split}")
    assert str(path) in str(caught.value)


def test_downloaded(publisher, monkeypatch):
    archive = publisher.folder / "gzip.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for split in ("letters", "digits"):
            for name, content in made(split).items():
                packed.writestr(f"gzip/{name}", content)
    monkeypatch.setattr(emnist, "ADDRESS", publisher.address + archive.name)
    monkeypatch.setattr(emnist, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    assert load("emnist-letters").train_y.tolist() == [0, 25, 1, 2, 3, 4]
    assert load("emnist-digits").train_y.tolist() == [0, 9, 1, 2, 3, 4]
    assert publisher.asked == ["/gzip.zip"]
