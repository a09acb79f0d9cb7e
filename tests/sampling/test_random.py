"""The counter-based generator against the published vectors, and the functions of its words."""

import re
from pathlib import Path

import numpy as np
import pytest

import fedcore
from fedcore import _core
from fedcore.runtime import tag
from tests import oracle

CSRC = Path(fedcore.errors.__file__).parent.parent / "csrc"
ONES = 2**64 - 1
PI = [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89]
PI_KEY = [0x452821E638D01377, 0xBE5466CF34E90C6C, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD]
# kat_vectors of Random123 (Salmon et al. 2011), threefry4x64 with 20 rounds: counter, key, result
KNOWN = [
    ([0] * 4, [0] * 4, [0x09218EBDE6C85537, 0x55941F5266D86105, 0x4BD25E16282434DC, 0xEE29EC846BD2E40B]),
    ([ONES] * 4, [ONES] * 4, [0x29C24097942BBA1B, 0x0371BBFB0F6F4E11, 0x3C231FFA33F83A1C, 0xCD29113FDE32D168]),
    (PI, PI_KEY, [0xA7E8FDE591651BD9, 0xBAAFD0C30138319B, 0x84A5C1A729E685B9, 0x901D406CCEBC1BA4]),
]
NATIVE_AND_ORACLE = pytest.mark.parametrize("implementation", [_core, oracle], ids=["native", "oracle"])


@NATIVE_AND_ORACLE
@pytest.mark.parametrize(("counter", "key", "due"), KNOWN)
def test_known_answers(implementation, counter, key, due):
    assert implementation.random_words(key, counter[1:], counter[0], 1).tolist() == due


@NATIVE_AND_ORACLE
@pytest.mark.parametrize("blocks", [0, 1, 3, 4, 7, 8, 9, 16, 33])
def test_a_block_does_not_depend_on_those_around_it(implementation, blocks):
    key, use, first = [1, 2, 3, 4], [5, 6, 7], ONES - 3  # the counter passes 2^64
    words = implementation.random_words(key, use, first, blocks)
    assert words.dtype == np.uint64
    single = [implementation.random_words(key, use, (first + i) % 2**64, 1) for i in range(blocks)]
    np.testing.assert_array_equal(words, np.concatenate([*single, np.empty(0, np.uint64)]))


def test_native_words_are_the_oracles():
    rng = np.random.default_rng(0)
    for blocks in (1, 2, 8, 15, 100):
        key = rng.integers(0, 2**64, 4, np.uint64).tolist()
        use = rng.integers(0, 2**64, 3, np.uint64).tolist()
        first = int(rng.integers(0, 2**64, dtype=np.uint64))
        native = _core.random_words(key, use, first, blocks)
        np.testing.assert_array_equal(native, oracle.random_words(key, use, first, blocks))


def test_every_word_of_the_key_and_of_the_use_matters():
    streams = {tuple(_core.random_words([0] * 4, [0] * 3, 0, 1).tolist())}
    for i in range(4):
        streams.add(tuple(_core.random_words([int(i == j) for j in range(4)], [0] * 3, 0, 1).tolist()))
    for i in range(3):
        streams.add(tuple(_core.random_words([0] * 4, [int(i == j) for j in range(3)], 0, 1).tolist()))
    assert len({word for stream in streams for word in stream}) == 32


def test_a_purpose_s_tag_is_fixed():
    assert tag("cohort") == 0x9487C0C05D3A00D7
    assert 0 <= tag("") < 2**64


def test_bits_are_even_and_uncorrelated():
    words = _core.random_words([1, 2, 3, 4], [0, 0, 0], 0, 2**14)
    bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 64).astype(np.float64) - 0.5
    spread = 0.5 / np.sqrt(len(bits))
    assert np.abs(bits.mean(axis=0)).max() < 5 * spread
    products = bits.T @ bits / len(bits)
    assert np.abs(products - np.diag(np.diag(products))).max() < 5.5 * 0.25 / np.sqrt(len(bits))


def test_units_are_multiples_below_one():
    words = np.array([0, 2**11 - 1, 2**11, ONES], np.uint64)
    assert oracle.unit(words).tolist() == [0.0, 0.0, 2.0**-53, 1 - 2.0**-53]


def test_no_draw_calls_libm():
    files = [*(CSRC / "sampling").iterdir(), *(CSRC / "base").glob("random*")]
    assert len(files) >= 10
    for file in files:
        code = re.sub(r"//.*", "", file.read_text())
        called = re.findall(r"<cmath>|<math.h>|\b(?:log|log2|log1p|exp|exp2|expm1|pow|sqrt|sin|cos)f?\(", code)
        assert not called, f"{file}: {called}"
