"""Published data sets: files in a directory or from a publisher, their readers, and malformed content."""

import gzip
import hashlib
import io
import os
import struct
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedcore.errors import MissingDataError, MissingDependencyError, UnknownNameError
from fedcore.sim.data import REGISTRY, datasets, load
from fedcore.sim.data.datasets import PUBLISHED, Published, find_files, read_idx


def publish(monkeypatch, name, **changes):
    """Change the table's row of a data set; return the row."""
    row = replace(PUBLISHED[name], **changes)
    monkeypatch.setitem(PUBLISHED, name, row)
    return row


def write_archive(path, contents):
    """Write files by name as a zip or a tar.gz; return its MD5."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as packed:
            for name, content in contents.items():
                packed.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz") as packed:
            for name, content in contents.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                packed.addfile(entry, io.BytesIO(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def idx(array):
    """An array as the content of an IDX file."""
    return b"\0\0\x08" + struct.pack(f">B{array.ndim}I", array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


# The registry


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match=r"^data: .* did you mean 'mnist'"):
        load("minst")


FOLDERS = {"mnist": "mnist", "fashion-mnist": "fashion-mnist", "cifar-10": "cifar-10/cifar-10-batches-bin"}


@pytest.mark.parametrize("name", ["digits", "synthetic", "synthetic-iid", *FOLDERS])
def test_the_registry_describes_the_data(name):
    if name in FOLDERS and not Path(os.environ.get("FEDCORE_DATA_DIR") or "nowhere", FOLDERS[name]).exists():
        pytest.skip(f"FEDCORE_DATA_DIR has no {FOLDERS[name]}")
    options = {"alpha": 1.0, "beta": 1.0} if name == "synthetic" else {}
    dataset = load(name, clients=2, seed=0, **options)
    source = REGISTRY[name]
    assert (dataset.name, dataset.train_x.shape[1:], dataset.classes) == (name, source.shape, source.classes)
    assert (dataset.parts is not None) == source.generated


def test_digits():
    from sklearn.datasets import load_digits

    digits, again, raw = load("digits"), load("digits"), load_digits()
    assert (digits.train_x.shape, digits.test_x.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert digits.train_x.dtype == np.float32
    assert (digits.train_x.min(), digits.train_x.max()) == (0, 1)
    assert (np.bincount(digits.test_y, minlength=10) > 20).all()
    x = np.concatenate([digits.train_x, digits.test_x]).reshape(1797, 64)
    rows = np.column_stack([x * 16, np.concatenate([digits.train_y, digits.test_y])])
    expected = np.column_stack([raw.data, raw.target])
    np.testing.assert_array_equal(rows[np.lexsort(rows.T)], expected[np.lexsort(expected.T)])
    np.testing.assert_array_equal(digits.test_x, again.test_x)
    assert digits.test_y[:12].tolist() == [1, 8, 2, 6, 2, 0, 0, 1, 1, 2, 9, 4]


# Files and downloads.

CONTENT = {"in/a.bin": b"first", "in/b.bin": b"second"}


@pytest.fixture
def find(monkeypatch):
    """Find files of a data set of this folder, address and MD5."""

    def found(files, address, md5=None):
        monkeypatch.setitem(PUBLISHED, "set", Published("set", address, "", tuple(files), md5=md5))
        return find_files("set")

    return found


def test_files_in_a_directory_are_found_and_nothing_is_downloaded(find, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    (tmp_path / "set" / "in").mkdir(parents=True)
    for name in CONTENT:
        (tmp_path / "set" / name).touch()
    expected = [tmp_path / "set" / "in" / "b.bin", tmp_path / "set" / "in" / "a.bin"]
    assert find(["in/b.bin", "in/a.bin"], "http://nowhere.invalid/") == expected


@pytest.mark.parametrize(("md5", "how"), [(None, "download them from {}"), ("0" * 32, "unpack {} there")])
def test_every_missing_file_is_named_with_its_address(find, tmp_path, monkeypatch, md5, how):
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "b").touch()
    with pytest.raises(MissingDataError) as caught:
        find(["a", "b", "c"], "http://nowhere.invalid/x.zip", md5)
    assert str(caught.value) == (
        f"set: expected a, c in {tmp_path / 'set'}; {how.format('http://nowhere.invalid/x.zip')}, "
        "or unset FEDCORE_DATA_DIR to download the files automatically"
    )


def test_single_files_are_downloaded_once(find, publisher):
    (publisher.folder / "a").write_bytes(b"a")
    for _ in range(2):
        (path,) = find(["a"], publisher.address)
        assert path.read_bytes() == b"a"
        assert path.parent == publisher.cache / "set"
    assert publisher.requests == ["/a"]


@pytest.mark.parametrize("name", ["all.zip", "all.tar.gz"])
def test_an_archive_is_downloaded_once_and_only_the_files_of_the_table_are_unpacked(find, publisher, name):
    md5 = write_archive(publisher.folder / name, CONTENT)
    (first,) = find(["in/a.bin"], publisher.address + name, md5)
    assert first.read_bytes() == b"first"
    assert [path.name for path in first.parent.iterdir()] == ["a.bin"]  # No temporary file is left.
    first.write_bytes(b"unpacked already")
    both = find(["in/b.bin", "in/a.bin"], publisher.address + name, md5)
    assert [path.read_bytes() for path in both] == [b"second", b"unpacked already"]
    assert publisher.requests == [f"/{name}"]


def test_an_archive_with_another_hash_is_rejected(find, publisher):
    write_archive(publisher.folder / "all.zip", CONTENT)
    with pytest.raises(MissingDataError, match=r"in/a\.bin could not be downloaded.*hash.*FEDCORE_DATA_DIR"):
        find(["in/a.bin"], publisher.address + "all.zip", "0" * 32)
    assert not list(publisher.cache.rglob("a.bin"))


@pytest.mark.parametrize("md5", [None, "0" * 32])
def test_a_failed_download_names_the_files_and_the_address(find, publisher, md5):
    with pytest.raises(MissingDataError, match=f"set: a could not be downloaded from {publisher.address}"):
        find(["a"], publisher.address + ("all.zip" if md5 else ""), md5)


def test_without_pooch_the_error_has_the_command_to_install_it(find, monkeypatch):
    monkeypatch.delenv("FEDCORE_DATA_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(MissingDependencyError, match=r"needs pooch.*fedcore-fl\[sim\].*FEDCORE_DATA_DIR"):
        find(["a"], "http://nowhere.invalid/")


# The reader of IDX files

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
PLAIN = idx(IMAGES)
PACKED = gzip.compress(PLAIN, mtime=0)  # Without the time, test ids are the same in every process.


def packed(path, content, **how):
    path.write_bytes(gzip.compress(content, **how))
    return path


def read(path, content=PLAIN):
    return read_idx(path, ndim=3, sha256=hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("how", [{}, {"compresslevel": 1, "mtime": 1}])
def test_the_digest_is_of_the_decompressed_content(tmp_path, how):
    got = read(packed(tmp_path / "images.gz", PLAIN, **how))
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, IMAGES)
    np.testing.assert_array_equal(read_idx(tmp_path / "images.gz", ndim=3), IMAGES)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "unsigned bytes"),
        (b"\0\0", "unsigned bytes"),
        (b"\0\0\x0d\x03" + PLAIN[4:], "unsigned bytes"),  # 0d: floats
        (b"\1\0\x08\x03" + PLAIN[4:], "unsigned bytes"),
        (b"\0\0\x08\x01" + PLAIN[4:], "3 dimensions, got 1"),
        (PLAIN[:15], "expected a header of 16 bytes, got 15"),
        (PLAIN[:-1], r"expected 24 bytes for \[2, 3, 4\], got 23"),
        (PLAIN + b"\0", r"expected 24 bytes for \[2, 3, 4\], got more"),
        (PLAIN[:4] + struct.pack(">3I", 2, 3, 5) + PLAIN[16:], r"expected 30 bytes for \[2, 3, 5\], got 24"),
        (PLAIN[:4] + b"\xff" * 12 + PLAIN[16:], r"at most 1073741824 bytes .*\[4294967295, 4294967295"),
    ],
)
def test_malformed_idx_content_is_rejected(tmp_path, content, expected):
    path = packed(tmp_path / "images.gz", content)
    with pytest.raises(MissingDataError, match=expected) as caught:
        read(path, content)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "file",
    [
        PLAIN,  # not gzip
        b"",
        PACKED[:-3],
        PACKED[:15],
        PACKED + b"rubbish",
        PACKED[:-8] + bytes(8),  # a wrong CRC
        PACKED[:10] + b"\xff" * 20,  # no deflate stream
        gzip.compress(PLAIN[:-1] + b"\x16", mtime=0),  # a flipped bit
        None,
    ],
)
def test_malformed_gzip_files_are_rejected(tmp_path, file):
    path = tmp_path / "images.gz"
    if file is not None:
        path.write_bytes(file)
    with pytest.raises(MissingDataError) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_too_large_a_header_is_rejected_before_decompression(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "LIMIT", 23)
    with pytest.raises(MissingDataError, match=r"at most 23 bytes of content, got a header of \[2, 3, 4\]"):
        read(packed(tmp_path / "images.gz", PLAIN))


def test_nothing_after_the_content_is_decompressed(tmp_path, monkeypatch):
    """A gzip bomb: 20 kB that would unpack to 20 MB."""
    requests, unpack = [], gzip.GzipFile.read

    def spy(file, size=-1):
        requests.append(size)
        return unpack(file, size)

    monkeypatch.setattr(gzip.GzipFile, "read", spy)
    with pytest.raises(MissingDataError, match=r"expected 24 bytes .* got more"):
        read(packed(tmp_path / "images.gz", PLAIN + bytes(20_000_000)))
    assert min(requests) > 0
    assert sum(requests) == 16 + 24 + 1


# MNIST and its relatives

SIZES = {"train": 6, "test": 3}
SPLITS = {name: row for name, row in PUBLISHED.items() if row.folder == "emnist"}
WITH_IDX = {name: row for name, row in PUBLISHED.items() if name != "cifar-10"}


def images(part):
    return np.random.default_rng(SIZES[part]).integers(0, 256, (SIZES[part], 28, 28), np.uint8)


def labels(name, part):
    """The lowest and the highest label, and some between them."""
    first = PUBLISHED[name].first
    return [first, first + PUBLISHED[name].classes - 1, *range(first + 1, first + 5)][: SIZES[part]]


def idx_files(name):
    """The contents of a data set's four files, by their paths."""
    contents = [idx(content) for part in SIZES for content in (images(part), np.array(labels(name, part)))]
    return dict(zip(PUBLISHED[name].files, contents, strict=True))


