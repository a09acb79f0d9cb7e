import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from fedcore.data import idx
from fedcore.errors import MissingDataError

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
CONTENT = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 4) + IMAGES.tobytes()
PACKED = gzip.compress(CONTENT, mtime=0)  # cases without the time in them have the same names in every process


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content))
    return path


def read(path: Path, content: bytes = CONTENT) -> np.ndarray:
    return idx.read(path, ndim=3, sha256=hashlib.sha256(content).hexdigest())


def test_reads_what_was_written(tmp_path: Path) -> None:
    got = read(write(tmp_path / "images.gz", CONTENT))
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, IMAGES)


def test_the_checksum_is_of_the_content_not_of_the_compressed_bytes(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(CONTENT, compresslevel=1, mtime=1))
    np.testing.assert_array_equal(read(path), IMAGES)


@pytest.mark.parametrize(
    ("content", "due"),
    [
        (b"", "unsigned bytes"),
        (b"\0\0", "unsigned bytes"),
        (b"\0\0\x0d\x03" + CONTENT[4:], "unsigned bytes"),  # 0d: floats
        (b"\1\0\x08\x03" + CONTENT[4:], "unsigned bytes"),
        (b"\0\0\x08\x01" + CONTENT[4:], "expected 3 dimensions, got 1"),
        (CONTENT[:15], "expected a header of 16 bytes, got 15"),
        (CONTENT[:-1], r"expected 24 bytes for \[2, 3, 4\], got 23"),
        (CONTENT + b"\0", r"expected 24 bytes for \[2, 3, 4\], got more"),
        (
            CONTENT[:4] + struct.pack(">3I", 2, 3, 5) + CONTENT[16:],
            r"expected 30 bytes for \[2, 3, 5\], got 24",
        ),
        (CONTENT[:4] + b"\xff" * 12 + CONTENT[16:], r"at most 1073741824 bytes .*\[4294967295, 4294967295"),
    ],
)
def test_hostile_content_is_refused(tmp_path: Path, content: bytes, due: str) -> None:
    path = write(tmp_path / "images.gz", content)
    with pytest.raises(MissingDataError, match=due) as caught:
        read(path, content)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "file",
    [
        CONTENT,  # not gzip
        b"",
        PACKED[:-3],
        PACKED[:15],
        PACKED + b"rubbish",
        PACKED[:-8] + bytes(8),  # a wrong CRC
        PACKED[:10] + b"\xff" * 20,  # no deflate stream
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, file: bytes) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(file)
    with pytest.raises(MissingDataError) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"images\.gz"):
        read(tmp_path / "images.gz")


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "images.gz", CONTENT[:-1] + b"\x16")
    with pytest.raises(MissingDataError, match="SHA-256") as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_header_that_promises_too_much_is_refused_before_anything_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idx, "LIMIT", 23)
    with pytest.raises(MissingDataError, match=r"at most 23 bytes of content, got a header that says \[2, 3, 4\]"):
        read(write(tmp_path / "images.gz", CONTENT))


def test_nothing_past_the_promised_bytes_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb: 20 kB of gzip that would unpack to 20 MB."""
    asked: list[int] = []
    unpack = gzip.GzipFile.read

    def spy(file: gzip.GzipFile, size: int = -1) -> bytes:
        asked.append(size)
        return unpack(file, size)

    monkeypatch.setattr(gzip.GzipFile, "read", spy)
    with pytest.raises(MissingDataError, match=r"expected 24 bytes .* got more"):
        read(write(tmp_path / "images.gz", CONTENT + bytes(20_000_000)))
    assert min(asked) > 0
    assert sum(asked) == 16 + 24 + 1


def test_a_hash_is_not_asked_for_where_none_is_known(tmp_path: Path) -> None:
    np.testing.assert_array_equal(idx.read(write(tmp_path / "images.gz", CONTENT), ndim=3), IMAGES)
