"""Flower's records of models, whose arrays are the bytes of `.npy` files, and of the instructions to clients."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedcore.adapters import npy
from fedcore.arrays import F32
from fedcore.errors import ArrayError, DtypeError, ShapeError
from fedcore.kernels import quantise
from fedcore.model import Layout, Model
from fedcore.server import Broadcast

STYPE = "numpy.ndarray"
BFLOAT16 = "bfloat16"
NARROW = (BFLOAT16, "float16")
"""Dtypes that round float32 numbers, so that clients start from a rounded model."""

EXAMPLES = "num-examples"
"""The metric that holds a client's number of examples."""

CONTROL = "fedcore.control"
"""The name of the record whose only array is a client's second vector."""


WHOLE = Model(None)
"""The parts of a model whose replies have every tensor."""


@dataclass(frozen=True)
class Wire:
    """The names and dtypes of a model's tensors in messages, in the order of the first record.

    ``parts`` has the groups that replies may lack, and the personal and frozen tensors, which are not in messages.
    """

    dtypes: Mapping[str, str]
    parts: Model = WHOLE
    _known: dict[str, tuple[bytes, tuple[int, ...]]] = field(default_factory=dict, compare=False, repr=False)
    """The last header and the shape of each float32 tensor in C order."""

    @classmethod
    def of(cls, record: ArrayRecord, parts: Model = WHOLE) -> "Wire":
        """Return the names and dtypes of a record."""
        return cls({name: array.dtype for name, array in record.items() if not parts.ignores(name)}, parts)

    @property
    def is_narrow(self) -> bool:
        """Whether messages round at least one tensor."""
        return any(dtype in NARROW for dtype in self.dtypes.values())

    def read(self, record: Mapping[str, Array]) -> dict[str, npt.NDArray[Any]]:
        """Return a record's tensors: floats as float32, integers unchanged. float32 tensors are views of the record."""
        if record.keys() != self.dtypes.keys():
            missing = [name for name in self.dtypes if name not in record]
            extra = [name[:40] for name in record if name not in self.dtypes and not self.parts.ignores(name)]
            if extra or (missing and not self.parts.partial):
                raise ArrayError(
                    f"arrays: the tensors differ from the model's: {missing[:3]} missing, {extra[:3]} unexpected"
                )
            if missing:
                return {name: self._read_array(name, record[name]) for name in self.dtypes if name in record}
        arrays = dict(record.items())  # Flower's own look-up is a call of a Python function
        known = self._read_known(arrays)
        if len(known) == len(self.dtypes):  # the usual case
            return known
        return {name: known[name] if name in known else self._read_array(name, arrays[name]) for name in self.dtypes}

    def _read_known(self, arrays: Mapping[str, Array]) -> dict[str, npt.NDArray[Any]]:
        """Return the tensors with known headers, or {} if a header differs. Replies of a round usually share them."""
        known = [arrays[name] for name in self._known]
        heads, shapes = [head for head, _ in self._known.values()], [shape for _, shape in self._known.values()]
        usual = all(array.dtype == "float32" and array.stype == STYPE for array in known)
        if not usual or [array.shape for array in known] != shapes:
            return {}
        views = npy.read_known([array.data for array in known], heads, shapes)
        return {} if views is None else dict(zip(self._known, views, strict=True))

    def _read_array(self, name: str, array: Array) -> npt.NDArray[Any]:
        """Return the numbers of an array, and store its header for ``_read_known``."""
        values, data = read_array(name, array), array.data
        if array.dtype == "float32" and values.size and values.flags.c_contiguous and type(data) is bytes:
            self._known[name] = data[: len(data) - values.nbytes], values.shape
        return values

    def write(self, tensors: Mapping[str, npt.NDArray[Any]]) -> ArrayRecord:
        """Return the record of float32 and integer tensors; floats are rounded to the wire's dtypes.

        Ties are rounded to even. Cost: reads and writes the model once.
        """
        dtypes = {name: dtype for name, dtype in self.dtypes.items() if name in tensors}
        sent = {name: _on_the_wire(tensors[name], dtype) for name, dtype in dtypes.items()}
        heads = [npy.head(sent[name], bfloat16=dtype == BFLOAT16) for name, dtype in dtypes.items()]
        datas = npy.write_all(heads, list(sent.values()))
        record = ArrayRecord()
        for (name, dtype), data in zip(dtypes.items(), datas, strict=True):
            record[name] = Array(dtype, tuple(tensors[name].shape), STYPE, data)
        return record

    def lost(self, tensors: Mapping[str, F32], layout: Layout) -> dict[str, F32]:
        """Return the rounding error x - (x as sent), float32, of each tensor of a narrow dtype, by name."""
        narrow = {name: tensors[name] for name in layout.names if self.dtypes[name] in NARROW}
        return {name: x - read_array(name, write_array(x, self.dtypes[name])) for name, x in narrow.items()}