def publish_idx(monkeypatch, name, **changes):
    """Replace the published digests by those of the generated files."""
    if PUBLISHED[name].digests:
        changes["digests"] = tuple(hashlib.sha256(content).hexdigest() for content in idx_files(name).values())
    return publish(monkeypatch, name, **changes)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Generated files of all data sets in FEDCORE_DATA_DIR."""
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    for name in WITH_IDX:
        publish_idx(monkeypatch, name)
        for file, content in idx_files(name).items():
            path = tmp_path / PUBLISHED[name].folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            packed(path, content)
    return tmp_path


@pytest.mark.parametrize("name", WITH_IDX)
def test_images_are_upright_and_labels_count_from_0(directory, name):
    dataset = load(name)
    assert (dataset.name, dataset.classes) == (name, WITH_IDX[name].classes)
    expected = images("train") / np.float32(255)
    np.testing.assert_array_equal(dataset.train_x[:, 0], expected.transpose(0, 2, 1) if name in SPLITS else expected)
    assert dataset.train_x.flags.c_contiguous
    assert dataset.test_x.shape == (3, 1, 28, 28)
    assert (dataset.test_y.min(), dataset.test_y.max()) == (0, dataset.classes - 1)


@pytest.mark.parametrize(
    ("split", "file", "content", "expected"),
    [
        ("digits", 0, idx(images("train")[:, :27]), r"images of 28 x 28, got \[6, 27, 28\]"),
        ("digits", 0, idx(images("train")[:0]), r"images of 28 x 28, got \[0, 28, 28\]"),
        ("digits", 0, idx(images("train"))[:-5], r"expected 4704 bytes for \[6, 28, 28\], got 4699"),
        ("digits", 0, idx(np.arange(6)), "expected 3 dimensions, got 1"),
        ("digits", 0, b"\0\0\x08\x03" + struct.pack(">3I", 2**31, 28, 28), "expected at most"),
        ("digits", 1, idx(np.array([1, 2, 3, 4, 5])), "expected 6 labels, one for each image, got 5"),
        ("digits", 1, idx(np.array([1, 2, 3, 4, 5, 10])), "expected labels 0 .. 9, got 1 .. 10"),
        ("letters", 1, idx(np.array([0, 2, 3, 4, 5, 6])), "expected labels 1 .. 26, got 0 .. 6"),
        ("bymerge", 1, idx(np.array([0, 2, 3, 4, 5, 47])), "expected labels 0 .. 46, got 0 .. 47"),
    ],
)
def test_malformed_files_of_emnist_are_rejected(directory, split, file, content, expected):
    path = packed(directory / "emnist" / PUBLISHED[f"emnist-{split}"].files[file], content)
    with pytest.raises(MissingDataError, match=expected) as caught:
        load(f"emnist-{split}")
    assert str(path) in str(caught.value)


def test_content_with_another_digest_is_rejected(directory):
    path = directory / "mnist" / PUBLISHED["mnist"].files[3]
    packed(path, idx(np.array([0, 9, 2])))
    with pytest.raises(MissingDataError, match="SHA-256") as caught:
        load("mnist")
    assert str(path) in str(caught.value)


def test_mnist_is_downloaded_once_and_verified(publisher, monkeypatch):
    row = publish_idx(monkeypatch, "mnist", address=publisher.address)
    for file, content in idx_files("mnist").items():
        packed(publisher.folder / file, content)
    for _ in range(2):
        assert load("mnist").train_y.tolist() == [0, 9, 1, 2, 3, 4]
    assert sorted(publisher.requests) == sorted(f"/{file}" for file in row.files)
    assert len(list((publisher.cache / "mnist").iterdir())) == 4
    packed(publisher.cache / "mnist" / row.files[1], idx(np.array([0, 9, 1, 2, 3, 5])))
    with pytest.raises(MissingDataError, match="SHA-256"):
        load("mnist")


def test_emnist_is_downloaded(publisher, monkeypatch):
    archive = publisher.folder / "gzip.zip"
    contents = {
        file: gzip.compress(content)
        for name in ("emnist-letters", "emnist-digits")
        for file, content in idx_files(name).items()
    }
    md5 = write_archive(archive, contents)
    for name in ("emnist-letters", "emnist-digits"):
        publish(monkeypatch, name, address=publisher.address + archive.name, md5=md5)
    assert load("emnist-letters").train_y.tolist() == [0, 25, 1, 2, 3, 4]
    assert load("emnist-digits").train_y.tolist() == [0, 9, 1, 2, 3, 4]
    assert publisher.requests == ["/gzip.zip"]


@pytest.mark.skipif("FEDCORE_DATA_DIR" not in os.environ, reason="FEDCORE_DATA_DIR is not set")
@pytest.mark.parametrize(("name", "mean", "std"), [("mnist", 0.13066, 0.30811), ("fashion-mnist", 0.28604, 0.35302)])
def test_the_real_mnist(name, mean, std):
    dataset = load(name)
    assert dataset.train_x.shape == (60000, 1, 28, 28)
    assert dataset.test_x.shape == (10000, 1, 28, 28)
    assert dataset.train_x.mean(dtype=np.float64) == pytest.approx(mean, abs=5e-6)
    assert dataset.train_x.std(dtype=np.float64) == pytest.approx(std, abs=5e-6)
    assert np.bincount(dataset.test_y).sum() == 10000


# CIFAR-10

FOLDER = "cifar-10-batches-bin"


def records(seed, count):
    """Records of CIFAR-10's form."""
    records = np.random.default_rng(seed).integers(0, 256, (count, 3073), np.uint8)
    records[:, 0] %= 10
    return records


