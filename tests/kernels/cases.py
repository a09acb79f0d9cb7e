"""Calls of each kernel for every dtype, codec and form, and their comparison with the oracle."""

from contextlib import contextmanager
from itertools import product
from unittest import mock

import numpy as np
import torch

from fedcore import kernels
from fedcore.arrays import core
from fedcore.kernels import ExactSum, Linear
from tests import oracle
from tests.kernels import arrays
from tests.kernels.arrays import CODECS, DTYPES, FORMS, LOW, assert_same_bits, empty_row, random_keys


class Norms(list):
    """Squared norms: equal to 1e-5, and finite in the same places."""


@contextmanager
def on_oracle():
    """Make the functions of ``fedcore.kernels`` call the oracle instead of the native module."""
    names = {name: getattr(oracle, name) for name in oracle.__all__ if hasattr(core, name)}
    with mock.patch.multiple(core, **names), np.errstate(all="ignore"):
        yield


def assert_as_defined(call):
    """Run ``call`` natively and on the oracle, and compare the results: lists of arrays, rows, exact sums and norms."""
    found = call()
    with on_oracle():
        due = call()
    assert len(found) == len(due)
    for one, other in zip(found, due, strict=True):
        assert_equal(one, other)
    return found


def assert_equal(found, due):
    if isinstance(due, Norms):
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(due))
        finite = np.isfinite(due)
        np.testing.assert_allclose(np.array(found)[finite], np.array(due)[finite], rtol=1e-5)
    elif isinstance(due, tuple):
        for part, of_due in zip(found, due, strict=True):
            assert_equal(part, of_due)
    elif isinstance(due, np.ndarray | torch.Tensor):
        assert_same_bits(found, due)
    else:
        assert found == due


def weighted_sum(g, dtype, base, accumulate):
    found, options = [], dict(base=g() if base else None, accumulate=accumulate)
    for k in (0, 1, 4, 8, 9) if g.n < 10_000 else (9,):
        given, weights = g.many(k, dtype), g.rng.normal(size=k).astype(np.float32)
        for out_dtype, wide in product((dtype, "float32"), (False, True)):
            out, measured = arrays.empty(g.n, out_dtype), arrays.empty(g.n, out_dtype)
            of = weights.astype(np.float64) if wide and accumulate == "float64" else weights
            kernels.weighted_sum(given, of, out, **options)
            summed = kernels.weighted_sum(given, of, measured, norms=True, **options)
            assert_same_bits(measured, out)
            found += [out, Norms([*summed.squared_norms, summed.squared_norm_of_sum])]
    return found


def weighted_sum_segments(g, base, accumulate):
    dtypes, shapes = [*DTYPES, "float32"], [(g.n,), (), (0,), (2, g.n), (g.n + 3, 1)]

    def model(dtypes):
        made = [g(dtype, int(np.prod(shape))) for dtype, shape in zip(dtypes, shapes, strict=True)]
        return [tensor.reshape(shape) for tensor, shape in zip(made, shapes, strict=True)]

    models, weights, options = (
        [model(dtypes) for _ in range(9)],
        g.rng.random(9, np.float32),
        dict(accumulate=accumulate),
    )
    options["base"] = model(["float32"] * 5) if base else None
    outs = [arrays.empty(shape, dtype) for dtype, shape in zip(dtypes, shapes, strict=True)]
    kernels.weighted_sum_segments(models, weights, outs, **options)
    summed = kernels.weighted_sum_segments(models, weights, norms=True, **options)
    return [*outs, *summed.sum, Norms([*summed.squared_norms, summed.squared_norm_of_sum])]


def sent(g, k, dtypes=DTYPES):
    """The updates of k clients, of alternating dtypes, from one model or as differences, with scales and weights."""
    x, ys = g(), [g(dtypes[i % len(dtypes)]) for i in range(k)]
    return [None if i % 5 == 1 else x for i in range(k)], ys, g.rng.uniform(0.5, 7, k), g.rng.uniform(-1, 3, k)


