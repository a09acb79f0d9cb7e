"""Arguments that a kernel rejects by name; ``test_hostile_arrays`` tries the same wrong arrays on all kernels."""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
import torch

import fedcore
from fedcore import errors, kernels
from fedcore.errors import ArrayError, DtypeError, RangeError, ShapeError, UnknownNameError
from fedcore.kernels import Codes, ExactSum
from tests.kernels.arrays import FORMS, empty, empty_row, random_keys, vectors
from tests.kernels.cases import RULES, STEP

SINGLE, DOUBLE, HALF = np.ones(4, np.float32), np.ones(4), np.ones(4, np.float16)
ONE, FIVE, WORDS, BYTES = np.ones(1), np.full(5, 7, np.float32), ExactSum.zeros(4), np.zeros(64, np.uint8)


def weighted_sum(**change):
    return kernels.weighted_sum(**(dict(rows=[SINGLE] * 2, weights=[1, 1], out=np.full(4, 7, np.float32)) | change))


def of_halves(**change):
    return weighted_sum(**(dict(rows=[HALF] * 2, out=np.full(4, 7, np.float16)) | change))


def segments(models, **options):
    return kernels.weighted_sum_segments(models, [1] * len(models), **options)


def accumulate(ys, out=None, partials=None):
    out, ones = np.zeros(5) if out is None else out, np.ones(len(ys))
    return kernels.accumulate(None, [None] * len(ys), ys, ones, ones, out=out, partials=partials)


def accumulate_exact(acc=None, out=WORDS):
    return kernels.accumulate(acc, [None], [SINGLE], ONE, ONE, out=out)


def exchange(**change):
    """An exchange of one client with 8 elements."""
    one = dict(base=None, y=np.zeros(8, np.float32), old=None, anchor=None, new=np.zeros(8, np.float32))
    one |= dict(keys=random_keys(1, 0)) | change
    client = [one["base"]], [one["y"]], ONE, ONE, [one["old"]], [one["anchor"]], [one["new"]]
    more = {name: one[name] for name in ("sums", "first") if name in one}
    return kernels.exchange(np.zeros(8), *client, out=np.zeros(8), **FORMS["replaced"], keys=one["keys"], **more)


def server_step(**change):
    names = dict.fromkeys(("total", "sum", "control", "total_out"), np.float64)
    names |= dict.fromkeys(("x", "momentum", "v", "x_out"), np.float32)
    return kernels.server_step(**({name: np.zeros(4, dtype) for name, dtype in names.items()} | STEP | change))


def optimizer_step(**change):
    arrays = {name: np.ones(4, np.float32) for name in ("v", "m", "s", "x", "m_out", "s_out", "x_out")}
    return kernels.optimizer_step(**(arrays | change), gamma=0.1, **RULES["adam"])


def direction_step(**change):
    return kernels.direction_step(**(dict(y=np.zeros(4, np.float32), grad=SINGLE, lr=0.1) | change))


def mix(**change):
    return kernels.mix(**(dict(models=vectors(2, 4), W=np.eye(2)) | change))


def rows_of(starts, columns, data):
    return SimpleNamespace(indptr=starts, indices=columns, data=data)


def quantise(**change):
    return kernels.quantise(**(dict(x=np.zeros(4, np.float32), codec="bf16") | change))


def codes(codec, n, scales=None):
    return Codes(codec, np.zeros(n, np.int8 if codec == "int8" else np.uint16), scales)


def view(start, stop, dtype):
    return BYTES[start:stop].view(dtype)


def tensors(*sizes):
    return [np.ones(size, np.float32) for size in sizes]