def digest(records):
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(one.tobytes()).digest() for one in records))).hexdigest()


TRAIN, TEST = records(0, 20), records(1, 4)


@pytest.fixture
def small(monkeypatch):
    """CIFAR-10 with four records in each file."""
    monkeypatch.setattr(datasets, "CIFAR_RECORDS", 4)
    publish(monkeypatch, "cifar-10", digests=(digest(TRAIN), digest(TEST)))


def cifar_files(train=TRAIN, test=TEST):
    contents = [*(train[4 * k : 4 * k + 4].tobytes() for k in range(5)), test.tobytes()]
    return dict(zip(PUBLISHED["cifar-10"].files, contents, strict=True))


def write_cifar(folder, **records):
    (folder / "cifar-10" / FOLDER).mkdir(parents=True)
    for file, content in cifar_files(**records).items():
        (folder / "cifar-10" / file).write_bytes(content)
    return folder / "cifar-10" / FOLDER


@pytest.fixture
def cifar(small, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    return write_cifar(tmp_path)


def test_pixels_are_planar_and_labels_lead(cifar):
    dataset = load("cifar-10")
    assert dataset.train_x.shape == (20, 3, 32, 32)
    assert dataset.test_x.shape == (4, 3, 32, 32)
    order = sorted(range(20), key=lambda at: hashlib.sha256(TRAIN[at].tobytes()).digest())
    np.testing.assert_array_equal(dataset.train_y, TRAIN[order, 0])
    expected = TRAIN[order[3]]
    assert dataset.train_x[3, 0, 0, 1] == np.float32(expected[1 + 1]) / np.float32(255)
    assert dataset.train_x[3, 0, 1, 0] == np.float32(expected[1 + 32]) / np.float32(255)
    assert dataset.train_x[3, 2, 0, 0] == np.float32(expected[1 + 2048]) / np.float32(255)


def test_the_order_of_the_records_in_the_files_does_not_matter(small, tmp_path, monkeypatch):
    loaded = []
    for number, order in enumerate((np.arange(20), np.random.default_rng(2).permutation(20))):
        monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path / str(number)))
        write_cifar(tmp_path / str(number), train=TRAIN[order], test=TEST[::-1])
        loaded.append(load("cifar-10"))
    np.testing.assert_array_equal(loaded[0].train_x, loaded[1].train_x)
    np.testing.assert_array_equal(loaded[0].train_y, loaded[1].train_y)