def in_tensors(y):
    """A vector as a list of tensors."""
    n = len(y)
    parts = y[: n // 3], y[n // 3 : n // 3], y[n // 3 :][: n // 2], y[n // 3 :][n // 2 :]
    return [parts[0].reshape(1, -1), *parts[1:]]


def accumulate(g, dtype, kind):
    (bases, ys, scales, weights), acc, found = sent(g, 9), g(dtype), []
    if kind == "of one base":
        bases, ys = [bases[0]] * 9, [y.astype("float32") if isinstance(y, np.ndarray) else y.float() for y in ys]
    if kind == "in tensors":
        ys = [y if i % 3 == 1 else in_tensors(y) for i, y in enumerate(ys)]
    for start, k in product((acc, None), (0, 1, 3, 9)):
        out = arrays.empty(g.n, dtype)
        found += [out, Norms(kernels.accumulate(start, bases[:k], ys[:k], scales[:k], weights[:k], out=out))]
    return [*found, Norms(kernels.accumulate(acc, bases, ys, scales, weights, out=acc)), acc]


def exact_sum(g):
    return ExactSum(g.rng.integers(-(2**40), 2**40, g.n), g.rng.integers(0, LOW, g.n))


def exact_sent(g, k):
    """Updates of 16 orders of magnitude, their bases, scales and weights."""
    x = g()
    ys = [(x - g() * 10.0 ** g.rng.uniform(-12, 4, g.n)).astype(np.float32) for _ in range(k)]
    return [x if i % 4 else None for i in range(k)], ys, g.rng.uniform(0.5, 3, k), g.rng.uniform(0.1, 400, k)


# A scale of 1 or not, bases or none, and weights whose products are exact or not take other loops.
EXACT = {
    "any": {},
    "no base": dict(base=None),
    "scale 1": dict(scale=1.0),
    "short weights": dict(scale=1.0, weights=lambda k: np.arange(k) * 37.0),
    "short weights, no base": dict(scale=0.75, weights=lambda k: np.arange(k) * 37.0, base=None),
    "longest short weights": dict(scale=1.0, weights=lambda k: np.full(k, 400 + 2.0**-20)),
    "a bit more": dict(scale=0.75, weights=lambda k: np.full(k, 400 + 2.0**-21)),
}


def exact_given(g, k, **fixed):
    bases, ys, scales, weights = exact_sent(g, k)
    if fixed:
        bases = [fixed.get("base", ys[0])] * k
        scales = np.full(k, fixed["scale"]) if "scale" in fixed else scales
        weights = fixed["weights"](k) if "weights" in fixed else weights
    return bases, ys, scales, weights


def accumulate_exact(g, fixed):
    acc, (bases, ys, scales, weights), found = exact_sum(g), exact_given(g, 11, **fixed), []
    for start, k in ((acc, 0), (acc, 1), (acc, 3), (acc, 8), (None, 11), (acc, 11)):
        out = arrays.exact(g.n)
        norms = kernels.accumulate(start, bases[:k], ys[:k], scales[:k], weights[:k], out=out)
        found += [tuple(out), Norms(norms)]
    kernels.accumulate(acc, bases, ys, scales, weights, out=acc)
    return [*found, tuple(acc)]


def exchange_exact(g, codec, form, fixed):
    acc, (bases, ys, scales, weights) = exact_sum(g), exact_given(g, 7, **fixed)
    ys = [np.clip(y, -100, 100) for y in ys]
    weights[2:4] = 0, -weights[3]
    old = [stored(g(), codec) if i % 3 else None for i in range(7)]
    anchors = [g() if i % 3 == 1 or form == "control" else None for i in range(7)]
    new, out = [empty_row(codec, g.n) for _ in old], arrays.exact(g.n)
    given = acc, bases, ys, scales, weights, old, anchors, new
    return [Norms(kernels.exchange(*given, out=out, keys=random_keys(7, g.n), **FORMS[form])), tuple(out), *new]


def combine_exact(g, times):
    words = [ExactSum(g.rng.integers(-(2**24), 2**24, g.n), g.rng.integers(0, LOW, g.n)) for _ in range(2)]
    vector = (g() * 10.0 ** g.rng.uniform(-20, 1, size=g.n)).astype(np.float32)
    out, turned = arrays.exact(g.n), arrays.exact(g.n)
    fits = [
        kernels.combine_exact([*words, vector], times, out) is not None,
        kernels.combine_exact([words[1], vector, words[0]], [*times[1:], times[0]], turned) is not None,
    ]
    kernels.combine_exact([*words, vector], times, words[0])
    return [*fits, tuple(out), tuple(turned), tuple(words[0])]


def read_exact(g):
    high = g.rng.integers(-(2**62), 2**62, g.n) >> g.rng.integers(0, 62, g.n)
    sum = ExactSum(high, g.rng.integers(0, LOW, g.n) >> g.rng.integers(0, 50, g.n))
    return [kernels.read_exact(sum, np.empty(g.n, dtype)) for dtype in (np.float64, np.float32)]


def stored(x, codec):
    """A row of those numbers, made by the oracle, so that both calls have the same rows."""
    with on_oracle():
        return x if codec == "f32" else kernels.quantise(x, codec)


def exchange_given(g, k, codecs, *, dtypes=DTYPES, anchors_alone=True):
    """An exchange's arguments up to the anchors, with alternating dtypes, codecs and missing rows or anchors."""
    bases, ys, scales, weights = sent(g, k, dtypes)
    kinds = [(0, 0), (1, 0), (1, 1), (0, 1)][: 4 if anchors_alone else 3]
    has_row, has_anchor = zip(*(kinds[i % len(kinds)] for i in range(k)), strict=True) if k else ((), ())
    old = [stored(g(), codecs[i // 3 % len(codecs)]) if has_row[i] else None for i in range(k)]
    return g("float64"), bases, ys, scales, weights, old, [g() if has else None for has in has_anchor]


def exchange(g, codecs, form):
    dtypes = DTYPES[:2] if g.kind == "huge" else DTYPES
    found = []
    for k in (1, 6, 9) if g.n < 10_000 else (6,):
        given, new = (
            exchange_given(g, k, codecs, dtypes=dtypes),
            [empty_row(codecs[i % len(codecs)], g.n) for i in range(k)],
        )
        out, partials = np.empty(g.n), np.zeros((-(-g.n // 16_384), k))
        sums = np.zeros((k, len(partials)), np.uint64) if codecs == ["f32"] else None
        options = dict(keys=random_keys(k, g.n), partials=partials, sums=sums, **FORMS[form])
        found += [Norms(kernels.exchange(*given, new, out=out, **options)), out, *new, Norms(partials.ravel()), sums]
    return found


STEP = dict(v_of=Linear(A=0.3, B=0.4, T=-0.7, g=1.1), total_of=Linear(A=1.5, B=0.6, T=1.2, g=0.7, v=-2.5), gamma=0.9)


def server_step(g, dtype, with_total, with_momentum, with_control):
    given = g(dtype), g("float64") if with_total else None, g()
    more = dict(momentum=g() if with_momentum else None, control=g("float64") if with_control else None)
    v, x_out, total_out = g(), g(), g("float64") if with_total else None
    squares = kernels.server_step(*given, v=v, total_out=total_out, x_out=x_out, **more, **STEP)
    return [v, x_out, total_out, Norms(squares)]


RULES = {
    "momentum": dict(from_m=0.9, from_v=1.0),
    "adagrad": dict(from_m=0.3, from_v=0.7, from_s=1.0, from_square=1.0, tau=1e-2),
    "adam": dict(from_m=0.9, from_v=0.1, from_s=0.99, from_square=0.01, tau=1e-3),
    "yogi": dict(from_m=0.9, from_v=0.1, from_s=0.99, from_square=0.01, yogi=True, tau=1e-3),
}


def optimizer_step(g, rule):
    v, m, s, x = g.many(4)
    with np.errstate(over="ignore"):
        s = None if rule == "momentum" else s * s
        if s is not None and g.n:
            s[g.n // 2] = v[g.n // 2] ** 2  # Yogi's sign of 0
    m_out, x_out, s_out = g(), g(), None if s is None else g()
    square = kernels.optimizer_step(v, m, s, x, gamma=0.1, m_out=m_out, s_out=s_out, x_out=x_out, **RULES[rule])
    return [m_out, x_out, s_out, Norms([square])]


def direction_step(g, present, coefficients=(0.1, 0.7, -0.3, 0.4, 1e-2)):
    y, grad, grad_prev, offset, x = g.many(5)
    lr, a, b, mu, decay = coefficients
    options = dict(b=b, grad_prev=grad_prev) if present & 1 else {}
    options |= dict(offset=offset) if present & 2 else {}
    options |= dict(mu=mu, x=x) if present & 4 else {}
    kernels.direction_step(y, grad, lr=lr, a=a, weight_decay=decay if present & 8 else 0, **options)
    return [y]


def combine(g, k):
    terms = [g("float64" if i % 2 else "float32") for i in range(k)]
    coefficients, outs = g.rng.normal(size=k), [np.empty(g.n), np.empty(g.n, np.float32)]
    for out in outs:
        kernels.combine(terms, list(coefficients), out)
    return [*outs, kernels.combine(terms, coefficients), Norms([kernels.combined_square(terms, coefficients)])]


def ring(p):
    W = np.zeros((p, p))
    for i in range(p):
        W[i, [(i - 1) % p, i, (i + 1) % p]] = 1 / 3
    return W


def matrix(p, density, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(p, p)) * (rng.random((p, p)) < density)


MATRICES = {"ring": ring(7), "dense": matrix(7, 1), "sparse": matrix(7, 0.4), "turned": np.eye(7)[::-1]}
MATRICES |= {
    "zeros": np.zeros((7, 7)),
    "of one": matrix(1, 1),
    "of three": matrix(3, 0.5),
    "of thirty": matrix(30, 0.3),
}


def mix(g, name):
    models = g.many(len(MATRICES[name]))
    kernels.mix(models, MATRICES[name])
    return models


def quantise(g, codec, seed):
    x = (g() * 10.0 ** g.rng.integers(-9, 6, size=g.n)).astype(np.float32) if g.kind == "usual" else g()
    coded = kernels.quantise(x, codec, seed=seed, row=g.n)
    return [coded, kernels.dequantise(coded)]


def squared_norms(g):
    partials = np.zeros((-(-g.n // 16_384), 5))
    return [Norms(kernels.squared_norms(g.many(5), partials=partials)), Norms(partials.ravel())]


def gram_matrix(g, kind):
    bases, ys, scales, _ = sent(g, 7)
    ys = [in_tensors(y) for y in ys] if kind == "in tensors" else ys
    partials = np.empty((-(-g.n // 16_384), 28))
    found = [kernels.gram_matrix(bases[:k], ys[:k], scales[:k]) for k in (1, 3)]
    return [*found, kernels.gram_matrix(bases, ys, scales, partials=partials), partials.ravel()]


def column_statistics(g, given):
    k, kind = given
    k = min(k, 10) if g.n > 10_000 else k
    bases, ys, scales, _ = sent(g, k, DTYPES[:2] if g.kind == "huge" else DTYPES)
    if kind == "ties":
        bases, ys, scales = [None] * k, [np.round(g() * 2) for _ in range(k)], -np.ones(k)
    ys = [in_tensors(y) for y in ys] if kind == "in tensors" else ys
    mixing = g.rng.random((k + 1, k)) / k if kind == "mixed" else None
    given, options = (bases, ys, scales), dict(mixing=mixing)
    outs = [arrays.empty(g.n, "float32") for _ in range(5)]
    for f, out in zip((0, k // 4, (k - 1) // 2), outs, strict=False):
        kernels.trimmed_mean(*given, f, out=out, **options)
    for m, out in zip((1, (k + 1) // 2), outs[3:], strict=True):
        kernels.mean_near_median(*given, m, out=out, **options)
    return outs


def cases(function, *options):
    """Return the function and its arguments after the numbers, by name, for each combination of the options."""
    found = {}
    for combination in product(*options):
        names = [one[0] if isinstance(one, tuple) else str(one) for one in combination]
        found[" ".join([function.__name__, *names])] = (
            function,
            [one[1] if isinstance(one, tuple) else one for one in combination],
        )
    return found


PRECISIONS, BOTH = ["float32", "float64"], [False, True]
TIMES = [[1, 1, 1], [-1, 1, 3], [5, -1, 1000], [1, -2, 2000], [4097, -4095, 4], [2**22, 3, -4096]]
# Kernels whose results are defined element by element take any numbers.
ELEMENTWISE = (
    cases(weighted_sum, DTYPES, BOTH, PRECISIONS)
    | cases(weighted_sum_segments, BOTH, PRECISIONS)
    | cases(server_step, PRECISIONS, BOTH, BOTH, BOTH)
    | cases(optimizer_step, RULES)
    | cases(direction_step, range(16))
    | cases(combine, [1, 2, 3, 4, 6])
    | cases(mix, MATRICES)
    | cases(quantise, ["bf16", "f16"], [None, 0, 2**64 - 1])
    | cases(squared_norms)
)
ROWS = [(1, "of some"), (2, "of some"), (17, "ties"), (5, "mixed"), (10, "in tensors"), (33, "of some"), (66, "mixed")]
COLUMNS = cases(column_statistics, [(f"{k} {kind}", (k, kind)) for k, kind in ROWS])
# These take numbers of any size; one that is not finite makes the whole result invalid.
FINITE = cases(exchange, [*([codec] for codec in CODECS), CODECS], FORMS) | COLUMNS
USUAL = (
    cases(accumulate, PRECISIONS, ["of one base", "of some", "in tensors"])
    | cases(accumulate_exact, EXACT.items())
    | cases(exchange_exact, CODECS, FORMS, [("any", {})])
    | cases(exchange_exact, ["f32"], ["replaced"], EXACT.items())
    | cases(gram_matrix, ["flat", "in tensors"])
    | cases(combine_exact, TIMES)
    | cases(read_exact)
    | cases(quantise, ["int8"], [None, 0, 2**64 - 1])
)
CASES = ELEMENTWISE | FINITE | USUAL


def run(name, numbers):
    """The results of a case on those ``Numbers``."""
    function, options = CASES[name]
    return function(numbers, *options)