REFUSED = {
    weighted_sum: [
        (dict(weights=np.ones(2)), DtypeError, r"weights: .* float64\[2\]"),
        (dict(weights=np.ones(3, np.float32)), ShapeError, r"weights: .* float32\[3\]"),
        (dict(weights=HALF[:2], accumulate="float64"), DtypeError, r"weights: .* float16\[2\]"),
        (dict(accumulate="double"), UnknownNameError, "accumulate: 'double'"),
        (dict(out=np.zeros((4, 1), np.float32)), ShapeError, r"float32\[4, 1\]"),
        (dict(out=[0.0] * 4), ArrayError, "out: .* list"),
        (dict(out=FIVE[:4], base=FIVE[:4]), ArrayError, "out: must not overlap base"),
        (dict(rows=[SINGLE, SINGLE[:3]]), ShapeError, r"rows\[1\]: "),
        (dict(rows=[np.ones(4, ">f4")] * 2), DtypeError, r"rows\[0\]: .* >f4\[4\]"),
        (dict(rows=[torch.ones(4, dtype=torch.int16)] * 2), DtypeError, r"rows\[0\]: .* int16\[4\]"),
        (dict(rows=[torch.ones(4, 2)[:, 0]] * 2), ShapeError, r"rows\[0\]: .* not contiguous"),
        (dict(rows=np.ones((2, 4), np.float32)), ArrayError, "rows: .* ndarray"),
        (dict(rows=[SINGLE, HALF]), DtypeError, r"rows\[1\]: expected float32.* float16"),
        (dict(rows=[DOUBLE, HALF]), DtypeError, r"rows\[1\]: expected float64.* float16"),
        (dict(rows=[], weights=[], out=None), ShapeError, "rows: must not be empty"),
        *(
            (dict(rows=[np.ones(4, dtype)] * 2, out=out), DtypeError, rf"rows\[0\]: .* {np.dtype(dtype).name}\[4\]")
            for dtype in ("int8", "uint16", "int32", "int64", "bool", "complex64", "longdouble")
            for out in (None, np.ones(4, np.float32))
        ),
    ],
    of_halves: [
        (dict(rows=[HALF, SINGLE]), DtypeError, r"rows\[1\]: expected float16.* float32"),
        (dict(rows=[HALF, HALF[:3]]), ShapeError, r"rows\[1\]: .* float16\[3\]"),
        (dict(rows=[np.ones(8, np.float16)[::2]] * 2), ShapeError, r"rows\[0\]: .* not contiguous"),
        (dict(rows=[torch.ones(8, dtype=torch.bfloat16)[::2]] * 2), ShapeError, r"rows\[0\]: .* not contiguous"),
        (dict(rows=[np.ones((2, 2), np.float16)] * 2), ShapeError, r"rows\[0\]: "),
        (dict(rows=[np.ones(4, ">f2")] * 2), DtypeError, r"rows\[0\]: .* >f2\[4\]"),
        (dict(out=np.zeros(4)), DtypeError, r"out: expected float32 or float16.* float64"),
        (dict(out=torch.zeros(4).bfloat16()), DtypeError, "out: .* bfloat16"),
        (dict(out=np.zeros(5, np.float16)), ShapeError, r"out: .* float16\[5\]"),
        (dict(out=np.zeros(8, np.float16)[::2]), ShapeError, "out: .* not contiguous"),
        (dict(out=np.frombuffer(bytes(8), np.float16)), ArrayError, "out: .* read-only"),
        (dict(base=DOUBLE), DtypeError, r"base: .* float64\[4\]"),
        (dict(base=HALF), DtypeError, r"base: .* float16\[4\]"),
        (dict(base=SINGLE[:3]), ShapeError, r"base: .* float32\[3\]"),
        (dict(base=np.ones(8, np.float32)[::2]), ShapeError, "base: .* not contiguous"),
        (dict(weights=np.ones(2)), DtypeError, r"weights: .* float64\[2\]"),
    ],
    segments: [
        (dict(models=[[SINGLE, HALF], [SINGLE, SINGLE]]), DtypeError, r"models\[1\]\[1\]: expected float16 of 4"),
        (dict(models=[tensors(6), tensors(4)]), ShapeError, r"models\[1\]\[0\]: expected float32 of 6"),
        (dict(models=[tensors(6, 4), tensors(6)]), ShapeError, "expected 2 entries, got 1"),
        (dict(models=[[np.ones(4, np.int8)]], outs=tensors(4)), DtypeError, r"models\[0\]\[0\]: .* int8\[4\]"),
        (dict(models=[[HALF]], outs=[np.ones(4)]), DtypeError, r"outs\[0\]: expected float32 or float16 of 4"),
        (dict(models=[tensors(6, 4)], base=tensors(6)), ShapeError, "expected 2 entries, got 1"),
        (dict(models=[tensors(6, 4)], base=tensors(6, 5)), ShapeError, r"base\[1\]: .* float32\[5\]"),
        (
            dict(models=[[SINGLE, SINGLE]], outs=[empty(4, "float32"), SINGLE]),
            ArrayError,
            r"outs\[1\]: must not overlap",
        ),
        (dict(models=[]), ShapeError, "models: must not be empty"),
    ],
    accumulate: [
        (dict(ys=[np.zeros(5, np.float16), np.zeros(5, np.int32)]), DtypeError, r"ys\[1\]: .* int"),
        (dict(ys=[tensors(2, 3), tensors(2, 2)]), ShapeError, r"ys\[1\]\[1\]: expected .* of 3 elements"),
        (dict(ys=[tensors(2, 3), tensors(2)]), ShapeError, r"ys\[1\]: expected 2 entries, got 1"),
        (dict(ys=[tensors(2), tensors(2, 3)]), ShapeError, r"ys\[0\]: expected tensors of 5 elements"),
        (dict(ys=[tensors(2, 3), [*tensors(2), np.ones(3, np.int32)]]), DtypeError, r"ys\[1\]\[1\]: "),
        (
            dict(ys=[tensors(2, 3), [*tensors(2), FIVE[2:]]], out=FIVE),
            ArrayError,
            r"out: must not overlap ys\[1\]\[1\]",
        ),
        (dict(ys=[tensors(2, 3), SINGLE]), ShapeError, r"ys\[1\]: "),
        (dict(ys=[], out=np.ones((2, 2), np.float32)), ShapeError, "out: "),
        (dict(ys=tensors(5), partials=np.empty((2, 1))), ShapeError, "partials: expected float64 of 1 "),
        (dict(ys=tensors(5), partials=np.empty((1, 1), np.float32)), DtypeError, "partials: .* float32"),
        (dict(ys=tensors(1), out=DOUBLE[:1], partials=DOUBLE[:1]), ArrayError, "partials: must not overlap out"),
        (dict(ys=tensors(5), partials=np.frombuffer(bytes(8))), ArrayError, "partials: .* read-only"),
    ],
    accumulate_exact: [
        (dict(acc=np.zeros(4)), ArrayError, "acc: must be an ExactSum"),
        (dict(acc=ExactSum(WORDS.high, np.zeros(4))), DtypeError, r"acc\.low: .* float64"),
        (dict(out=ExactSum(WORDS.high, np.zeros(5, np.int64))), ShapeError, r"out\.low: .* int64\[5\]"),
        (dict(acc=WORDS, out=ExactSum(WORDS.high, np.zeros(4, np.int64))), ArrayError, "out: must be both words"),
        (dict(acc=WORDS, out=ExactSum(WORDS.low, WORDS.high)), ArrayError, "must not overlap"),
        (dict(out=ExactSum(WORDS.high, WORDS.high)), ArrayError, "must not overlap"),
    ],
    kernels.combine_exact: [
        (dict(terms=[], coefficients=[]), ShapeError, "terms: "),
        (dict(terms=[WORDS], coefficients=[2**31 + 1]), RangeError, "coefficients: "),
        (dict(terms=[WORDS, np.zeros(4)], coefficients=[1, 1]), DtypeError, r"terms\[1\]: .* float64"),
    ],
    kernels.read_exact: [(dict(sum=WORDS, out=np.zeros(4, np.int32)), DtypeError, "out: expected float32 or float64")],
    exchange: [
        (dict(y=np.zeros(8, np.int8)), DtypeError, r"ys\[0\]: "),
        (dict(y=torch.zeros(7).bfloat16()), ShapeError, r"ys\[0\]: .* bfloat16\[7\]"),
        (dict(base=np.zeros(8)), DtypeError, r"bases\[0\]: .* float64"),
        (dict(keys=np.zeros(2)), DtypeError, "keys: .* float64"),
        (dict(keys=None, new=empty_row("bf16", 8)), ArrayError, r"keys: .* new_rows\[0\] .* got None"),
        (dict(keys=np.zeros((2, 2), np.uint64)), ShapeError, "keys: "),
        (dict(new=empty_row("int8", 9)), ShapeError, r"new_rows\[0\]\.codes: .* int8\[9\]"),
        (dict(new=empty_row("int8", 8)._replace(scales=None)), ArrayError, r"new_rows\[0\]\.scales: "),
        (dict(old=empty_row("bf16", 8)._replace(scales=np.zeros(1))), ArrayError, r"old_rows\[0\]\.scales: "),
        (dict(old=empty_row("bf16", 8)._replace(codec="int4")), UnknownNameError, "codec: "),
        (dict(old=(1, 2)), ArrayError, r"old_rows\[0\]: "),
        (dict(old=(1, 2, 3)), ArrayError, r"old_rows\[0\]\.codec: "),
        (dict(new=empty_row("bf16", 8), sums=np.zeros((1, 1), np.uint64)), ArrayError, r"sums: .* new_rows\[0\]"),
        (dict(new=empty_row("int8", 8), first=-64), RangeError, "first: "),
        (
            dict(y=view(0, 32, np.float32), new=empty_row("int8", 8)._replace(codes=view(8, 16, np.int8))),
            *(ArrayError, r"new_rows\[0\]\.codes: must not overlap ys\[0\]"),
        ),
        (
            dict(old=Codes("bf16", view(0, 16, np.uint16)), new=Codes("f16", view(2, 18, np.uint16))),
            *(ArrayError, r"new_rows\[0\]\.codes: must not overlap old_rows\[0\]\.codes"),
        ),
        (
            dict(old=Codes("bf16", view(0, 16, np.uint16)), new=view(0, 32, np.float32)),
            *(ArrayError, r"new_rows\[0\]: must not overlap old_rows\[0\]\.codes"),
        ),
    ],
    server_step: [
        (dict(momentum=DOUBLE), DtypeError, "momentum: .* float64"),
        (dict(control=np.zeros(3)), ShapeError, r"control: .* float64\[3\]"),
        (dict(total_out=None), ArrayError, "total_out: "),
        (dict(x=SINGLE, v=SINGLE), ArrayError, "v: must not overlap x"),
    ],
    optimizer_step: [
        (dict(m=np.ones(5, np.float32)), ShapeError, r"m: .* float32\[5\]"),
        (dict(s=DOUBLE), DtypeError, "s: .* float64"),
        (dict(v=DOUBLE), DtypeError, "v: .* float64"),
        (dict(s=None), ArrayError, "s_out: "),
        (dict(x_out=np.frombuffer(bytes(16), np.float32)), ArrayError, "x_out: .* read-only"),
        (dict(v=SINGLE, x_out=SINGLE), ArrayError, "x_out: must not overlap v"),
    ],
    direction_step: [
        (dict(b=1.0), ArrayError, "grad_prev: .* b != 0"),
        (dict(mu=1.0), ArrayError, "x: .* mu != 0"),
        (dict(offset=np.ones(5, np.float32)), ShapeError, "offset: "),
    ],
    kernels.combine: [
        (dict(terms=[], coefficients=[]), ShapeError, "terms: "),
        (dict(terms=[SINGLE], coefficients=[1, 2]), ShapeError, r"coefficients: .* float64\[2\]"),
        (dict(terms=[np.arange(3)], coefficients=[1]), DtypeError, r"terms\[0\]: .* int64"),
        (dict(terms=[SINGLE, SINGLE[1:]], coefficients=[1, 1]), ShapeError, r"terms\[1\]: "),
        (
            dict(terms=[SINGLE + 1, SINGLE], coefficients=[1, 1], out=SINGLE),
            ArrayError,
            r"out: must not overlap terms\[1\]",
        ),
    ],
    mix: [
        (dict(W=np.ones((2, 3))), ShapeError, r"W: .* \[2, 3\]"),
        (dict(W=np.ones(2)), ShapeError, r"W: .* \[2\]"),
        (dict(W=np.ones((2, 2), int)), DtypeError, "W: .* int64"),
        (dict(W=[[1, np.nan], [0, 1]]), RangeError, "W: .* finite"),
        (dict(W=[[1, 1e300], [0, 1]]), RangeError, "W: .* finite in float32"),
        (dict(W=scipy.sparse.eye_array(3)), ShapeError, "W: .* 3 rows"),
        (dict(W=rows_of([0, 3, 4], [1, 0, 1], np.ones(3))), RangeError, "W: indptr"),
        (dict(W=rows_of([0, 1, 2], [0, 2], np.ones(2))), RangeError, r"columns\[1\]: expected 0\.\.1, got 2"),
        (dict(models=tensors(4, 3)), ShapeError, r"models\[1\]: "),
        (dict(models=[SINGLE[:2], np.ones(2)]), DtypeError, r"models\[1\]: .* float64"),
        (dict(models=np.ones((2, 4), np.float32)), ArrayError, "models: expected a list or tuple"),
        (dict(models=[SINGLE[:3], SINGLE[1:]]), ArrayError, r"models\[1\]: must not overlap models\[0\]"),
    ],
    quantise: [
        (dict(codec="int4"), UnknownNameError, "codec: 'int4' is unknown.*bf16, f16, int8"),
        (dict(x=np.zeros(4)), DtypeError, "x: .* float64"),
        (dict(seed=-1), RangeError, "seed=-1"),
        (dict(row=2**64), RangeError, "row=18446744073709551616"),
        *((dict(first=first), RangeError, "first") for first in (-64, 2**63, None)),
        (dict(first=32), RangeError, "first: expected a multiple of 64"),
        (dict(first=2**62 + 64), RangeError, "first=4611686018427387968: must be"),
        (dict(x=np.zeros(128, np.float32), first=2**32 - 64), RangeError, "first: expected a multiple of 16,384"),
        (dict(out=codes("f16", 4)), DtypeError, "out: expected codes of bf16, got codes of f16"),
        (dict(out=codes("bf16", 5)), ShapeError, r"codes: .* uint16\[5\]"),
        (dict(out=Codes("bf16", np.zeros(4, np.int16))), DtypeError, r"codes: .* int16\[4\]"),
        (dict(out=codes("bf16", 4, np.zeros(1))), ArrayError, "scales: expected an array exactly where"),
        (dict(codec="int8", out=codes("int8", 4)), ArrayError, "scales: expected an array exactly where"),
        (dict(codec="int8", out=codes("int8", 4, np.zeros(2, np.float32))), ShapeError, r"scales: .* float32\[2\]"),
        (
            dict(x=view(0, 32, np.float32), out=Codes("bf16", view(0, 16, np.uint16))),
            ArrayError,
            "codes: must not overlap x",
        ),
    ],
    kernels.dequantise: [
        (
            dict(coded=Codes("bf16", view(0, 16, np.uint16)), out=view(0, 32, np.float32)),
            ArrayError,
            "out: must not overlap",
        ),
        (dict(coded=Codes("int4", SINGLE)), UnknownNameError, "codec: 'int4'"),
    ],
    kernels.squared_norms: [(dict(rows=tensors(3, 4)), ShapeError, r"rows\[1\]: .* float32\[4\]")],
}


