"""The device on which clients are trained: found by its name, and how numbers come to it and back."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fedcore.devices import KNOWN
from fedcore.errors import DeviceError, UnknownNameError
from fedcore.typing import F32

CPU = torch.device("cpu")
_NAME = re.compile(r"cpu|cuda(:\d{1,4})?")


def torch_device(name: str) -> torch.device:
    """The device of that name, as torch has it: ``"cpu"``, or ``"cuda:0"``, for which ``"cuda"`` may stand too.

    Raises:
        UnknownNameError: there is no such kind of device.
        DeviceError: torch has no such device here; the message says what is missing.

    >>> torch_device("cpu")
    device(type='cpu')
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UnknownNameError.of("device", name, KNOWN)
    if name == "cpu":
        return CPU
    if (reason := _missing()) is not None:
        raise DeviceError(f"device: expected a GPU for {name!r} that torch can use, got none: {reason}")
    number = int(name[5:] or 0)
    if number >= (count := torch.cuda.device_count()):
        raise DeviceError(f"device: expected one of the {count} that torch knows, 'cuda:0' on, got {name!r}")
    return torch.device("cuda", number)


def device_facts(name: str) -> dict[str, str]:
    """The facts of a device that a reader of records needs: its name, and of a GPU also what it is, and torch's CUDA.

    Raises: what ``torch_device`` does.

    >>> device_facts("cpu")
    {'name': 'cpu'}
    """
    device = torch_device(name)
    if device.type == "cpu":
        return {"name": name}
    return {"name": name, "is": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}


def moved(array: F32, device: torch.device) -> torch.Tensor:
    """A vector's numbers on a device: a copy, of which nobody else knows.

    Args:
        array: float32, of whatever shape; read-only.
    """
    return torch.from_numpy(array.copy()).to(device)


def on_host(tensor: torch.Tensor) -> F32:
    """A tensor's numbers as NumPy's: a view of what lies in host memory, a copy of anything else."""
    here: F32 = tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()
    return here


def chosen(indices: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Minibatches' indices on a device, brought there in one copy.

    Args:
        indices: int64[b] each.
    """
    if not indices:
        return []
    whole = torch.from_numpy(np.concatenate(indices)).to(device)
    return list(torch.split(whole, [len(one) for one in indices]))


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Inside, a GPU's products and convolutions are float32's own, by algorithms that repeat their bits.

    No TensorFloat-32, and none of cuDNN's algorithms that add in the order of chance or are chosen by a race. On the
    CPU, nothing changes. What is set is torch's for the whole process, and set back behind it.
    """
    if device.type == "cpu":
        yield
        return
    products = torch.backends.cuda.matmul.allow_tf32
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    with flags:
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = products


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was told."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def _missing() -> str | None:
    """The reason why torch has no GPU; None where it has one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPUs alone; install one that is built for CUDA, or take 'cpu'"
    return f"torch {torch.__version__} finds no GPU or no driver for CUDA {torch.version.cuda}; see nvidia-smi"
