"""Flower's records: models as named arrays, each the bytes of a `.npy` file, and the instructions to clients."""

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
from fedcore.model import Layout
from fedcore.server import Broadcast

STYPE = "numpy.ndarray"
BFLOAT16 = "bfloat16"
NARROW = (BFLOAT16, "float16")
"""Dtypes that do not hold every float32, so that what a client starts from is not what the server has."""

EXAMPLES = "num-examples"
"""The metric that holds a client's number of examples."""

CONTROL = "fedcore.control"
"""The record of a client's second vector, in its only array."""


@dataclass(frozen=True)
class Wire:
    """The form in which a model travels: its tensors' names in the order of the first record, and the dtype of each."""

    dtypes: Mapping[str, str]
    _known: dict[str, tuple[bytes, tuple[int, ...]]] = field(default_factory=dict, compare=False, repr=False)
    """Of float32 tensors in C order, a head that was read, and the shape."""

    @classmethod
    def of(cls, record: ArrayRecord) -> "Wire":
        """The wire format of a record that the server's user gave."""
        return cls({name: array.dtype for name, array in record.items()})

    @property
    def is_narrow(self) -> bool:
        """Tell whether some tensor is rounded on its way."""
        return any(dtype in NARROW for dtype in self.dtypes.values())

    def read(self, record: ArrayRecord) -> dict[str, npt.NDArray[Any]]:
        """A record's tensors: float32, and integers as they are; float32 tensors are views of the record's bytes.

        Raises:
            ArrayError, DtypeError, ShapeError: the record is no model of these names, or its bytes are no arrays.
        """
        if record.keys() != self.dtypes.keys():
            missing = [name for name in self.dtypes if name not in record]
            extra = [name for name in record if name not in self.dtypes]
            unexpected = [name[:40] for name in extra[:3]]
            due = "arrays: expected the tensors of the first record"
            raise ArrayError(f"{due}; missing {missing[:3]}, unexpected {unexpected}")
        arrays = dict(record.items())  # Flower's own look-up costs a call of Python
        known = self._read_known(arrays)
        if len(known) == len(self.dtypes):  # nearly always
            return known
        return {name: known[name] if name in known else self._read_array(name, arrays[name]) for name in self.dtypes}

    def _read_known(self, arrays: Mapping[str, Array]) -> dict[str, npt.NDArray[Any]]:
        """The tensors whose heads were read before, if all of those are as then: the replies of a round are alike."""
        known = [arrays[name] for name in self._known]
        heads, shapes = [head for head, _ in self._known.values()], [shape for _, shape in self._known.values()]
        usual = all(array.dtype == "float32" and array.stype == STYPE for array in known)
        if not usual or [array.shape for array in known] != shapes:
            return {}
        views = npy.read_known([array.data for array in known], heads, shapes)
        return {} if views is None else dict(zip(self._known, views, strict=True))

    def _read_array(self, name: str, array: Array) -> npt.NDArray[Any]:
        """``read_array``, which remembers the head."""
        values, data = read_array(name, array), array.data
        if array.dtype == "float32" and values.size and values.flags.c_contiguous and type(data) is bytes:
            self._known[name] = data[: len(data) - values.nbytes], values.shape
        return values

    def write(self, tensors: Mapping[str, npt.NDArray[Any]]) -> ArrayRecord:
        """The record of a model in float32 and integers; floats are rounded to the wire's dtypes, ties to even.

        Cost: reads and writes the model once.
        """
        sent = {name: _on_the_wire(tensors[name], dtype) for name, dtype in self.dtypes.items()}
        heads = [npy.head(sent[name], bfloat16=dtype == BFLOAT16) for name, dtype in self.dtypes.items()]
        datas = npy.write_all(heads, list(sent.values()))
        record = ArrayRecord()
        for (name, dtype), data in zip(self.dtypes.items(), datas, strict=True):
            record[name] = Array(dtype, tuple(tensors[name].shape), STYPE, data)
        return record

    def lost(self, tensors: Mapping[str, F32], layout: Layout) -> dict[str, F32]:
        """The loss of a model on its way, float32: x - (x as sent), by name, for the tensors of narrow dtypes."""
        narrow = [name for name in layout.names if self.dtypes[name] in NARROW]
        return {
            name: tensors[name] - read_array(name, write_array(tensors[name], self.dtypes[name])) for name in narrow
        }


