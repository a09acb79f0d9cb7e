import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore import errors
from fedcore.kernels import checksum_reference as reference
from fedcore.store.checksum import BLOCK, checksums

RAMP = bytes(i * i % 251 for i in range(1000))


@pytest.mark.parametrize(
    ("content", "due"),
    [
        (b"\0", 0x793AA1AF55DFFFDB),
        (b"fedcore", 0x83742E8BD6D9A58C),
        (b"\0" * 64, 0x6F6BA49B20CB1285),
        (RAMP[:64], 0xEEB25A030343CABA),
        (RAMP[:65], 0x35E3386007A57F20),
        (RAMP, 0x69751B694AFC6CD4),
    ],
)
def test_what_a_store_on_disc_relies_on(content, due):
    assert checksums(content).tolist() == [due]
    assert reference.checksum(content, BLOCK).tolist() == [due]


@given(st.binary(max_size=700), st.integers(1, 800), st.integers(0, 8))
def test_blocks_agree_with_the_reference_at_any_alignment(content, block, shift):
    shifted = memoryview(bytes(shift) + content)[shift:]
    sums = checksums(shifted, block)
    np.testing.assert_array_equal(sums, reference.checksum(content, block))
    np.testing.assert_array_equal(checksums(content, 2**63 - 1), checksums(content))
    assert sums.tolist() == [int(checksums(content[at : at + block])[0]) for at in range(0, len(content), block)]


@pytest.mark.parametrize("block", [1, 1000, 65_536, BLOCK])
def test_large_buffers_agree_with_the_reference(block):
    content = np.random.default_rng(0).bytes(3 * BLOCK // (100 if block == 1 else 1) + 17)
    np.testing.assert_array_equal(checksums(content, block), reference.checksum(content, block))


@pytest.mark.parametrize("fill", ["zeros", "ones", "random"])
def test_one_or_two_flipped_bits_and_every_truncation_change_it(fill):
    n = 88  # a full chunk and a part of one
    base = {"zeros": np.zeros(n), "ones": np.full(n, 255), "random": np.random.default_rng(1).integers(0, 256, n)}[fill]
    base, bits = base.astype(np.uint8), np.arange(8 * n)
    flips = np.zeros((8 * n, n), np.uint8)
    flips[bits, bits // 8] = 1 << bits % 8
    first, second = np.triu_indices(8 * n)  # the diagonal flips nothing
    changed = base ^ flips[first] ^ flips[second]
    once = base ^ flips
    sums = np.concatenate([checksums(changed[first != second], n), checksums(once, n), checksums(base, n)])
    assert len(np.unique(sums)) == len(sums) == 8 * n * (8 * n - 1) // 2 + 8 * n + 1
    truncated = [int(checksums(base[:length])[0]) for length in range(1, n + 1)]
    assert len(set(truncated)) == n


def test_signs_that_flip_together_do_not_cancel():
    rows = np.ones((64, 48), np.float32)
    for bit, element in enumerate([0, 1, 16, 17, 32, 33]):  # six that go through one lane
        rows[np.arange(64) >> bit & 1 == 1, element] = -1
    assert len(np.unique(checksums(rows, 4 * 48))) == 64


def test_whatever_exports_bytes(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(RAMP)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        due = checksums(RAMP)
        for buffer in (bytearray(RAMP), memoryview(RAMP), mapped, np.frombuffer(RAMP, np.float64).reshape(5, 25)):
            np.testing.assert_array_equal(checksums(buffer), due)
    for empty in (b"", np.zeros((0, 3), np.float32)):
        assert checksums(empty).shape == (0,)
        assert checksums(empty).dtype == np.uint64


@pytest.mark.parametrize("buffer", [None, [1, 2], "text", np.zeros((4, 4))[:, 1], memoryview(b"abcd")[::2]])
def test_what_is_no_run_of_bytes_is_refused(buffer):
    with pytest.raises(errors.ArrayError, match="buffer: expected contiguous bytes, "):
        checksums(buffer)


@pytest.mark.parametrize("block", [0, -1, 2**63, 1.5, "1", None])
def test_blocks_out_of_range_are_refused(block):
    with pytest.raises(errors.RangeError, match="block: expected an integer in 1"):
        checksums(b"x", block)
