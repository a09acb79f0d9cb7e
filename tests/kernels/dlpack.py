"""Hand-made DLPack capsules with any contents."""

import ctypes

import numpy as np

_TYPE_CODES = {"i": 0, "u": 1, "f": 2}
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


class Exporter:
    """Exports an array by a hand-made capsule, the same one every time.

    Args:
        array: whose memory the capsule tells of, for as long as this object lives.
        name: the capsule's name; "dltensor_versioned" for DLPack 1.
        major, flags: of DLPack 1.
        shape, strides: sequences of int, or None for a null pointer.
        changes: other fields of the tensor that are to say something else.
    """

    def __init__(self, array, name="dltensor", major=1, flags=0, shape=(), strides=None, **changes):
        self.array, self.asked = array, 0
        sizes = array.shape if shape == () else shape
        self._kept = [None if numbers is None else (ctypes.c_int64 * 70)(*numbers) for numbers in (sizes, strides)]
        pointers = [ctypes.cast(numbers, ctypes.POINTER(ctypes.c_int64)) for numbers in self._kept]
        self._managed = ManagedVersioned() if name.endswith("versioned") else Managed()
        if name.endswith("versioned"):
            self._managed.major, self._managed.flags = major, flags
        code, bits = _TYPE_CODES[array.dtype.kind], 8 * array.itemsize
        self._managed.tensor = Tensor(array.ctypes.data, 1, 0, len(sizes or ()), code, bits, 1, *pointers, 0)
        for field, value in changes.items():
            setattr(self._managed.tensor, field, value)
        self._name = name.encode()  # a capsule does not copy it
        self._capsule = _new_capsule(ctypes.addressof(self._managed), self._name, None)

    def __len__(self):
        return len(self.array)

    def __dlpack__(self, **_):
        self.asked += 1
        return self._capsule


def nothing_but(array):
    """An array that is visible only through DLPack, as NumPy exports it."""

    class Wrapped:
        def __dlpack__(self, **options):
            return array.__dlpack__(**options)

    assert isinstance(array, np.ndarray)
    return Wrapped()
