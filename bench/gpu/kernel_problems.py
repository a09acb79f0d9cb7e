"""A random problem for each kernel, as functions of ``Problems`` and of the kind of numbers."""

import numpy as np

from bench.gpu.problems import FLOATS
from fedcore import kernels
from fedcore.kernels import Codes, Linear, Terms

CODECS = ["f32", "bf16", "f16", "int8"]
FORMS = [
    {},
    {"row": Terms(h=1, r=0.5), "adds": Terms(row=0.5, r=-2)},
    {"row": Terms(h=1, r=1, q=-1), "adds": Terms(h=1, row=0.25, q=0.5)},  # SCAFFOLD's row; a sum of all terms
]


def weighted_sum(problems, kind):
    k, tensors = int(problems.rng.integers(1, 70)), problems.some(5)
    sizes = [problems.size(k * tensors) for _ in range(tensors)]
    dtypes = [str(problems.rng.choice(FLOATS)) for _ in sizes]
    float64, norms = problems.chance(0.5), problems.chance(0.5)
    weights = problems.rng.normal(size=k).astype("float64" if float64 else "float32")
    wide = ["float32" if dtype == "bfloat16" or problems.chance(0.5) else dtype for dtype in dtypes]
    arrays = {
        "models": [[problems.numbers(n, d, kind) for n, d in zip(sizes, dtypes, strict=True)] for _ in range(k)],
        "base": [problems.numbers(n) for n in sizes] if problems.chance(0.5) else None,
        "outs": [problems.poisoned(n, dtype) for n, dtype in zip(sizes, wide, strict=True)],
    }

    def run(a):
        options = {"base": a["base"], "accumulate": "float64" if float64 else "float32", "norms": norms}
        summed = kernels.weighted_sum_segments(a["models"], weights, a["outs"], **options)
        return [*summed.squared_norms, summed.squared_norm_of_sum] if norms else None

    problems.compare("weighted sum", run, arrays, ["outs"])


def sent(problems, kind, arrays_each, most=11):
    """Return k clients' updates; late clients have a different base."""
    k = problems.some(most)
    n = problems.size(k * arrays_each)
    first, late = problems.numbers(n), problems.numbers(n)
    dtypes = [str(problems.rng.choice(FLOATS)) if problems.chance(0.3) else "float32" for _ in range(k)]
    arrays = {
        "bases": [(late if problems.chance(0.1) else first) if problems.chance(0.8) else None for _ in range(k)],
        "ys": [problems.numbers(n, dtype, kind) for dtype in dtypes],
    }
    return k, n, arrays, problems.rng.normal(size=k), problems.rng.normal(size=k)


def accumulate(problems, kind, dtypes=("float32", "float64"), name="accumulate"):
    _, n, arrays, scales, weights = sent(problems, kind, 2)
    dtype = str(problems.rng.choice(dtypes))
    arrays |= {"acc": problems.sum(n, dtype) if problems.chance(0.7) else None, "out": problems.poisoned_sum(n, dtype)}

    def run(a):
        return kernels.accumulate(a["acc"], a["bases"], a["ys"], scales, weights, out=a["out"])

    problems.compare(name, run, arrays, ["out"], lambda due: {} if np.isfinite(due).all() else {"out"})