def read_array(name: str, array: Array) -> npt.NDArray[Any]:
    """An array's numbers: float32 as a view of its bytes, other floats converted to float32, integers as they are.

    Raises:
        ArrayError, DtypeError, ShapeError: its bytes are no such array, or something else than its fields say.
    """
    if array.stype != STYPE:
        raise DtypeError(f"{name}: expected the serialisation {STYPE!r}, got {array.stype[:40]!r}")
    try:
        values = npy.read(array.data, bfloat16=array.dtype == BFLOAT16)
    except (ArrayError, DtypeError, ShapeError) as error:
        raise type(error)(f"{name}: {error}") from None
    if tuple(array.shape) != values.shape:
        raise ShapeError(f"{name}: expected shape {values.shape}, as its bytes say, got {tuple(array.shape)[:33]}")
    if array.dtype == "float32" and values.dtype == np.float32:  # nearly all
        return values
    if array.dtype != BFLOAT16 and array.dtype != values.dtype.name:
        raise DtypeError(f"{name}: expected {values.dtype}, as its bytes say, got {array.dtype[:40]!r}")
    if array.dtype == BFLOAT16:
        if values.dtype != np.uint16:
            raise DtypeError(f"{name}: expected bfloat16, got bytes of {values.dtype}")
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return npy.as_float32(values)  # an infinity that this makes is refused by the round


def write_array(values: npt.NDArray[Any], dtype: str | None = None) -> Array:
    """The array of some numbers, in their own dtype or, if they are float32, in another float dtype."""
    dtype = values.dtype.name if dtype is None else dtype
    data = npy.write(_on_the_wire(values, dtype), bfloat16=dtype == BFLOAT16)
    return Array(dtype, tuple(values.shape), STYPE, data)


def _on_the_wire(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """The numbers in the wire's dtype, bfloat16 as uint16: themselves or a copy."""
    if dtype == BFLOAT16:
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        return quantise(flat, "bf16").codes.reshape(values.shape) if flat.size else np.empty(values.shape, np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(dtype, copy=False)


def read_vector(name: str, record: ArrayRecord) -> npt.NDArray[Any]:
    """The one array of a record, aligned.

    Raises:
        ArrayError, DtypeError, ShapeError: there is another number of arrays, or its bytes are no array.
    """
    if len(record) != 1:
        raise ArrayError(f"{name}: expected one array, got {len(record)}")
    vector = read_array(name, next(iter(record.values())))
    return vector if vector.flags.aligned else vector.copy()


def write_vector(vector: F32) -> ArrayRecord:
    """A record of one array."""
    record = ArrayRecord()
    record["0"] = write_array(vector)
    return record


# The content of the messages to a round's clients.


METHOD = "fedcore"
"""The record of a method's ``Instructions.numbers``, and the beginning of the names of its vectors; a reply's
record of this name says what the client did."""


def model_alone(
    sent: Broadcast, model: ArrayRecord, config: ConfigRecord, arrays_key: str, config_key: str
) -> Iterator[tuple[int, RecordDict]]:
    """Each client with what Flower's own FedAvg would send it: for clients of plain steps at a rate of their own."""
    for client in sent.ids:
        yield int(client), RecordDict({arrays_key: model, config_key: config})


def instructions(
    sent: Broadcast, model: ArrayRecord, config: ConfigRecord, arrays_key: str, config_key: str
) -> Iterator[tuple[int, RecordDict]]:
    """Each client with the content of its message; made one by one, so that one offset is alive at a time.

    The model and what is the same for all are shared between the contents.
    """
    config["lr"] = sent.lr
    shared: dict[str, tuple[Any, ArrayRecord]] = {}
    for client in sent.ids:
        assignment = sent.of(client)
        order = ConfigRecord(assignment.numbers())
        content = RecordDict({arrays_key: model, config_key: config, METHOD: order})
        for name, vector in assignment.vectors().items():
            if name not in shared or vector is not shared[name][0]:
                shared[name] = vector, write_vector(np.asarray(vector))
            content[f"{METHOD}.{name}"] = shared[name][1]
        yield int(client), content
