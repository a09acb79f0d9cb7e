"""Conversion of float32 to 16 or 8 bits and back, without fedcore."""

import numpy as np
import torch

BLOCK = 64


def row(n):
    """Return float32[n], normally distributed."""
    return [np.random.default_rng(0).standard_normal(n, dtype=np.float32)]


def torch_bf16(x):
    return _narrow(x, torch.bfloat16)


def torch_f16(x):
    return _narrow(x, torch.float16)


def torch_int8(x):
    return _blocks(x, lambda scaled: scaled.round_())


def torch_int8_stochastic(x):
    return _blocks(x, lambda scaled: scaled.add_(torch.rand_like(scaled)).floor_())


def torch_from_bf16(x):
    return _widen(x, torch.bfloat16)


def torch_from_f16(x):
    return _widen(x, torch.float16)


def torch_from_int8(x):
    codes = torch.from_numpy((40 * x).astype(np.int8)).view(-1, BLOCK)
    scales, back = torch.rand(len(codes), 1), torch.empty(len(codes), BLOCK)
    return lambda: torch.mul(codes, scales, out=back)


def _narrow(x, dtype):
    wide, half = torch.from_numpy(x), torch.empty(len(x), dtype=dtype)
    return lambda: half.copy_(wide)


def _widen(x, dtype):
    half, wide = torch.from_numpy(x).to(dtype), torch.empty(len(x))
    return lambda: wide.copy_(half)


def _blocks(x, rounded):
    """Return a function that computes a scale per block, rounds (or adds noise and floors), clamps and narrows."""
    blocks = torch.from_numpy(x).view(-1, BLOCK)
    codes, scales = torch.empty(blocks.shape, dtype=torch.int8), torch.empty(len(blocks))

    def run():
        torch.amax(blocks.abs(), 1, out=scales)
        scales.div_(127)
        codes.copy_(rounded(blocks / scales[:, None]).clamp_(-127, 127))

    return run
