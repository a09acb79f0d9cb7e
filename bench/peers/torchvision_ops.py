"""Make torchvision importable with a torch without CUDA; FedLab's core imports it for its data sets.

The package registry's torchvision is linked with CUDA. With a CPU build of torch its library cannot be loaded, and its
Python part fails at two undeclared operators. No part of FedLab that is used here calls them.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path

import torch

_declared = None  # the declarations last as long as this object


def declare():
    """Declare the operators if torchvision's library cannot be loaded."""
    global _declared
    spec = find_spec("torchvision")
    if _declared is not None or spec is None or torch.version.cuda is not None:
        return
    try:
        ctypes.CDLL(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        _declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