def read_array(name: str, array: Array) -> npt.NDArray[Any]:
    """Return an array's numbers: float32 as a view of its bytes, other floats as float32, integers unchanged."""
    if array.stype != STYPE:
        raise DtypeError(f"{name}: stype must be {STYPE!r}, got {array.stype[:40]!r}")
    try:
        values = npy.read(array.data, bfloat16=array.dtype == BFLOAT16)
    except (ArrayError, DtypeError, ShapeError) as error:
        raise type(error)(f"{name}: {error}") from None
    if tuple(array.shape) != values.shape:
        raise ShapeError(f"{name}: the record says shape {tuple(array.shape)[:33]}, the .npy header {values.shape}")
    if array.dtype == "float32" and values.dtype == np.float32:  # the usual case
        return values
    if array.dtype != BFLOAT16 and array.dtype != values.dtype.name:
        raise DtypeError(f"{name}: the record says dtype {array.dtype[:40]!r}, the .npy header {values.dtype}")
    if array.dtype == BFLOAT16:
        if values.dtype != np.uint16:
            raise DtypeError(f"{name}: the record says dtype {BFLOAT16!r}, the .npy header {values.dtype}")
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return npy.as_float32(values)  # an overflow becomes an infinity, which the round rejects


def write_array(values: npt.NDArray[Any], dtype: str | None = None) -> Array:
    """Return the numbers as an array in their own dtype, or float32 numbers in the given float dtype."""
    dtype = values.dtype.name if dtype is None else dtype
    data = npy.write(_on_the_wire(values, dtype), bfloat16=dtype == BFLOAT16)
    return Array(dtype, tuple(values.shape), STYPE, data)


def _on_the_wire(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return the numbers in the dtype of the message, with bfloat16 as uint16; may return ``values`` itself."""
    if dtype == BFLOAT16:
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        return quantise(flat, "bf16").codes.reshape(values.shape) if flat.size else np.empty(values.shape, np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(dtype, copy=False)


def read_vector(name: str, record: ArrayRecord) -> npt.NDArray[Any]:
    """Return the only array of a record, aligned."""
    if len(record) != 1:
        raise ArrayError(f"{name}: the record has {len(record)} arrays; it must have exactly one")
    vector = read_array(name, next(iter(record.values())))
    return vector if vector.flags.aligned else vector.copy()


def write_vector(vector: F32) -> ArrayRecord:
    """Return a record with the vector as its only array."""
    record = ArrayRecord()
    record["0"] = write_array(vector)
    return record


# The contents of the messages to a round's clients.


METHOD = "fedcore"
"""The name of the record of ``Instructions.numbers``, and the prefix of the records of its vectors.

In a reply: the name of the record of the client's steps and rate.
"""


def model_alone(
    sent: Broadcast, model: ArrayRecord, config: ConfigRecord, arrays_key: str, config_key: str
) -> Iterator[tuple[int, RecordDict]]:
    """Yield each client with the message content of Flower's FedAvg, for clients that choose their own rates.

    All messages share one content, as in Flower: a subclass that changes one changes all.
    """
    content = RecordDict({arrays_key: model, config_key: config})
    for client in sent.ids:
        yield int(client), content


def instructions(
    sent: Broadcast, model: ArrayRecord, config: ConfigRecord, arrays_key: str, config_key: str
) -> Iterator[tuple[int, RecordDict]]:
    """Yield each client with the content of its message.

    Contents share the model and the vectors that are equal for all clients. Only one client's own vectors are in memory
    at a time.
    """
    shared: dict[str, tuple[Any, ArrayRecord]] = {}
    for client in sent.ids:
        work = sent.of(client)
        content = RecordDict({arrays_key: model, config_key: config, METHOD: ConfigRecord(work.numbers())})
        for name, vector in work.vectors().items():
            if name not in shared or vector is not shared[name][0]:
                shared[name] = vector, write_vector(np.asarray(vector))
            content[f"{METHOD}.{name}"] = shared[name][1]
        yield int(client), content
