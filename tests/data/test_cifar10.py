import hashlib
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedcore.data import cifar10, load
from fedcore.errors import MissingDataError

FOLDER = "cifar-10-batches-bin"


def records(seed, count):
    """Records of CIFAR-10's form."""
    made = np.random.default_rng(seed).integers(0, 256, (count, 3073), np.uint8)
    made[:, 0] %= 10
    return made


def digest(made):
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(one.tobytes()).digest() for one in made))).hexdigest()


TRAIN, TEST = records(0, 20), records(1, 4)


@pytest.fixture
def small(monkeypatch):
    """CIFAR-10 with four records a file takes the place of the published one."""
    monkeypatch.setattr(cifar10, "RECORDS", 4)
    monkeypatch.setattr(cifar10, "TRAIN_SHA256", digest(TRAIN))
    monkeypatch.setattr(cifar10, "TEST_SHA256", digest(TEST))


def write(directory, train=TRAIN, test=TEST):
    directory.mkdir(parents=True)
    for number in range(5):
        (directory / f"data_batch_{number + 1}.bin").write_bytes(train[4 * number : 4 * number + 4].tobytes())
    (directory / "test_batch.bin").write_bytes(test.tobytes())
    return directory


@pytest.fixture
def directory(small, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    return write(tmp_path / "cifar-10" / FOLDER)


def test_pixels_are_planar_and_labels_lead(directory):
    dataset = load("cifar-10")
    assert dataset.train_x.shape == (20, 3, 32, 32)
    assert dataset.test_x.shape == (4, 3, 32, 32)
    order = sorted(range(20), key=lambda at: hashlib.sha256(TRAIN[at].tobytes()).digest())
    np.testing.assert_array_equal(dataset.train_y, TRAIN[order, 0])
    due = TRAIN[order[3]]
    assert dataset.train_x[3, 0, 0, 1] == np.float32(due[1 + 1]) / np.float32(255)
    assert dataset.train_x[3, 0, 1, 0] == np.float32(due[1 + 32]) / np.float32(255)
    assert dataset.train_x[3, 2, 0, 0] == np.float32(due[1 + 2048]) / np.float32(255)


def test_the_order_of_the_records_in_the_files_does_not_matter(small, tmp_path, monkeypatch):
    loaded = []
    for number, order in enumerate((np.arange(20), np.random.default_rng(2).permutation(20))):
        monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path / str(number)))
        write(tmp_path / str(number) / "cifar-10" / FOLDER, TRAIN[order], TEST[::-1])
        loaded.append(load("cifar-10"))
    np.testing.assert_array_equal(loaded[0].train_x, loaded[1].train_x)
    np.testing.assert_array_equal(loaded[0].train_y, loaded[1].train_y)


def test_standardised_colours(directory):
    plain, standard = load("cifar-10"), load("cifar-10", standardise=True)
    for colour in range(3):
        due = (plain.train_x[:, colour].astype(np.float64) - cifar10.MEAN[colour]) / cifar10.DEVIATION[colour]
        np.testing.assert_allclose(standard.train_x[:, colour], due, atol=1e-6)
    assert standard.test_x.min() < 0


@pytest.mark.parametrize(
    ("file", "change", "due"),
    [
        ("data_batch_3.bin", lambda old: old[:-1], "expected 12292 bytes, got 12291"),
        ("data_batch_3.bin", lambda old: b"", "expected 12292 bytes, got 0"),
        ("test_batch.bin", lambda old: old + b"\0", "expected 12292 bytes, got more"),
        ("test_batch.bin", lambda old: b"\x0a" + old[1:], "expected labels 0 .. 9, got 10"),
        ("test_batch.bin", lambda old: old[:-1] + bytes([old[-1] ^ 1]), "expected records with SHA-256"),
        ("data_batch_5.bin", lambda old: 4 * old[:3073], "expected records with SHA-256"),
    ],
)
def test_hostile_files_are_refused(directory, file, change, due):
    path = directory / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(MissingDataError, match=due) as caught:
        load("cifar-10")
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(directory):
    (directory / "data_batch_2.bin").unlink()
    with pytest.raises(
        MissingDataError, match=rf"expected {FOLDER}/data_batch_2\.bin in .*; unpack there {cifar10.ADDRESS}"
    ):
        load("cifar-10")


def test_downloaded(small, publisher, monkeypatch):
    archive = publisher.folder / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for number, path in enumerate([*cifar10.TRAIN, *cifar10.TEST]):
            content = (TRAIN[4 * number : 4 * number + 4] if number < 5 else TEST).tobytes()
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    monkeypatch.setattr(cifar10, "ADDRESS", publisher.address + archive.name)
    monkeypatch.setattr(cifar10, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    assert load("cifar-10").train_x.shape == (20, 3, 32, 32)


@pytest.mark.skipif(
    not Path(os.environ.get("FEDCORE_DATA_DIR", ""), "cifar-10", FOLDER).is_dir(),
    reason="FEDCORE_DATA_DIR does not say where CIFAR-10 in its binary layout is",
)
def test_the_real_data():
    dataset = load("cifar-10")
    assert np.bincount(dataset.train_y).tolist() == [5000] * 10
    assert np.bincount(dataset.test_y).tolist() == [1000] * 10
    np.testing.assert_allclose(dataset.train_x.mean((0, 2, 3), dtype=np.float64), cifar10.MEAN, atol=1e-7)
    np.testing.assert_allclose(dataset.train_x.std((0, 2, 3), dtype=np.float64), cifar10.DEVIATION, atol=1e-7)
