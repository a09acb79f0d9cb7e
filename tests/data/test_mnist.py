import gzip
import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcore.data import load, mnist
from fedcore.errors import MissingDataError

SIZES = {"train": 5, "t10k": 2}


def made_up(file: str) -> bytes:
    """A small file of MNIST's form."""
    count = SIZES[file.split("-")[0]]
    if "idx3" in file:
        body = np.arange(count * 6, dtype=np.uint8) * 7
        return b"\0\0\x08\x03" + struct.pack(">3I", count, 2, 3) + body.tobytes()
    return b"\0\0\x08\x01" + struct.pack(">I", count) + bytes(range(count))


def write(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the made-up files of MNIST, which take the place of the published ones."""
    directory.mkdir(parents=True, exist_ok=True)
    files = mnist.SHA256["mnist"]
    for file in files:
        (directory / file).write_bytes(gzip.compress(made_up(file)))
    hashes = {file: hashlib.sha256(made_up(file)).hexdigest() for file in files}
    monkeypatch.setitem(mnist.SHA256, "mnist", hashes)
    return directory


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The made-up files where FEDCORE_DATA_DIR says."""
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    return write(tmp_path / "mnist", monkeypatch)


@pytest.fixture
def published(publisher: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The made-up files at a publisher's."""
    monkeypatch.setitem(mnist.ADDRESSES, "mnist", publisher.address)
    return write(publisher.folder, monkeypatch)


def check(dataset: mnist.Dataset) -> None:
    assert dataset.train_x.shape == (5, 1, 2, 3)
    assert dataset.test_x.shape == (2, 1, 2, 3)
    np.testing.assert_array_equal(dataset.train_x.ravel(), (np.arange(30) * 7 / 255).astype(np.float32))
    np.testing.assert_array_equal(dataset.train_y, np.arange(5))
    np.testing.assert_array_equal(dataset.test_y, np.arange(2))


def test_from_a_directory(directory: Path) -> None:
    check(load("mnist"))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_a_directory_without_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    with pytest.raises(MissingDataError) as caught:
        load(name)
    for part in ("train-images-idx3-ubyte.gz", str(tmp_path / name), mnist.ADDRESSES[name], "FEDCORE_DATA_DIR"):
        assert part in str(caught.value)


def test_other_content_than_the_published_one(directory: Path) -> None:
    file = directory / "t10k-labels-idx1-ubyte.gz"
    file.write_bytes(gzip.compress(made_up(file.name)[:-1] + b"\x09"))
    with pytest.raises(MissingDataError, match="SHA-256") as caught:
        load("mnist")
    assert str(file) in str(caught.value)


def test_downloaded_once_into_the_cache(publisher: Any, published: Path) -> None:
    check(load("mnist"))
    assert sorted(publisher.asked) == sorted(f"/{file}" for file in mnist.SHA256["mnist"])
    assert len(list((publisher.cache / "mnist").iterdir())) == 4
    check(load("mnist"))
    assert len(publisher.asked) == 4


def test_a_download_with_other_content(published: Path) -> None:
    file = published / "train-labels-idx1-ubyte.gz"
    file.write_bytes(gzip.compress(made_up(file.name)[:-1] + b"\x09"))
    with pytest.raises(MissingDataError, match="SHA-256"):
        load("mnist")


@pytest.mark.skipif("FEDCORE_DATA_DIR" not in os.environ, reason="FEDCORE_DATA_DIR does not say where the data is")
@pytest.mark.parametrize(("name", "mean", "std"), [("mnist", 0.13066, 0.30811), ("fashion-mnist", 0.28604, 0.35302)])
def test_the_real_data(name: str, mean: float, std: float) -> None:
    dataset = load(name)
    assert dataset.train_x.shape == (60000, 1, 28, 28)
    assert dataset.test_x.shape == (10000, 1, 28, 28)
    assert dataset.train_x.mean(dtype=np.float64) == pytest.approx(mean, abs=5e-6)
    assert dataset.train_x.std(dtype=np.float64) == pytest.approx(std, abs=5e-6)
    assert np.bincount(dataset.test_y).sum() == 10000
