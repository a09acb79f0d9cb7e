"""torch's devices and random numbers."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from fedcore.arrays import F32, KNOWN
from fedcore.errors import DeviceError, UnknownNameError
from fedcore.runtime import generator

CPU = torch.device("cpu")
_NAME = re.compile(r"cpu|cuda(:\d{1,4})?")


def torch_device(name: str) -> torch.device:
    """Return torch's device with a given name: ``"cpu"``, ``"cuda:0"``, or ``"cuda"`` for the first GPU.

    An unknown kind of device raises an UnknownNameError, a missing device a DeviceError.

    >>> torch_device("cpu")
    device(type='cpu')
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UnknownNameError.of("device", name, KNOWN)
    if name == "cpu":
        return CPU
    if (reason := _missing()) is not None:
        raise DeviceError(f"device={name!r}: torch has no GPU: {reason}")
    number = int(name[5:] or 0)
    if number >= (count := torch.cuda.device_count()):
        raise DeviceError(f"device={name!r}: does not exist; torch's last GPU is 'cuda:{count - 1}'")
    return torch.device("cuda", number)


def device_facts(name: str) -> dict[str, str]:
    """Return facts about a device for records: its name, and for a GPU its model and torch's CUDA version.

    >>> device_facts("cpu")
    {'name': 'cpu'}
    """
    device = torch_device(name)
    if device.type == "cpu":
        return {"name": name}
    return {"name": name, "is": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}


def moved(array: F32, device: torch.device) -> torch.Tensor:
    """Copy an array, float32 of any shape, to a device."""
    return torch.from_numpy(array.copy()).to(device)


def on_host(tensor: torch.Tensor) -> F32:
    """Return a tensor as a NumPy array: a view in host memory, or a copy from a GPU."""
    array: F32 = tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()
    return array


def split_on(device: torch.device, indices: list[np.ndarray]) -> Sequence[torch.Tensor]:
    """Copy the indices of several minibatches, int64[b] each, to a device in one transfer."""
    joined = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *indices])).to(device)
    return torch.split(joined, [len(one) for one in indices])


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Compute a GPU's products and convolutions in float32, by algorithms with reproducible bits.

    This disables TensorFloat-32, and cuDNN's algorithms that add in a random order or that a benchmark selects. The
    settings apply to the whole process, and are restored at the end. On the CPU, nothing changes.
    """
    if device.type == "cpu":
        yield
        return
    products = torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = products


def synchronize(device: torch.device) -> None:
    """Wait for all operations of a device."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def _missing() -> str | None:
    """Return the reason why torch has no GPU, or None if it has one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPUs only; install one that is built for CUDA, or use 'cpu'"
    return f"torch {torch.__version__} finds no GPU or no driver for CUDA {torch.version.cuda}; see nvidia-smi"


@contextmanager
def seeded(seed: int, purpose: str, *, round: int = 0, client: int = 0, device: torch.device = CPU) -> Iterator[None]:
    """Seed torch's random numbers inside the block, and restore their state afterwards.

    The seed is that of ``fedcore.runtime.generator`` with these arguments. A GPU is seeded in addition to the CPU, and
    draws different numbers from the same seed. Cost: about 45 microseconds.
    """
    number = int(generator(seed, purpose, round=round, client=client).integers(2**63))
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        # torch.manual_seed would also seed other accelerators, whose state is not forked.
        torch.default_generator.manual_seed(number)
        if device.type != "cpu":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(number)
        yield
