"""Import torchvision, which FedLab's core does for its data sets, beside a torch without CUDA.

The package registry's torchvision is linked with CUDA. Beside a CPU torch its library cannot be loaded, and its Python
part then stops at two operators that nobody declared. Nothing of FedLab that is used here calls them.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path

import torch

_declared = None  # the declarations live as long as this


def declare():
    """Declare those operators, if torchvision's own library cannot."""
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
