"""Quantising a row of 8 M float32, and back, to the nearest and stochastically."""

import numpy as np
import pytest
import torch

import fedcore
from bench.probe import read_seconds
from fedcore import kernels

N = 8_388_608
TORCH = {"bf16": torch.bfloat16, "f16": torch.float16}


@pytest.fixture
def row():
    torch.set_num_threads(fedcore.threads())
    return torch.randn(N)


def torch_int8(x, codes, scales, seed):
    """As one would write it: a scale a block, then round (or floor with noise), clamp and narrow."""
    blocks = x.view(-1, 64)
    torch.amax(blocks.abs(), 1, out=scales)
    scales.div_(127)
    scaled = blocks / scales[:, None]
    scaled = scaled.round_() if seed is None else scaled.add_(torch.rand_like(scaled)).floor_()
    codes.view(-1, 64).copy_(scaled.clamp_(-127, 127))


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("codec", ["bf16", "f16", "int8"])
def bench_quantise(versus, row, codec, seed):
    x = row.numpy()
    out = kernels.quantise(x, codec)
    parts = np.split(x, 8)
    rivals = {"read floor": lambda: read_seconds(parts, fedcore.threads())}
    if codec == "int8":
        codes, scales = torch.empty(N, dtype=torch.int8), torch.empty(N // 64)
        rivals["torch: amax, div, round, clamp, copy_"] = lambda: torch_int8(row, codes, scales, seed)
    elif seed is None:
        half = torch.empty(N, dtype=TORCH[codec])
        rivals["torch half.copy_(x)"] = lambda: half.copy_(row)
        if codec == "f16":
            narrow = np.empty(N, np.float16)
            rivals["numpy copyto float16"] = lambda: np.copyto(narrow, x, casting="same_kind")
    versus(
        f"{codec}, {'nearest' if seed is None else 'stochastic'}, {N / 1e6:.1f} M; {fedcore.threads()} threads",
        lambda: kernels.quantise(x, codec, out, seed=seed),
        rivals,
        timed=["read floor"],
        bytes=(5 if codec == "int8" else 6) * N,
    )


@pytest.mark.parametrize("codec", ["bf16", "f16", "int8"])
def bench_dequantise(versus, row, codec):
    coded = kernels.quantise(row.numpy(), codec)
    out, back = np.empty(N, np.float32), torch.empty(N)
    parts = np.split(row.numpy(), 8)
    rivals = {"read floor": lambda: read_seconds(parts, fedcore.threads())}
    if codec == "int8":
        codes, scales = torch.from_numpy(coded.codes).view(-1, 64), torch.from_numpy(coded.scales)[:, None]
        rivals["torch mul(codes, scales)"] = lambda: torch.mul(codes, scales, out=back.view(-1, 64))
    else:
        half = torch.from_numpy(coded.codes).view(TORCH[codec])
        rivals["torch x.copy_(half)"] = lambda: back.copy_(half)
    versus(
        f"{codec} back to float32, {N / 1e6:.1f} M; {fedcore.threads()} threads, {fedcore.isa()}",
        lambda: kernels.dequantise(coded, out),
        rivals,
        timed=["read floor"],
        bytes=(5 if codec == "int8" else 6) * N,
    )
