"""Quantising and dequantising a row of 8 M float32 numbers, to the nearest code and stochastically."""

import numpy as np
import pytest

import fedcore
from bench.alone import Work
from bench.probe import read_floor
from bench.rivals import quantise as theirs
from fedcore import kernels

N = 8_388_608
TORCH = {
    ("bf16", None): ("torch half.copy_(x)", theirs.torch_bf16),
    ("f16", None): ("torch half.copy_(x)", theirs.torch_f16),
    ("int8", None): ("torch: amax, div, round, clamp, copy_", theirs.torch_int8),
    ("int8", 1): ("torch: amax, div, noise, floor, clamp, copy_", theirs.torch_int8_stochastic),
}
TORCH_BACK = {
    "bf16": ("torch x.copy_(half)", theirs.torch_from_bf16),
    "f16": ("torch x.copy_(half)", theirs.torch_from_f16),
    "int8": ("torch mul(codes, scales)", theirs.torch_from_int8),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("codec", ["bf16", "f16", "int8"])
def bench_quantise(versus, codec, seed):
    work = Work(theirs.row, N)
    [x] = work.arrays
    out, parts = kernels.quantise(x, codec), np.split(x, 8)
    rivals = {"read floor": read_floor(parts, fedcore.threads())}
    if (codec, seed) in TORCH:
        name, operation = TORCH[codec, seed]
        rivals[name] = work.rival(operation)
    if (codec, seed) == ("f16", None):
        narrow = np.empty(N, np.float16)
        rivals["numpy copyto float16"] = lambda: np.copyto(narrow, x, casting="same_kind")
    versus(
        f"float32 to {codec}, {'nearest' if seed is None else 'stochastic'}, {N / 1e6:.1f} M",
        lambda: kernels.quantise(x, codec, out, seed=seed),
        rivals,
        bytes=(5 if codec == "int8" else 6) * N,
    )


@pytest.mark.parametrize("codec", ["bf16", "f16", "int8"])
def bench_dequantise(versus, codec):
    work = Work(theirs.row, N)
    [x] = work.arrays
    coded, parts, out = kernels.quantise(x, codec), np.split(x, 8), np.empty(N, np.float32)
    name, operation = TORCH_BACK[codec]
    versus(
        f"{codec} to float32, {N / 1e6:.1f} M",
        lambda: kernels.dequantise(coded, out),
        {"read floor": read_floor(parts, fedcore.threads()), name: work.rival(operation)},
        bytes=(5 if codec == "int8" else 6) * N,
    )
