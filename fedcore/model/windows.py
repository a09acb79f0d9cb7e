"""Windows of models: the same elements of several models at a time, read from files by a few threads; digests."""

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore.arrays import LINE, core, dtype_name
from fedcore.errors import ArrayError, CorruptionError
from fedcore.model.files import bytes_of
from fedcore.model.layout import describe_names
from fedcore.model.policy import TensorForm, check_tensor
from fedcore.model.safetensors import BYTES, READERS, StoredTensor, over, read_at

UNIT = 1 << 16
"""Parts of a tensor start at multiples of this number of elements. A checksum covers as many."""
MEMORY = 160 << 20
"""The bytes of all windows in memory, unless windows of one unit need more."""
LARGEST = 8 << 20
"""The most bytes of a window of one model."""
AHEAD = 2
"""The number of windows that are read ahead."""


class Part(NamedTuple):
    """The elements [start, stop) of a tensor."""

    name: str
    start: int
    stop: int


Rows = list[list[Any]]
"""The elements of a window's parts: for each model and part a vector."""


class Windows:
    """The windows of several models with the same names and shapes.

    Args:
        models: mappings from names to ``StoredTensor`` or tensors in memory; a model without a tensor has an empty one.
        names: the tensors, in order.

    Attributes:
        plan: the parts of each window.
        bytes: the number of bytes in files before each window, and in total.
    """

    def __init__(self, models: Sequence[Mapping[str, Any]], names: Iterable[str]) -> None:
        self._models = models
        self.plan: list[list[Part]] = []
        room, most = 0, min(LARGEST, MEMORY // ((AHEAD + 1) * len(models)))
        for name in names:
            tensors = [model[name] for model in models]
            width = max(BYTES[dtype_name(tensor)] for tensor in tensors)
            n = max(math.prod(tensor.shape) for tensor in tensors)
            step = max(most // (width * UNIT), 1) * UNIT
            for start in range(0, n, step):
                part = Part(name, start, min(start + step, n))
                size = -(-(part.stop - start) * width // LINE) * LINE
                if not self.plan or room + size > most:
                    self.plan.append([])
                    room = 0
                self.plan[-1].append(part)
                room += size
        widths = {name: sum(BYTES[dtype_name(model[name])] for model in models) for name in models[0]}
        sizes = [sum((part.stop - part.start) * widths[part.name] for part in parts) for parts in self.plan]
        self.bytes = np.cumsum([0, *sizes]).tolist()

    def read(self, first: int = 0) -> Iterator[tuple[list[Part], Rows]]:
        """Yield the parts and rows of each window from number ``first`` on. Rows are valid until the next window."""
        plan = iter(self.plan[first:])
        buffers: list[Any] = [[np.empty(0, np.uint8)] * len(self._models) for _ in range(AHEAD + 1)]
        coming: deque[tuple[list[Part], list[Future[Any]], list[Any]]] = deque()
        with ThreadPoolExecutor(READERS) as pool:

            def request() -> None:
                if (parts := next(plan, None)) is not None:
                    memory = buffers.pop()
                    jobs = [pool.submit(_fill, memory, i, model, parts) for i, model in enumerate(self._models)]
                    coming.append((parts, jobs, memory))

            for _ in range(AHEAD + 1):
                request()
            while coming:
                parts, jobs, memory = coming.popleft()
                yield parts, [job.result() for job in jobs]
                buffers.append(memory)
                request()


def _fill(memory: list[npt.NDArray[np.uint8]], i: int, model: Mapping[str, Any], parts: list[Part]) -> list[Any]:
    """Read the parts of model i into ``memory[i]`` and return them as vectors."""
    stored = [(part, tensor) for part in parts if isinstance(tensor := model[part.name], StoredTensor)]
    room = sum(-(-(part.stop - part.start) * tensor.itemsize // LINE) * LINE for part, tensor in stored)
    if memory[i].size < room:
        memory[i] = np.empty(room, np.uint8)
    rows, at, file, fd = [], 0, None, -1
    with ExitStack() as opened:
        for part in parts:
            tensor = model[part.name]
            if not isinstance(tensor, StoredTensor):
                rows.append(flat(tensor)[part.start : part.stop])
                continue
            if tensor.file is not file:
                opened.close()
                fd, file = tensor.file.reopen(), tensor.file
                opened.callback(os.close, fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            start, size = tensor.start + part.start * tensor.itemsize, (part.stop - part.start) * tensor.itemsize
            read_at(fd, start, memory[i][at : at + size], tensor.file.path)
            # Large models would displace the cached files of other programs.
            os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)
            rows.append(over(memory[i][at : at + size], tensor.kind))
            at += -(-size // LINE) * LINE
    return rows


def flat(tensor: Any) -> Any:
    """Return a tensor in memory as a vector; tensors in files are unchanged."""
    return tensor if isinstance(tensor, StoredTensor) or len(tensor.shape) == 1 else tensor.reshape(-1)


def check_model(label: str, model: Mapping[str, Any], plan: Mapping[str, TensorForm]) -> None:
    """Raise an error if a model's names, shapes or dtypes differ from the plan."""
    if model.keys() != plan.keys():
        raise ArrayError(f"{label}: {describe_names(list(plan), list(model))}")
    for name, form in plan.items():
        check_tensor(f"{label}, {name}", model[name], form)


# A file may change between two passes, and its times may be set back. So both passes compute a digest of the content.


class Digest:
    """The digest of a model: a sum of the digests of its tensors, each a chain over the checksums of its blocks."""

    def __init__(self, state: Sequence[str] = ("0", "", "0")) -> None:
        self._total, self._chain, self._measured = int(state[0], 16), bytes.fromhex(state[1]), int(state[2], 16)

    def add(self, part: Part, form: TensorForm, memory: npt.NDArray[np.uint8]) -> None:
        """Add the bytes of a part. The parts of a tensor come in order."""
        if part.start == 0:
            head = json.dumps([part.name, form.dtype, form.shape]).encode()
            self._chain = hashlib.blake2b(head, digest_size=16).digest()
        for checksum in core.checksum(memory, UNIT * BYTES[form.dtype]):
            self._chain = hashlib.blake2b(self._chain + checksum.tobytes(), digest_size=16).digest()
        if part.stop == math.prod(form.shape):
            number = int.from_bytes(self._chain, "little")
            self._total = (self._total + number) % 2**128
            if form.kind == "parameter":
                self._measured = (self._measured + number) % 2**128

    def state(self) -> list[str]:
        """Return the digest, the chain of the current tensor, and the digest of the parameters alone."""
        return [f"{self._total:032x}", self._chain.hex(), f"{self._measured:032x}"]


def add_to(
    digests: Sequence[Digest], parts: list[Part], rows: Sequence[Sequence[Any]], plan: Mapping[str, TensorForm]
) -> None:
    """Add the parts of the tensors of ``plan`` to the digests, one for each model."""
    for digest, each in zip(digests, rows, strict=False):
        for part, row in zip(parts, each, strict=True):
            if part.name in plan and len(row):
                digest.add(part, plan[part.name]._replace(dtype=dtype_name(row)), bytes_of(row))


def require_unchanged(names: Sequence[Any], first: Sequence[str], again: Sequence[Digest]) -> None:
    """Raise a CorruptionError if the parameters of a model had different digests in two passes."""
    for name, was, now in zip(names, first, again, strict=False):
        if now.state()[2] != was:
            raise CorruptionError(f"{name}: was changed between two passes; write new models to new files")
