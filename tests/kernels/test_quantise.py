"""Codes of 16 and 8 bits: against torch and NumPy, at the ends of their ranges, and their random rounding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcore import errors, kernels
from fedcore.kernels import Codes
from tests.kernels import arrays
from tests.kernels.arrays import assert_same_bits
from tests.kernels.cases import assert_as_defined

CODECS = arrays.CODECS[1:]
SPECIALS = np.float32([0, -0.0, 1, -1, 1e-45, -1e-42, 6e-8, 2.98e-8, 2.99e-8, 6.1e-5, 6.103e-5])
SPECIALS = np.append(SPECIALS, np.float32([65504, 65519.996, 65520, -65536, 3.4028235e38]))


def vector(n, seed=0):
    """Numbers of all sizes that matter to the three codecs, including subnormal ones and overflows."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=n) * 10.0 ** rng.integers(-9, 6, size=n)).astype(np.float32)


def assert_as_the_oracle(x, codec, seed=None, row=0):
    coded, _ = assert_as_defined(
        lambda: [coded := kernels.quantise(x, codec, seed=seed, row=row), kernels.dequantise(coded)]
    )
    return coded


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=130),
    codec=st.sampled_from(CODECS),
    seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    row=st.integers(0, 2**64 - 1),
)
def test_any_finite_numbers(values, codec, seed, row):
    x = np.array(values, np.float32)
    coded = assert_as_the_oracle(x, codec, seed, row)
    if codec == "int8":
        error = np.abs(kernels.dequantise(coded).astype(np.float64) - x)
        allowed = np.repeat(coded.scales.astype(np.float64), 64)[: len(x)] * (0.5001 if seed is None else 1.0001)
        assert (error <= np.maximum(allowed, 2.0**-96)).all()


def test_rounding_to_nearest_is_that_of_torch_and_numpy():
    x = np.concatenate([vector(100_000), SPECIALS, np.float32([np.inf, -np.inf])])
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x, bits[~np.isnan(bits)]])
    bf16 = torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(kernels.quantise(x, "bf16").codes, bf16)
    with np.errstate(over="ignore"):
        f16 = x.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(kernels.quantise(x, "f16").codes, f16)


def test_every_code_of_16_bits_comes_back():
    codes = np.arange(2**16).astype(np.uint16)
    with np.errstate(invalid="ignore"):  # it contains a signalling NaN, which Arm reports
        f16 = codes.view(np.float16).astype(np.float32)
    for codec, due in [("f16", f16), ("bf16", torch.from_numpy(codes).view(torch.bfloat16).float().numpy())]:
        out = kernels.dequantise(Codes(codec, codes))
        assert_same_bits(out, due)
        for seed in (None, 3):  # what needs no rounding is not changed by dither either
            again = kernels.quantise(out, codec, seed=seed).codes
            np.testing.assert_array_equal(again[~np.isnan(out)], codes[~np.isnan(out)])


@pytest.mark.parametrize("codec", ["bf16", "f16"])
@pytest.mark.parametrize("seed", [None, 5])
def test_nan_and_infinity_are_kept_in_16_bits(codec, seed):
    payloads = np.uint32([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC00000]).view(np.float32)
    x = np.concatenate([payloads, np.float32([np.inf, -np.inf])])
    out = kernels.dequantise(kernels.quantise(x, codec, seed=seed))
    assert np.isnan(out[:4]).all()
    np.testing.assert_array_equal(out[4:], x[4:])
    np.testing.assert_array_equal(np.signbit(out), np.signbit(x))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 63, 64, 199])
def test_int8_rejects_numbers_that_are_not_finite(bad, where):
    x = vector(200)
    x[where] = bad
    out = Codes("int8", np.empty(200, np.int8), np.empty(4, np.float32))
    with pytest.raises(errors.RangeError, match=f"x: .* from {where // 64 * 64} on"):
        kernels.quantise(x, "int8", out)
    np.testing.assert_array_equal(np.isfinite(out.scales), np.arange(4) != where // 64)
    assert not out.codes[where // 64 * 64 : where // 64 * 64 + 64].any()


def test_int8_at_the_ends_of_its_range():
    x = np.zeros(256, np.float32)
    x[:64] = np.finfo(np.float32).max
    x[64:128] = np.float32(2.0**-96)
    x[128:192] = np.float32(1e-38)
    for seed in (None, 1):
        out = kernels.dequantise(assert_as_the_oracle(x, "int8", seed))
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out[:128], x[:128], rtol=3e-7)
        np.testing.assert_array_equal(out[128:], 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [0.3, -0.3, 1.2345, -1e-7, 2e-5])
@pytest.mark.parametrize("by", ["element", "row", "seed"])
def test_stochastic_rounding_is_unbiased(codec, value, by):
    """The mean of 10^6 roundings lies within 5 sigma of the number."""
    count = 1_000_000 if by == "element" else 4_000
    width = 1 if by == "element" else 250
    x = np.full(count if by == "element" else width, value, np.float32)
    if codec == "int8":
        x[::64] = 7.5 if abs(value) > 1e-3 else 1e-4  # what sets the scale
    if by == "element":
        out = kernels.dequantise(kernels.quantise(x, codec, seed=11, row=4))
    else:
        seeds = [(11, i) if by == "row" else (i, 11) for i in range(count)]
        out = np.concatenate([kernels.dequantise(kernels.quantise(x, codec, seed=s, row=r)) for s, r in seeds])
        x = np.tile(x, count)
    kept = x == np.float32(value)
    out = out[kept].astype(np.float64)
    assert len(np.unique(out)) == 2
    sigma = out.std() / np.sqrt(len(out))
    assert abs(out.mean() - float(np.float32(value))) < 5 * sigma


def test_random_bits_of_rows_seeds_and_neighbours_are_uncorrelated():
    x = np.full(200_000, 0.5, np.float32)
    x[::64] = 127
    draws = [kernels.quantise(x, "int8", seed=s, row=r).codes for s, r in [(0, 0), (0, 1), (1, 0), (1, 1), (2**63, 0)]]
    draws = np.array([draw[np.arange(len(x)) % 64 != 0] for draw in draws], np.float64)
    shifted = [(a, b) for i, a in enumerate(draws) for b in draws[i + 1 :]]
    shifted += [(draws[0][lag:], draws[0][:-lag]) for lag in (1, 2, 16, 32, 4096)]
    for a, b in shifted:
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(len(a))


def test_torch_tensors_may_hold_the_codes():
    x = vector(1000)
    for codec, dtype in [
        ("bf16", torch.bfloat16),
        ("f16", torch.float16),
        ("bf16", torch.uint16),
        ("f16", torch.uint16),
    ]:
        out = Codes(codec, torch.empty(1000, dtype=dtype))
        assert kernels.quantise(torch.from_numpy(x), codec, out) is out
        np.testing.assert_array_equal(out.codes.view(torch.uint16).numpy(), kernels.quantise(x, codec).codes)
        back = torch.empty(1000)
        assert kernels.dequantise(out, back) is back
        np.testing.assert_array_equal(back.numpy(), kernels.dequantise(kernels.quantise(x, codec)))
    half = Codes("f16", np.empty(1000, np.float16))
    kernels.quantise(x, "f16", half)
    np.testing.assert_array_equal(kernels.dequantise(half), kernels.dequantise(kernels.quantise(x, "f16")))
