"""One call of each function that takes arrays, for tests over all of them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedcore import kernels, sampling
from fedcore.kernels import Codes, Linear

DRAW = dict(seed=1, round=2)


class Call(NamedTuple):
    """A function of named arrays.

    Attributes:
        run: takes the arrays by name and returns the function's result.
        read: makes its inputs, by the names that errors give them.
        written: makes its outputs, which hold something before.
        replaces: which output may be which input.
        any_shape: arrays whose shape does not matter.
    """

    run: Callable[[dict[str, Any]], Any]
    read: Callable[[np.random.Generator, int], dict[str, np.ndarray]]
    written: Callable[[np.random.Generator, int], dict[str, np.ndarray]]
    replaces: Mapping[str, str] = MappingProxyType({})
    any_shape: tuple[str, ...] = ()

    def arrays(self, n, seed=0):
        rng = np.random.default_rng(seed)
        return self.read(rng, n) | self.written(rng, n)

    def outputs(self, arrays):
        return [name for name in arrays if name in self.written(np.random.default_rng(0), 1)]

    def returns_more(self, arrays, result):
        """Whether the function returns numbers beside its outputs."""
        outputs = [arrays[name] for name in self.outputs(arrays)]
        return result is not None and not isinstance(result, Codes | list) and all(result is not a for a in outputs)


def single(*names):
    return lambda rng, n: {name: rng.normal(size=n).astype(np.float32) for name in names}


def numbered(arrays, name):
    """arrays["name[0]"], arrays["name[1]"], ..."""
    return [value for key, value in arrays.items() if key.startswith(name + "[")]


def sums(dtype):
    return lambda rng, n: {"out": rng.normal(size=n).astype(dtype)}


def sent(dtype):
    def read(rng, n):
        arrays = {"acc": rng.normal(size=n).astype(dtype), "scales": rng.random(2), "weights": rng.random(2)}
        return arrays | single("ys[0]", "ys[1]", "bases[1]")(rng, n)

    return read


def updates(rng, n):
    return {"scales": rng.random(2)} | single("ys[0]", "ys[1]", "bases[1]")(rng, n)


def accumulate(a):
    bases = [None, a["bases[1]"]]
    return kernels.accumulate(a["acc"], bases, numbered(a, "ys"), a["scales"], a["weights"], out=a["out"])


def accumulate_tensors(a):
    ys = [numbered(a, "ys[0]"), numbered(a, "ys[1]")]
    return kernels.accumulate(a["acc"], [None, a["bases[1]"]], ys, a["scales"], a["weights"], out=a["out"])


def of_tensors(rng, n):
    """The updates of two clients, two tensors each, with n elements together."""
    first = single("ys[0][0]", "ys[1][0]")(rng, n // 2) | single("ys[0][1]", "ys[1][1]")(rng, n - n // 2)
    others = {"acc": rng.normal(size=n), "scales": rng.random(2), "weights": rng.random(2)}
    return first | others | single("bases[1]")(rng, n)


def exchange(a):
    bases, anchors = [None, a["bases[1]"]], [None, a["anchors[1]"]]
    rows = numbered(a, "old_rows"), anchors, numbered(a, "new_rows")
    return kernels.exchange(a["acc"], bases, numbered(a, "ys"), a["scales"], a["weights"], *rows, out=a["out"])


def server_step(a):
    step = dict(v_of=Linear(A=0.1, T=0.2), total_of=Linear(T=1, A=0.3, v=0.4), gamma=0.5)
    return kernels.server_step(
        a["sum"], a["total"], a["x"], v=a["v"], total_out=a["total_out"], x_out=a["x_out"], **step
    )


def optimizer_step(a):
    numbers = dict(from_m=0.9, from_v=0.1, from_s=0.8, from_square=0.2, tau=0.1, gamma=0.5)
    return kernels.optimizer_step(**a, **numbers)


def quantised(codec, dtype):
    """The calls that write codes and read them."""

    def codes(rng, n):
        arrays = {"codes": rng.integers(0, 100, n).astype(dtype)}
        return arrays | ({"scales": rng.random(-(-n // 64), np.float32)} if codec == "int8" else {})

    def coded(a):
        return Codes(codec, a["codes"], a.get("scales"))

    return {
        f"quantise {codec}": Call(lambda a: kernels.quantise(a["x"], codec, coded(a), seed=3), single("x"), codes),
        f"dequantise {codec}": Call(lambda a: kernels.dequantise(coded(a), a["out"]), codes, single("out")),
    }


CALLS = {
    "weighted_sum": Call(
        lambda a: kernels.weighted_sum(numbered(a, "rows"), a["weights"], a["out"]),
        lambda rng, n: single("rows[0]", "rows[1]")(rng, n) | single("weights")(rng, 2),
        single("out"),
    ),
    "weighted_sum float64": Call(
        lambda a: kernels.weighted_sum(numbered(a, "rows"), a["weights"], a["out"], accumulate="float64"),
        lambda rng, n: single(*(f"rows[{i}]" for i in range(5)))(rng, n) | single("weights")(rng, 5),
        single("out"),
    ),
    "weighted_sum_segments": Call(
        lambda a: kernels.weighted_sum_segments(
            [[a["models[0][0]"], a["models[0][1]"]], [a["models[1][0]"], a["models[1][1]"]]],
            a["weights"],
            [a["outs[0]"], a["outs[1]"]],
        ),
        lambda rng, n: (
            single("models[0][0]", "models[1][0]")(rng, n)
            | single("models[0][1]", "models[1][1]")(rng, n + 3)
            | single("weights")(rng, 2)
        ),
        lambda rng, n: single("outs[0]")(rng, n) | single("outs[1]")(rng, n + 3),
        any_shape=("models[0][0]", "models[0][1]", "models[1][0]", "models[1][1]", "outs[0]", "outs[1]"),
    ),
    "accumulate float32": Call(accumulate, sent(np.float32), sums(np.float32), {"out": "acc"}),
    "accumulate float64": Call(accumulate, sent(np.float64), sums(np.float64), {"out": "acc"}),
    "accumulate tensors": Call(
        accumulate_tensors,
        of_tensors,
        sums(np.float64),
        {"out": "acc"},
        any_shape=("ys[0][0]", "ys[0][1]", "ys[1][0]", "ys[1][1]"),
    ),
    "gram_matrix": Call(
        lambda a: kernels.gram_matrix([None, a["bases[1]"]], numbered(a, "ys"), a["scales"]), updates, lambda rng, n: {}
    ),
    "trimmed_mean": Call(
        lambda a: kernels.trimmed_mean([None, a["bases[1]"]], numbered(a, "ys"), a["scales"], 0, out=a["out"]),
        updates,
        single("out"),
    ),
    "mean_near_median": Call(
        lambda a: kernels.mean_near_median([None, a["bases[1]"]], numbered(a, "ys"), a["scales"], 1, out=a["out"]),
        updates,
        single("out"),
    ),
    "exchange": Call(
        exchange,
        lambda rng, n: sent(np.float64)(rng, n) | single("old_rows[0]", "old_rows[1]", "anchors[1]")(rng, n),
        lambda rng, n: sums(np.float64)(rng, n) | single("new_rows[0]", "new_rows[1]")(rng, n),
        {"out": "acc", "new_rows[0]": "old_rows[0]", "new_rows[1]": "old_rows[1]"},
    ),
    "server_step": Call(
        server_step,
        lambda rng, n: {"sum": rng.normal(size=n), "total": rng.normal(size=n)} | single("x")(rng, n),
        lambda rng, n: single("v", "x_out")(rng, n) | {"total_out": rng.normal(size=n)},
        {"total_out": "total", "x_out": "x"},
    ),
    "squared_norms": Call(
        lambda a: kernels.squared_norms(numbered(a, "rows")), single("rows[0]", "rows[1]"), lambda rng, n: {}
    ),
    "direction_step": Call(
        lambda a: kernels.direction_step(
            a["y"], a["grad"], lr=0.1, b=0.2, mu=0.3, grad_prev=a["grad_prev"], offset=a["offset"], x=a["x"]
        ),
        single("grad", "grad_prev", "offset", "x"),
        single("y"),
    ),
    "combine": Call(
        lambda a: kernels.combine(numbered(a, "terms"), [0.5, 0.25], a["out"]),
        lambda rng, n: single("terms[0]")(rng, n) | {"terms[1]": rng.normal(size=n)},
        single("out"),
        {"out": "terms[0]"},
    ),
    "combine float64": Call(
        lambda a: kernels.combine(numbered(a, "terms"), [0.5, 0.25], a["out"]),
        lambda rng, n: {"terms[0]": rng.normal(size=n)} | single("terms[1]")(rng, n),
        sums(np.float64),
        {"out": "terms[0]"},
    ),
    "combined_square": Call(
        lambda a: kernels.combined_square(numbered(a, "terms"), [0.5, 0.25]),
        lambda rng, n: {"terms[0]": rng.normal(size=n)} | single("terms[1]")(rng, n),
        lambda rng, n: {},
    ),
    "optimizer_step": Call(
        optimizer_step,
        single("v", "m", "s", "x"),
        single("m_out", "s_out", "x_out"),
        {"m_out": "m", "s_out": "s", "x_out": "x"},
    ),
    "mix": Call(
        lambda a: kernels.mix(numbered(a, "models"), [[0.5, 0.25, 0], [0.5, 0.5, 0.75], [1, 0, 1]]),
        lambda rng, n: {},
        single("models[0]", "models[1]", "models[2]"),
    ),
    **quantised("bf16", np.uint16),
    **quantised("f16", np.uint16),
    **quantised("int8", np.int8),
    "weighted_without_replacement": Call(
        lambda a: sampling.weighted_without_replacement(a["weights"], 1, **DRAW),
        lambda rng, n: {"weights": rng.random(n) + 0.1},
        lambda rng, n: {},
    ),
    "with_replacement": Call(
        lambda a: sampling.with_replacement(a["weights"], 5, **DRAW),
        lambda rng, n: {"weights": rng.random(n) + 0.1},
        lambda rng, n: {},
    ),
}
