"""Arrays on the GPU for `make gpu-check`: torch's and fedcore's own; in a rehearsal those of the tests' driver.

With FEDCORE_CUDA_DRIVER set to the tests' driver everything runs on the host, where no figure of time means anything.
"""

import os
from typing import Any

import numpy as np
import torch

from fedcore.kernels import Codes
from fedcore.native import core

REAL = not os.environ.get("FEDCORE_CUDA_DRIVER")
GUARD, SENTINEL = 64, 0x5A
"""Bytes behind each tensor of torch's, and what is in them: an overrun shows there, whatever lies behind."""

if not REAL:
    from tests.devices.fake_driver import fake_driver
    from tests.devices.tensors import TorchTensor

    fake_driver()


class Placed:
    """A copy of an array on the device.

    Args:
        host: a NumPy array, or a tensor of torch's bfloat16.
        shift: elements in front of it, behind a multiple of 512 bytes.
        own: whether it is fedcore's own, where that has such a dtype.
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
        """What is in it now; bfloat16 as uint16.

        Raises:
            AssertionError: somebody has written behind it.
        """
        if isinstance(self.array, core.DeviceArray):
            return self.array.to_host()
        if not REAL:
            return self.array.numpy()
        assert bool((self._room[-GUARD:] == SENTINEL).all()), "written behind the end of an array"
        array = self.array.view(torch.uint16) if self.array.dtype == torch.bfloat16 else self.array
        return array.cpu().numpy()


def placed(tree, place, known):
    """A tree of lists, dicts and codes with every array on the device, and what lies twice in it lying twice there."""
    if isinstance(tree, dict):
        return {name: placed(part, place, known) for name, part in tree.items()}
    if isinstance(tree, Codes):
        return Codes(tree.codec, *(placed(part, place, known) for part in tree[1:]))
    if isinstance(tree, list):
        return [placed(part, place, known) for part in tree]
    if not isinstance(tree, np.ndarray | torch.Tensor):
        return tree
    if id(tree) not in known:
        known[id(tree)] = tree, place(tree)
    return known[id(tree)][1].array