def test_standardised_colours(cifar):
    plain, standard = load("cifar-10"), load("cifar-10", standardise=True)
    for colour in range(3):
        centred = plain.train_x[:, colour].astype(np.float64) - datasets.CIFAR_MEAN[colour]
        expected = centred / datasets.CIFAR_DEVIATION[colour]
        np.testing.assert_allclose(standard.train_x[:, colour], expected, atol=1e-6)
    assert standard.test_x.min() < 0


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        ("data_batch_3.bin", lambda old: old[:-1], "expected 12292 bytes, got 12291"),
        ("data_batch_3.bin", lambda old: b"", "expected 12292 bytes, got 0"),
        ("test_batch.bin", lambda old: old + b"\0", "expected 12292 bytes, got more"),
        ("test_batch.bin", lambda old: b"\x0a" + old[1:], "expected labels 0 .. 9, got 10"),
        ("test_batch.bin", lambda old: old[:-1] + bytes([old[-1] ^ 1]), "expected records with SHA-256"),
        ("data_batch_5.bin", lambda old: 4 * old[:3073], "expected records with SHA-256"),
    ],
)
def test_malformed_files_of_cifar_are_rejected(cifar, file, change, expected):
    path = cifar / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(MissingDataError, match=expected) as caught:
        load("cifar-10")
    assert str(path) in str(caught.value)


def test_cifar_is_downloaded(small, publisher, monkeypatch):
    archive = publisher.folder / "cifar.tar.gz"
    md5 = write_archive(archive, cifar_files())
    publish(monkeypatch, "cifar-10", address=publisher.address + archive.name, md5=md5)
    assert load("cifar-10").train_x.shape == (20, 3, 32, 32)


@pytest.mark.skipif(
    not Path(os.environ.get("FEDCORE_DATA_DIR", ""), "cifar-10", FOLDER).is_dir(),
    reason="FEDCORE_DATA_DIR has no CIFAR-10 in its binary layout",
)
def test_the_real_cifar():
    dataset = load("cifar-10")
    assert np.bincount(dataset.train_y).tolist() == [5000] * 10
    assert np.bincount(dataset.test_y).tolist() == [1000] * 10
    np.testing.assert_allclose(dataset.train_x.mean((0, 2, 3), dtype=np.float64), datasets.CIFAR_MEAN, atol=1e-7)
    np.testing.assert_allclose(dataset.train_x.std((0, 2, 3), dtype=np.float64), datasets.CIFAR_DEVIATION, atol=1e-7)
