"""CUDA devices: whether there are any, what they are, and on which stream the kernels' calls come."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fedcore.native import core


class CudaDevice(NamedTuple):
    """A CUDA device, as the driver describes it."""

    name: str
    capability: int
    """90 for 9.0."""
    memory: int
    """Bytes."""


def reason() -> str | None:
    """The reason why there is no CUDA (no driver, no device, a build without nvcc), or None if there is.

    Cost: the first call that finds a device loads the kernels onto it.
    """
    return core.cuda_reason()


def devices() -> list[CudaDevice]:
    """The CUDA devices, by ordinal.

    Raises:
        DeviceError: there is no CUDA; the message is that of ``reason``.
    """
    return [CudaDevice(*described) for described in core.cuda_devices()]


@contextmanager
def stream(handle: Any) -> Iterator[None]:
    """Have the calls of this thread, within the block, come on a stream of the caller's.

    Without it a call comes on the stream on which the library of its first array works now, where that tells it, as
    torch does (``torch.cuda.stream`` is enough for its tensors), else on the legacy default stream. Either way it runs
    behind what its arrays' libraries have queued, and nothing waits but who reads a number of the result.

    Libraries that export by Python alone, as CuPy does, are told the call's stream, and theirs is not told of the
    call's end: keep their arrays until it has come, where they work on non-blocking streams of their own.

    Args:
        handle: a cudaStream_t of the arrays' device as an int, or what has one as ``cuda_stream`` (torch) or ``ptr``
            (CuPy).

    >>> with stream(1):  # the legacy default stream
    ...     pass
    """
    number = getattr(handle, "cuda_stream", getattr(handle, "ptr", handle))
    before = core.choose_stream(int(number))
    try:
        yield
    finally:
        core.choose_stream(before)
