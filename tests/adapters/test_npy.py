"""The reader of `.npy` bytes agrees with NumPy on what numpy.save writes, and rejects everything else in place."""

import io
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of

from fedcore.adapters import npy
from fedcore.errors import ArrayError, DtypeError, FedcoreError, ShapeError

DTYPES = st.sampled_from(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
SHAPES = of.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)
ARRAYS = DTYPES.flatmap(lambda dtype: of.arrays(np.dtype(dtype), SHAPES))


def saved(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def same(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.tobytes() == other.tobytes()


@given(ARRAYS, st.booleans())
def test_reads_what_numpy_saves(array, fortran):
    array = np.asfortranarray(array) if fortran else array
    same(npy.read(saved(array)), array)


@given(ARRAYS)
def test_writes_what_numpy_saves(array):
    data = npy.write(array)
    same(np.load(io.BytesIO(data), allow_pickle=False), array)
    assert data == saved(np.ascontiguousarray(array).reshape(array.shape))
    assert data.startswith(npy.head(array))


def test_an_array_is_a_read_only_view_of_the_bytes():
    data = saved(np.arange(1000, dtype=np.float32))
    view = npy.read(data)
    assert view.base is data
    assert not view.flags.writeable


def test_bfloat16_as_ml_dtypes_saves_it():
    array = np.array([[1, -2.5, 3e38], [0, np.inf, 1e-40]], ml_dtypes.bfloat16)
    codes = npy.read(saved(array), bfloat16=True)
    same(codes, array.view(np.uint16))
    assert npy.write(codes, bfloat16=True) == saved(array)
    with pytest.raises(DtypeError, match="V2"):
        npy.read(saved(array))


def header(text, data=b"", version=b"\x01\x00", length=None):
    line = text.encode() + b"\n"
    return b"\x93NUMPY" + version + (length or len(line)).to_bytes(2, "little") + line + data


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


def replaced(old, new, size=8):
    return header(GOOD.replace(old, new), bytes(size))


NINES = "9" * 19
MALFORMED = [
    *((data, ArrayError) for data in (b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00")),
    *(
        (header(GOOD, bytes(8), **how), ArrayError)
        for how in (dict(version=b"\x02\x00"), dict(length=60), dict(length=2000))
    ),
    (header(GOOD.replace("(2,)", "(0,)"), length=len(GOOD) + 2), ArrayError),
    (header(GOOD + " " * 2000, bytes(8)), ArrayError),
    *((header(GOOD, bytes(size)), ShapeError) for size in (7, 9)),
    *((replaced("<f4", dtype, size), DtypeError) for dtype, size in (("|O8", 8), ("<c16", 32), (">f4", 8), ("<V2", 4))),
    *((replaced("(2,)", shape), ArrayError) for shape in ("(-2,)", "(2)", "(1, 2,)", "(02,)", "(2L,)", "(True,)")),
    *((replaced("(2,)", shape, size), ShapeError) for shape, size in ((f"({NINES},)", 8), (f"(0, {NINES})", 0))),
    (replaced("(2,)", "(" + ", ".join(["1"] * 33) + ")", 4), ShapeError),
    *((replaced("'<f4'", new), ArrayError) for new in ("'=f4'", "__import__('os')")),
    (replaced(", }", ", 'descr': '<f8', }"), ArrayError),
]


@pytest.mark.parametrize(("data", "error"), MALFORMED)
def test_malformed_bytes_are_an_error(data, error):
    with pytest.raises(error, match=r"^npy\b"):
        npy.read(data)


@st.composite
def nearly_npy(draw):
    """Bytes of numpy.save, some changed, removed or inserted, mostly in the header."""
    data = bytearray(saved(draw(ARRAYS)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, min(len(data), 140)))
        change = draw(st.sampled_from(["change", "cut", "insert"]))
        piece = draw(
            st.sampled_from([b"", b"0", b"9" * 19, b", 1", b"(", b"V2", b"\n", b"'", b"\x00"]) | st.binary(max_size=3)
        )
        if change == "cut":
            del data[at : at + draw(st.integers(1, 8))]
        elif change == "insert":
            data[at:at] = piece
        else:
            data[at : at + len(piece)] = piece
    return bytes(data)


@given(nearly_npy() | st.binary(max_size=300), st.booleans())
def test_any_other_bytes_are_an_error_or_the_array_that_numpy_reads(data, bfloat16):
    check(data, bfloat16)


def check(data, bfloat16):
    """Either fedcore's own error, or NumPy's array, byte by byte, and never memory beyond the message's size."""
    tracemalloc.start()
    try:
        array = npy.read(data, bfloat16=bfloat16)
    except FedcoreError:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**16 + len(data)  # the cache of parsed headers may grow
    theirs = np.load(io.BytesIO(data), allow_pickle=False)
    same(array, theirs.view(np.uint16) if theirs.dtype.kind == "V" else theirs)
    return True
