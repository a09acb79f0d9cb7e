"""Arrays of other libraries on the fake driver's devices: as torch's tensors, older exporters' and Numba's arrays.

Each works on a stream of its library, as torch and CuPy do: what is in it was written there, and it is read from there.
A read or write elsewhere that does not wait for that stream comes too early.
"""

import ctypes
from math import prod

import numpy as np

from fedcore.arrays import core
from tests.devices.memory import Memory, wait_for
from tests.kernels.dlpack import Tensor as DLTensor

CUDA, PINNED, MANAGED = 2, 3, 13  # DLPack's types of devices
LEGACY = 1  # the legacy default stream, as the protocols number it
READ_ONLY = 1

CODES = {
    "float32": (2, 32),
    "float64": (2, 64),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "int8": (0, 8),
    "int16": (0, 16),
    "int64": (0, 64),
    "uint8": (1, 8),
    "uint16": (1, 16),
    "uint64": (1, 64),
}


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManaged(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class DLManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


EXPORTED = {}  # exported tensors by the address of the managed tensor, until they are released


@DELETER
def give_back(address):
    del EXPORTED[address]


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def end_capsule(capsule):
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):
            give_back(_pointer(capsule, name))


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Tensor:
    """A tensor as libraries of DLPack 1 export it.

    Args:
        values: what is in it; bfloat16's codes as uint16.
        dtype: "bfloat16", or None for that of the values.
        device: the ordinal.
        device_type: CUDA, MANAGED or PINNED, which lies in the host's memory.
        stream: the number of the stream on which its library works.
        strides: in elements, or None.
        offset: bytes of its memory in front of it.
        read_only: whether it says so.

    Attributes:
        asked: the streams that were named to its exports.
    """

    def __init__(
        self, values, dtype=None, *, device=0, device_type=CUDA, stream=LEGACY, strides=None, offset=0, read_only=False
    ):
        values = np.ascontiguousarray(values)
        self.dtype, self.shape = dtype or str(values.dtype), values.shape
        self.device, self.device_type, self.stream = device, device_type, stream
        self.strides, self.offset, self.read_only, self.asked = strides, offset, read_only, []
        self.memory = Memory(offset + values.nbytes, None if device_type == PINNED else device)
        self._values = values  # a copy to the device may read it later
        self.memory.write(np.concatenate([np.zeros(offset, np.uint8), values.reshape(-1).view(np.uint8)]), stream)

    def __len__(self):
        return self.shape[0]

    @property
    def address(self):
        return self.memory.address + self.offset

    def numpy(self):
        """The content after all work on its library's stream; bfloat16 as uint16."""
        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype
        return self.memory.read(self.stream)[self.offset :].view(dtype).reshape(self.shape)

    def managed(self, kind):
        """A DLManagedTensor of this kind, which lives until it is released."""
        code, bits = CODES[self.dtype]
        sizes = (ctypes.c_int64 * max(1, len(self.shape)))(*self.shape)
        strides = None if self.strides is None else (ctypes.c_int64 * len(self.strides))(*self.strides)
        data = self.memory.address if prod(self.shape) else None
        place = self.device_type, 0 if self.device_type == PINNED else self.device
        made = kind()
        made.tensor = DLTensor(data, *place, len(self.shape), code, bits, 1, sizes, strides, self.offset)
        made.deleter = give_back
        if kind is DLManagedVersioned:
            made.major, made.flags = 1, READ_ONLY * self.read_only
        EXPORTED[ctypes.addressof(made)] = made, sizes, strides, self
        return made

    def __dlpack_device__(self):
        return self.device_type, 0 if self.device_type == PINNED else self.device

    def order(self, stream):
        """Let the consumer's stream wait for the library's, as `__dlpack__` has to."""
        self.asked.append(stream)
        if self.device_type == PINNED:
            assert stream is None, "no stream is due for what lies in the host's memory"
        elif stream != -1:
            assert stream != 0, "0 could be any of two streams"
            wait_for(self.device, stream or LEGACY, self.stream)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.order(stream)
        if max_version is not None and max_version[0] >= 1:
            managed, name = self.managed(DLManagedVersioned), b"dltensor_versioned"
        else:
            managed, name = self.managed(DLManaged), b"dltensor"
        return _capsule(ctypes.addressof(managed), name, ctypes.cast(end_capsule, ctypes.c_void_p))


class OldTensor(Tensor):
    """A tensor of a library that knows only DLPack 0.x."""

    def __dlpack__(self, *, stream=None):
        return Tensor.__dlpack__(self, stream=stream)


class NumbaArray(Tensor):
    """An array that has only the CUDA array interface.

    Args:
        version: of the interface; 3 names the stream.
    """

    def __init__(self, values, *, version=3, **options):
        super().__init__(values, **options)
        self.version = version

    __dlpack__ = __dlpack_device__ = property()  # hasattr() is False

    @property
    def __cuda_array_interface__(self):
        itemsize = np.dtype(self.dtype).itemsize
        output = {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self.address if prod(self.shape) else 0, self.read_only),
            "version": self.version,
            "strides": None if self.strides is None else tuple(itemsize * stride for stride in self.strides),
        }
        return output | ({"stream": self.stream} if self.version >= 3 else {})


MANAGED_OF = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
TENSOR_OF = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
CURRENT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Exchange(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("of_before", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_of", MANAGED_OF),
        ("object_of", ctypes.c_void_p),
        ("tensor_of", TENSOR_OF),
        ("current_stream", CURRENT),
    ]


class TorchTensor(Tensor):
    """A tensor of a library with DLPack's C interface, as torch has it.

    Attributes:
        current: the number of the stream on which the library works now, of all its tensors.
    """

    requires_grad = False
    current = LEGACY

    def __init__(self, values, dtype=None, **options):
        super().__init__(values, dtype, stream=TorchTensor.current, **options)

    def numpy(self):
        self.stream = TorchTensor.current
        return super().numpy()

    @MANAGED_OF
    @staticmethod
    def _managed_of(tensor, out):
        out[0] = ctypes.addressof(tensor.managed(DLManagedVersioned))
        return 0

    @TENSOR_OF
    @staticmethod
    def _tensor_of(tensor, out):
        tensor.described = tensor.managed(DLManagedVersioned)  # its sizes live as long as it
        out[0] = tensor.described.tensor
        return 0

    @CURRENT
    @staticmethod
    def _current_stream(device_type, device, out):
        out[0] = None if TorchTensor.current == LEGACY else TorchTensor.current
        return 0

    _api = Exchange(1, 3, None, None, _managed_of, None, _tensor_of, _current_stream)
    _name = b"dlpack_exchange_api"  # a capsule keeps its address
    __dlpack_c_exchange_api__ = _capsule(ctypes.addressof(_api), _name, None)


def held(values):
    array = core.DeviceArray(values.size, values.dtype.name)
    array.copy_from(values)
    return array