def contents(value):
    """The bytes of all arrays in an argument, at any depth."""
    if isinstance(value, list | tuple | dict):
        return [contents(one) for one in (value.values() if isinstance(value, dict) else value)]
    return np.array(value.float().numpy() if isinstance(value, torch.Tensor) else value).tobytes()


@pytest.mark.parametrize(
    ("function", "change", "error", "message"),
    [(function, *row) for function, found in REFUSED.items() for row in found],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_bad_argument_is_named_and_nothing_is_written(function, change, error, message):
    before = contents(change)
    with pytest.raises(error, match=message):
        function(**change)
    assert contents(change) == before
    if function in (weighted_sum, of_halves):
        with pytest.raises(error, match=message):
            function(**change, norms=True)
    if function is kernels.combine and "out" not in change:
        with pytest.raises(error, match=message):
            kernels.combined_square(**change)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_sum_over_one_of_its_arguments_is_refused(dtype):
    row, x = torch.ones(6, dtype=getattr(torch, dtype)), np.ones(6, np.float32)
    for match, rows, weights, out, base in (
        (r"out: must not overlap rows\[1\]", [row.clone(), row], [1, 1], row, None),
        (r"out: must not overlap rows\[0\]", [row[:4]], [1], row[2:], None),
        ("out: must not overlap base", [row], [1], x, x),
        ("out: must not overlap weights", [row], x[:1], x, None),
    ):
        with pytest.raises(errors.ArrayError, match=match):
            kernels.weighted_sum(rows, weights, out, base=base)
    with pytest.raises(errors.ArrayError, match=r"outs\[1\]: must not overlap base\[0\]"):
        segments([[row, row]], outs=[np.empty(6, np.float32), x], base=[x, x.copy()])


def test_a_new_row_over_an_array_of_another_client_is_refused():
    row, y = np.ones(8, np.float32), np.zeros(8, np.float32)
    for match, ys, old, new in (
        (r"new_rows\[0\]: must not overlap ys\[0\]", [row, y], [None, None], [row, y.copy()]),
        (r"new_rows\[1\]: must not overlap new_rows\[0\]", [y, y], [None, None], [row, row]),
        (r"new_rows\[0\]: must not overlap", [y, row], [row, None], [row, y.copy()]),  # which the second still reads
    ):
        given = [None, None], ys, np.ones(2), np.ones(2), old, [None, None], new
        with pytest.raises(errors.ArrayError, match=match):
            kernels.exchange(np.zeros(8), *given, out=np.zeros(8))
        np.testing.assert_array_equal(row, np.ones(8))


FACES = [
    name
    for file in Path(kernels.__file__).parent.glob("*.py")
    for name in re.findall(r"^@native\ndef (\w+)", file.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("name", sorted(FACES))
def test_a_declaration_has_the_parameters_of_the_native_function(name):
    stub = ast.parse(Path(fedcore.__file__).with_name("_core.pyi").read_text())
    (native,) = (node for node in stub.body if getattr(node, "name", None) == name)
    declared = inspect.signature(getattr(kernels, name)).parameters
    by_position = [one.name for one in declared.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert by_position == [one.arg for one in native.args.args]
    by_name = {one.name: one.default for one in declared.values() if one.kind is one.KEYWORD_ONLY}
    assert [*by_name] == [one.arg for one in native.args.kwonlyargs]
    for default, found in zip(by_name.values(), native.args.kw_defaults, strict=True):
        due = inspect.Parameter.empty if found is None else ast.literal_eval(found)
        assert (list(default) if isinstance(default, tuple) else default) == (
            list(due) if due.__class__ is tuple else due
        )
