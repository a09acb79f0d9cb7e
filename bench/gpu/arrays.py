"""Arrays on the GPU for `make gpu-check`, allocated by torch or by fedcore.

In a rehearsal, FEDCORE_CUDA_DRIVER selects the tests' driver. Everything then runs on the host, and times are
meaningless.
"""

import os
from typing import Any

import numpy as np
import torch

from fedcore.arrays import core
from fedcore.kernels import Codes, ExactSum

REAL = not os.environ.get("FEDCORE_CUDA_DRIVER")
GUARD, SENTINEL = 64, 0x5A
"""The number and value of guard bytes after each torch tensor, which reveal writes past its end."""

if not REAL:
    from tests.devices.fake_driver import fake_driver
    from tests.devices.tensors import TorchTensor

    fake_driver()


class Placed:
    """A copy of an array on the device.

    Args:
        host: a NumPy array, or a torch tensor of bfloat16.
        shift: the number of elements between a multiple of 512 bytes and the array.
        own: whether fedcore allocates the array, if it supports the dtype.
    """

    def __init__(self, host: Any, shift: int = 0, own: bool = False):
        self._room = None
        half = isinstance(host, torch.Tensor)
        values = host.view(torch.int16).numpy().view(np.uint16) if half else np.ascontiguousarray(host)
        if own and not half and values.dtype != np.float16:
            room = core.DeviceArray(shift + values.size, values.dtype)
            room[shift:].copy_from(values)
            self.array = room[shift:]
        elif REAL:
            before, after = shift * values.itemsize, GUARD
            self._room = torch.full((before + values.nbytes + after,), SENTINEL, dtype=torch.uint8, device="cuda")
            part = self._room[before : before + values.nbytes]
            part.copy_(torch.from_numpy(values.reshape(-1).view(np.uint8)))
            self.array = part.view(torch.bfloat16 if half else getattr(torch, str(values.dtype)))
        else:
            self.array = TorchTensor(values, "bfloat16" if half else None, offset=shift * values.itemsize)

    def numpy(self):
        """Return the present content, with bfloat16 as uint16; raise AssertionError after a write past the end."""
        if isinstance(self.array, core.DeviceArray):
            return self.array.to_host()
        if not REAL:
            return self.array.numpy()
        assert bool((self._room[-GUARD:] == SENTINEL).all()), "written behind the end of an array"
        array = self.array.view(torch.uint16) if self.array.dtype == torch.bfloat16 else self.array
        return array.cpu().numpy()


def placed(tree, place, known):
    """Return a tree of lists, dicts and codes with every array copied to the device; repeated arrays share a copy."""
    if isinstance(tree, dict):
        return {name: placed(part, place, known) for name, part in tree.items()}
    if isinstance(tree, ExactSum):
        return ExactSum(*(placed(word, place, known) for word in tree))
    if isinstance(tree, Codes):
        return Codes(tree.codec, *(placed(part, place, known) for part in tree[1:]))
    if isinstance(tree, list):
        return [placed(part, place, known) for part in tree]
    if not isinstance(tree, np.ndarray | torch.Tensor):
        return tree
    if id(tree) not in known:
        known[id(tree)] = tree, place(tree)
    return known[id(tree)][1].array
