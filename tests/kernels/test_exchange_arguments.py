"""The arguments that ``exchange`` refuses, by name."""

import numpy as np
import pytest
import torch

from fedcore import errors, kernels
from fedcore.kernels import Codes
from tests.kernels.forms import FORMS
from tests.kernels.rows import empty, random_keys


def one(**change):
    """An exchange of one client with 8 elements."""
    given_ = dict(base=None, y=np.zeros(8, np.float32), old=None, anchor=None, new=np.zeros(8, np.float32))
    given_ |= dict(form=FORMS["replaced"], keys=random_keys(1, 0)) | change
    client = (
        [given_["base"]],
        [given_["y"]],
        np.ones(1),
        np.ones(1),
        [given_["old"]],
        [given_["anchor"]],
        [given_["new"]],
    )
    return kernels.exchange(np.zeros(8), *client, out=np.zeros(8), **given_["form"], keys=given_["keys"])


BYTES = np.zeros(64, np.uint8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            dict(y=np.zeros(8, np.int8)),
            errors.DtypeError,
            r"ys\[0\]: expected float32 or float64 or float16 or bfloat16\[8\]",
        ),
        (dict(y=torch.zeros(7).bfloat16()), errors.ShapeError, r"ys\[0\]: .*\[8\], got bfloat16\[7\]"),
        (dict(base=np.zeros(8)), errors.DtypeError, r"bases\[0\]: expected float32\[8\], got float64\[8\]"),
        (dict(keys=np.zeros(2)), errors.DtypeError, "keys: expected uint64 of 2 elements, got float64"),
        (
            dict(keys=None, new=empty("bf16", 8)),
            errors.ArrayError,
            r"keys: expected uint64\[k, 2\], because new_rows\[0\] is rounded stochastically, got None",
        ),
        (dict(keys=np.zeros((2, 2), np.uint64)), errors.ShapeError, "keys: expected uint64 of 2 elements, got"),
        (dict(new=empty("int8", 9)), errors.ShapeError, r"new_rows\[0\]\.codes: expected int8\[8\], got int8\[9\]"),
        (
            dict(new=empty("int8", 8)._replace(scales=None)),
            errors.ArrayError,
            r"new_rows\[0\]\.scales: expected an array",
        ),
        (
            dict(old=empty("bf16", 8)._replace(scales=np.zeros(1))),
            errors.ArrayError,
            r"old_rows\[0\]\.scales: expected an",
        ),
        (
            dict(old=empty("bf16", 8)._replace(codec="int4")),
            errors.UnknownNameError,
            "codec: expected bf16, f16 or int8",
        ),
        (dict(old=(1, 2)), errors.ArrayError, r"old_rows\[0\]: expected float32\[n\] or Codes, got another tuple"),
        (dict(old=(1, 2, 3)), errors.ArrayError, r"old_rows\[0\]\.codec: expected a name"),
        (
            dict(y=BYTES[:32].view(np.float32), new=empty("int8", 8)._replace(codes=BYTES[8:16].view(np.int8))),
            errors.ArrayError,
            r"new_rows\[0\]\.codes: must not overlap ys\[0\]",
        ),
        (
            dict(old=Codes("bf16", BYTES[:16].view(np.uint16)), new=Codes("f16", BYTES[2:18].view(np.uint16))),
            errors.ArrayError,
            r"new_rows\[0\]\.codes: must not overlap old_rows\[0\]\.codes",
        ),
        (
            dict(old=Codes("bf16", BYTES[:16].view(np.uint16)), new=BYTES[:32].view(np.float32)),
            errors.ArrayError,
            r"new_rows\[0\]: must not overlap old_rows\[0\]\.codes",
        ),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        one(**change)


def test_a_new_row_over_anything_else_is_refused():
    row = np.zeros(8, np.float32)
    with pytest.raises(errors.ArrayError, match=r"new_rows\[0\]: must not overlap ys\[0\]"):
        one(y=row, new=row)
    with pytest.raises(errors.ArrayError, match=r"new_rows\[1\]: must not overlap new_rows\[0\]"):
        ys = [np.ones(8, np.float32)] * 2
        kernels.exchange(
            np.zeros(8), [None] * 2, ys, np.ones(2), np.ones(2), [None] * 2, [None] * 2, [row] * 2, out=np.zeros(8)
        )
    np.testing.assert_array_equal(row, np.zeros(8))


def test_only_the_row_that_is_replaced_may_be_overwritten():
    """A new row over an array that another client still has to read would change that client's gradient."""
    shared = np.ones(8, np.float32)
    ys = [np.zeros(8, np.float32), shared]
    new = [shared, np.empty(8, np.float32)]
    with pytest.raises(errors.ArrayError, match=r"new_rows\[0\]: must not overlap"):
        kernels.exchange(
            np.zeros(8), [None] * 2, ys, np.ones(2), np.ones(2), [shared, None], [None] * 2, new, out=np.zeros(8)
        )
    np.testing.assert_array_equal(shared, np.ones(8))
