"""Torch tensors through the C export equal those through the Python export."""

import ctypes

import numpy as np
import pytest
import torch

from fedcore import errors, kernels

KEPT = []  # types whose export is used are never let go


class ByPython:
    """A tensor without an export to C."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)


def outcome(tensor):
    try:
        return kernels.weighted_sum([tensor], [1.0], np.zeros(4, np.float32)).tolist()
    except errors.FedcoreError as error:
        return type(error), str(error)


TENSORS = {
    "float32": torch.arange(4.0),
    "float64": torch.arange(4, dtype=torch.float64),
    "float16": torch.arange(4, dtype=torch.float16),
    "bfloat16": torch.arange(4, dtype=torch.bfloat16),
    "a part": torch.arange(9.0)[3:7],
    "no elements": torch.empty(0),
    "strided": torch.arange(8.0)[::2],
    "two axes": torch.ones(2, 2),
    "int64": torch.arange(4),
    "complex": torch.ones(4, dtype=torch.complex64),
    "with a gradient": torch.ones(4, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.ones(4)),
    "a parameter without a gradient": torch.nn.Parameter(torch.ones(4), requires_grad=False),
    "sparse": torch.ones(4).to_sparse(),
    "on no device": torch.ones(4, device="meta"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_c_export_agrees_with_the_python_export(name):
    assert outcome(TENSORS[name]) == outcome(ByPython(TENSORS[name]))


def test_a_conjugate_is_refused():
    older = "export says: .*conjugate bit"  # torch's own refusal, before 2.9
    with pytest.raises((errors.DtypeError, errors.ArrayError), match=f"got another type of 64|{older}"):
        kernels.weighted_sum([torch.ones(4, dtype=torch.complex64).conj()], [1.0], np.zeros(4, np.float32))


def test_a_tensor_is_written_in_place():
    out = torch.zeros(3)
    assert kernels.weighted_sum([torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 1, 1])], [1, 2], out) is out
    assert out.tolist() == [3, 4, 5]


def test_a_view_whose_memory_holds_the_negated_numbers_is_no_output():
    with pytest.raises(errors.ArrayError, match=r"^out\b.*read-only"):
        kernels.weighted_sum([torch.ones(1)], [1], torch.zeros(1, dtype=torch.complex64).conj().imag)


def test_memory_is_released():
    row = torch.ones(4)
    storage = row.untyped_storage()
    before = storage._use_count() if hasattr(storage, "_use_count") else None
    for _ in range(10):
        kernels.weighted_sum([row, row], [1, 1])
        with pytest.raises(errors.ShapeError):
            kernels.weighted_sum([row, torch.ones(5)], [1, 1])
    assert before is None or storage._use_count() == before


class Exchange(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("before", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_of", ctypes.c_void_p),
    )


def capsule(exchange, name=b"dlpack_exchange_api"):
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(ctypes.addressof(exchange), name, None)


NEWER, LACKING = Exchange(major=2, managed_of=1), Exchange(major=1)
OFFERS = {
    "another major version": capsule(NEWER),
    "no function": capsule(LACKING),
    "another capsule": capsule(LACKING, b"dltensor"),
    "no capsule": 3,
    "none": None,
}


@pytest.mark.parametrize("name", OFFERS)
def test_an_unusable_c_export_is_ignored(name):
    kind = type("Offering", (ByPython,), {"__dlpack_c_exchange_api__": OFFERS[name], "requires_grad": False})
    assert outcome(kind(torch.arange(4.0))) == [0, 1, 2, 3]


def test_a_failing_c_export_falls_back_to_python():
    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
    def fails(tensor, out):
        return -1

    exchange = Exchange(major=1, managed_of=ctypes.cast(fails, ctypes.c_void_p).value)
    kind = type("Failing", (ByPython,), {"__dlpack_c_exchange_api__": capsule(exchange), "requires_grad": False})
    KEPT.append((kind, exchange, fails))
    assert outcome(kind(torch.arange(4.0))) == [0, 1, 2, 3]


def test_derived_classes_of_torch_may_export_differently():
    class Doubled(torch.Tensor):
        def __dlpack__(self, **options):
            return (2 * self.as_subclass(torch.Tensor)).__dlpack__(**options)

    row = torch.arange(4.0)
    assert outcome(row.as_subclass(Doubled)) == [0, 2, 4, 6]
    assert outcome(row) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_arrays_of_any_shape_are_tensors_of_a_segment(dtype):
    tensors = [np.arange(24, dtype=dtype).reshape(2, 3, 4), np.array(5, dtype)]
    sums = kernels.weighted_sum_segments([tensors, tensors], [1, 1])
    assert [one.tolist() for one in sums] == [(2 * one).tolist() for one in tensors]