def robust(problems, kind):
    k, n, arrays, scales, _ = sent(problems, kind, 2, int(problems.rng.choice([11, 70])))
    arrays |= {name: problems.poisoned(n) for name in ("trimmed", "near")}
    mixing = problems.rng.random((k + 1, k)) / k if problems.chance(0.3) else None
    f, m = int(problems.rng.integers((k + 1) // 2)), problems.some(k)

    def run(a):
        given = a["bases"], a["ys"], scales
        kernels.trimmed_mean(*given, f, out=a["trimmed"], mixing=mixing)
        kernels.mean_near_median(*given, m, out=a["near"], mixing=mixing)
        return kernels.gram_matrix(*given).reshape(-1)

    problems.compare(
        "robust rules",
        run,
        arrays,
        ["trimmed", "near"],
        lambda due: {} if np.isfinite(due).all() else {"trimmed", "near"},
    )


def accumulate_exact(problems, kind):
    accumulate(problems, kind, ["int64"], "accumulate_exact")


def exchange(problems, kind, dtype="float64", name="exchange"):
    k, n, arrays, scales, weights = sent(problems, kind, 4)
    codec = str(problems.rng.choice(CODECS))
    plain = problems.chance(0.7)  # all rows have one codec
    old = [row_of(problems, n, codec if plain else str(problems.rng.choice(CODECS))) for _ in range(k)]
    old = [row if problems.chance(0.8) else None for row in old]
    in_place = [row is not None and of_codec(row, codec) and problems.chance(0.3) for row in old]
    arrays |= {
        "acc": problems.sum(n, dtype),
        "out": problems.poisoned_sum(n, dtype),
        "old": old,
        "anchors": [problems.numbers(n) if row is not None and problems.chance(0.5) else None for row in old],
        "new": [row if here else new_row(problems, n, codec) for row, here in zip(old, in_place, strict=True)],
    }
    forms, keys = FORMS[problems.rng.integers(len(FORMS))], problems.rng.integers(0, 2**64, (k, 2), np.uint64)

    def run(a):
        rows = a["old"], a["anchors"], a["new"]
        given = a["acc"], a["bases"], a["ys"], scales, weights
        return kernels.exchange(*given, *rows, out=a["out"], keys=keys, **forms)

    parts = 2 if codec == "int8" else 1  # the arrays of a row

    def worthless(due):
        bad = np.flatnonzero(~np.isfinite(due))
        return {("new", parts * i + part) for i in bad for part in range(parts)} | ({"out"} if len(bad) else set())

    problems.compare(name, run, arrays, ["new", "out"], worthless)


def exchange_exact(problems, kind):
    exchange(problems, kind, "int64", "exchange_exact")


def row_of(problems, n, codec):
    return problems.row(codec, n)


def of_codec(row, codec):
    return (row.codec if isinstance(row, Codes) else "f32") == codec


def new_row(problems, n, codec):
    if codec == "f32":
        return problems.poisoned(n)
    scales = problems.poisoned(-(-n // 64)) if codec == "int8" else None
    return Codes(codec, problems.poisoned(n, "int8" if codec == "int8" else "uint16"), scales)


def server_step(problems, kind):
    n, dtype = problems.size(8), str(problems.rng.choice(["float32", "float64"]))
    keeps = problems.chance(0.6)
    arrays = {
        "sum": problems.numbers(n, dtype, kind),
        "total": problems.numbers(n, "float64") if keeps else None,
        "x": problems.numbers(n),
        "momentum": problems.numbers(n) if problems.chance(0.5) else None,
        "control": problems.numbers(n, "float64") if keeps and problems.chance(0.5) else None,
        "v": problems.poisoned(n),
        "total_out": problems.poisoned(n, "float64") if keeps else None,
        "x_out": problems.poisoned(n),
    }
    numbers = problems.rng.normal(size=9).tolist()
    forms = {"v_of": Linear(A=numbers[0], g=numbers[1]), "gamma": numbers[2]}
    if keeps:
        forms = forms | {"v_of": Linear(*numbers[3:7]), "total_of": Linear(A=numbers[7], T=1, v=numbers[8])}
    problems.compare("server step", lambda a: kernels.server_step(**a, **forms), arrays, ["v", "total_out", "x_out"])


def optimizer_step(problems, kind):
    n, second = problems.size(7), problems.chance(0.7)
    arrays = {name: problems.numbers(n, "float32", kind if name == "v" else "usual") for name in ("v", "m", "x")}
    arrays |= {"s": np.abs(problems.numbers(n)) if second else None}
    arrays |= {"m_out": problems.poisoned(n), "s_out": problems.poisoned(n) if second else None}
    arrays |= {"x_out": problems.poisoned(n)}
    options = dict(from_m=0.9, from_v=0.1, from_s=0.99, from_square=0.01, tau=1e-3, gamma=0.1)
    yogi = problems.chance(0.5)
    run = lambda a: kernels.optimizer_step(**a, yogi=yogi, **options)  # noqa: E731
    problems.compare("optimizer step", run, arrays, ["m_out", "s_out", "x_out"])


def direction_step(problems, kind):
    n = problems.size(5)
    arrays = {"y": problems.numbers(n), "grad": problems.numbers(n, "float32", kind)}
    arrays |= {name: problems.numbers(n) if problems.chance(0.5) else None for name in ("grad_prev", "offset", "x")}
    options = dict(lr=0.1, a=0.9, weight_decay=0.01)
    options |= {"b": 0.2 * (arrays["grad_prev"] is not None), "mu": 0.3 * (arrays["x"] is not None)}
    problems.compare("direction step", lambda a: kernels.direction_step(**a, **options), arrays, ["y"])


def combine(problems, kind):
    k = problems.some(7)
    n, dtype = problems.size(k), str(problems.rng.choice(["float32", "float64"]))
    dtypes = problems.rng.choice(["float32", "float64"], k)
    arrays = {"terms": [problems.numbers(n, str(d), kind) for d in dtypes], "out": problems.poisoned(n, dtype)}
    coefficients = problems.rng.normal(size=k).tolist()

    def run(a):
        kernels.combine(a["terms"], coefficients, a["out"])
        return kernels.combined_square(a["terms"], coefficients)

    problems.compare("combine", run, arrays, ["out"])


def combine_exact(problems, kind):
    k = problems.some(7)
    n, dtype = problems.size(2 * k), str(problems.rng.choice(["float32", "float64"]))
    terms = [
        problems.sum(n, "int64") if problems.chance(0.6) else problems.numbers(n, "float32", kind) for _ in range(k)
    ]
    arrays = {"terms": terms, "out": problems.poisoned_sum(n, "int64"), "read": problems.poisoned(n, dtype)}
    coefficients = (problems.rng.integers(-(2**31), 2**31, k) >> problems.rng.integers(0, 30, k)).tolist()

    def run(a):
        if kernels.combine_exact(a["terms"], coefficients, a["out"]) is None:
            return [np.inf]
        kernels.read_exact(a["out"], a["read"])
        return [0]

    def worthless(due):
        return {} if np.isfinite(due).all() else {"out", "read"}

    problems.compare("combine_exact", run, arrays, ["out", "read"], worthless)


def squared_norms(problems, kind):
    k = problems.some(9)
    n = problems.size(k)
    arrays = {"rows": [problems.numbers(n, "float32", kind) for _ in range(k)]}
    problems.compare("squared norms", lambda a: kernels.squared_norms(a["rows"]), arrays, [])


def quantise(problems, kind):
    n, codec = problems.size(2), str(problems.rng.choice(CODECS[1:]))
    kind = "usual" if codec == "int8" and kind == "special" else kind
    arrays = {"x": problems.numbers(n, "float32", kind), "coded": new_row(problems, n, codec)}
    arrays |= {"again": problems.poisoned(n)}
    seed = problems.some(99) if problems.chance(0.5) else None

    def run(a):
        kernels.quantise(a["x"], codec, a["coded"], seed=seed, row=3)
        kernels.dequantise(a["coded"], a["again"])

    problems.compare("quantise", run, arrays, ["coded", "again"])


def mix(problems, kind):
    p = problems.some(12)
    matrix = problems.rng.normal(size=(p, p)).astype(np.float32)
    matrix[problems.rng.random((p, p)) < 0.3] = 0
    n = problems.size(p)
    arrays = {"models": [problems.numbers(n, "float32", kind) for _ in range(p)]}
    problems.compare("mix", lambda a: kernels.mix(a["models"], matrix), arrays, ["models"])


ALL = (
    weighted_sum,
    accumulate,
    accumulate_exact,
    robust,
    exchange,
    exchange_exact,
    server_step,
    optimizer_step,
    direction_step,
    combine,
    combine_exact,
    squared_norms,
    quantise,
    mix,
)
