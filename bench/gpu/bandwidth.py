"""Bandwidth of the kernels against a copy on the device, torch and CuPy: ``python -m bench.gpu.bandwidth``.

The bytes of a line are those that the kernel must read and write. The floor is the bandwidth of a device-to-device
copy, whose reads and writes both count. --gigabytes sets about how much a call moves; choose many times the L2 cache.
"""

import argparse
from functools import partial

import numpy as np

from bench.gpu import rivals
from bench.gpu.arrays import REAL, Placed
from bench.gpu.lines import line, show
from bench.gpu.stopwatch import rivals_seconds, seconds
from fedcore import kernels
from fedcore.kernels import Codes, ExactSum, Linear, Terms

MODEL, TENSORS, CLIENTS = 11_173_962, 62, 64  # a ResNet-18
ROWS = {"f32": 4, "bf16": 2, "f16": 2, "int8": 1 + 1 / 16}
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
LEAST = 1 << 30  # the least bytes of a call for which the target share applies


def empty(n, dtype="float32"):
    """Return an array of small numbers on the device."""
    if REAL:
        import torch

        if dtype in ("int8", "uint16", "int64"):
            return torch.randint(1, 100, (n,), device="cuda").to(getattr(torch, dtype))
        return torch.randn(n, device="cuda").to(getattr(torch, dtype))
    if dtype == "bfloat16":
        import torch

        return Placed(torch.ones(n, dtype=torch.bfloat16)).array
    return Placed(np.ones(n, dtype)).array


def row(codec, n):
    if codec == "f32":
        return empty(n)
    scales = empty(-(-n // 64)) if codec == "int8" else None
    return Codes(codec, empty(n, "int8" if codec == "int8" else "uint16"), scales)


def exact(n):
    return ExactSum(empty(n, "int64"), empty(n, "int64"))


class Lines:
    """The lines; each is made and measured before the next, so that its arrays are freed."""

    def __init__(self, gigabytes):
        self.moved = gigabytes * 1e9
        self.copy = self.copy_rate()

    def size(self, bytes_per_element):
        return max(64, int(self.moved / bytes_per_element) // 64 * 64)

    def copy_rate(self):
        n = self.size(8)
        here, there = empty(n), empty(n)
        took = seconds(lambda: there.copy_(here)) if REAL else None
        return None if took is None else 8 * n / took

    def measure(self, what, call, moved, due=None, others=None, targets=None):
        due = due if due is not None and moved >= LEAST else None
        took = rivals_seconds(others or {})
        return line(what, seconds(call), int(moved), floor=self.copy, due=due, rivals=took, targets=targets)

    def sums(self, dtype, float64, norms, k=32):
        n = self.size(k * DTYPES[dtype] + 4)
        rows, out, weights = [empty(n, dtype) for _ in range(k)], empty(n), [1 / k] * k
        options = {"accumulate": "float64" if float64 else "float32", "norms": norms}
        plain = REAL and dtype == "float32" and not float64 and not norms
        others = rivals.weighted_sums(rows, weights, out) if plain else {}
        what = f"weighted sum of {k} {dtype} rows" + ", in float64" * float64 + ", norms" * norms
        call = partial(kernels.weighted_sum, rows, weights, out, **options)
        return self.measure(what, call, n * (k * DTYPES[dtype] + 4), None if float64 else 0.9, others)

    def many_tensors(self):
        total = MODEL if REAL else 4000
        sizes = np.geomspace(1, total / 20, TENSORS)
        sizes = np.maximum(1, sizes * total / sizes.sum()).astype(int).tolist()
        models, outs = [[empty(n) for n in sizes] for _ in range(CLIENTS if REAL else 3)], [empty(n) for n in sizes]
        weights = [1 / len(models)] * len(models)
        others = rivals.tensors_apart(models, weights, outs) if REAL else {}
        call = partial(kernels.weighted_sum_segments, models, weights, outs)
        what = f"weighted sum of {len(models)} models of {TENSORS} tensors, {sum(sizes):,}, in one launch"
        return self.measure(what, call, 4 * sum(sizes) * (len(models) + 1), 0.8, others)

    def exchange(self, codec, anchored, is_exact=False, k=8):
        each = k * (4 + 2 * ROWS[codec]) + 4 + (32 if is_exact else 16) + 4 * anchored  # x and v count once
        n = self.size(each)
        acc, out = (exact(n) if is_exact else empty(n, "float64") for _ in range(2))
        x, v = empty(n), empty(n)
        sent = [empty(n) for _ in range(k)]
        old, new, anchors = [row(codec, n) for _ in sent], [row(codec, n) for _ in sent], [v if anchored else None] * k
        keys, numbers = np.arange(2 * k, dtype=np.uint64).reshape(k, 2), np.full(k, 0.1)
        call = partial(kernels.exchange, acc, [x] * k, sent, numbers, numbers, old, anchors, new, out=out, keys=keys)
        what = f"exchange of {k} {codec} rows, {'MimiC' if anchored else 'MIFA'}" + ", exact sum" * is_exact
        return self.measure(what, call, n * each, 0.9)

    def general_exchange(self, codec, k=8):
        each = k * (4 + 2 * ROWS[codec]) + 24
        n = self.size(each)
        x, c, acc, out = empty(n), empty(n), empty(n, "float64"), empty(n, "float64")
        sent, old = [empty(n) for _ in range(k)], [row(codec, n) for _ in range(k)]
        keys, numbers = np.arange(2 * k, dtype=np.uint64).reshape(k, 2), np.full(k, 0.1)
        forms = {"row": Terms(h=1, r=1, q=-1), "adds": Terms(h=1)}
        rows = old, [c] * k, [row(codec, n) for _ in range(k)]
        call = partial(kernels.exchange, acc, [x] * k, sent, numbers, numbers, *rows, out=out, keys=keys, **forms)
        return self.measure(f"exchange of {k} {codec} rows, SCAFFOLD", call, n * each, 0.9)

    def accumulate(self, k, is_exact=False):
        each = 4 * k + (36 if is_exact else 12)
        n = self.size(each)
        acc, out = (exact(n) if is_exact else empty(n) for _ in range(2))
        x, sent, numbers = empty(n), [empty(n) for _ in range(k)], np.full(k, 0.1)
        call = partial(kernels.accumulate, acc, [x] * k, sent, numbers, numbers, out=out)
        return self.measure(f"accumulate, {k} clients" + ", exact sum" * is_exact, call, n * each)

    def robust(self, what, k):
        n = self.size(4 * k + 4)
        sent, out, ones = [empty(n) for _ in range(k)], empty(n), np.ones(k)
        given = [None] * k, sent, ones
        call = partial(kernels.trimmed_mean, *given, (k - 1) // 2, out=out)
        if what == "inner products":
            call = partial(kernels.gram_matrix, *given)
        return self.measure(f"{what} of {k} updates", call, n * 4 * (k + (what == "median")))

    def server_step(self):
        n = self.size(44)
        a, t, t_out = (empty(n, "float64") for _ in range(3))
        x, v, x_out = (empty(n) for _ in range(3))
        options = {"v_of": Linear(A=0.1, T=0.1), "total_of": Linear(A=1, T=1), "gamma": 0.1}
        call = partial(kernels.server_step, a, t, x, v=v, total_out=t_out, x_out=x_out, **options)
        return self.measure("server step with a total", call, n * 36)

    def optimizer_step(self):
        n = self.size(28)
        v, m, s, x, m_out, s_out, x_out = (empty(n) for _ in range(7))
        options = {"from_m": 0.9, "from_v": 0.1, "from_s": 0.99, "from_square": 0.01, "tau": 1e-3, "gamma": 0.1}
        outs = {"m_out": m_out, "s_out": s_out, "x_out": x_out}
        return self.measure("Adam's step", partial(kernels.optimizer_step, v, m, s, x, **outs, **options), n * 28)

    def direction_step(self):
        n = self.size(16)
        y, grad, offset = empty(n), empty(n), empty(n)
        call = partial(kernels.direction_step, y, grad, lr=0.001, offset=offset)
        return self.measure("local step with an offset", call, n * 16)

    def quantise(self, codec):
        n = self.size(4 + ROWS[codec])
        x, coded = empty(n), row(codec, n)
        call = partial(kernels.quantise, x, codec, coded, seed=1)
        return self.measure(f"float32 to {codec}, stochastic", call, n * (4 + ROWS[codec]))

    def squared_norms(self, k=8):
        n = self.size(4 * k)
        rows = [empty(n) for _ in range(k)]
        return self.measure(f"squared norms of {k} rows", partial(kernels.squared_norms, rows), n * 4 * k)

    def mix(self, p=64):
        n = self.size(8 * p)
        models, ring = [empty(n) for _ in range(p)], np.zeros((p, p), np.float32)
        for i in range(p):
            ring[i, [i - 1, i, (i + 1) % p]] = 1 / 3
        return self.measure(f"mix of {p} models in a ring", partial(kernels.mix, models, ring), n * 8 * p)

    def each(self):
        """Return the functions that make the lines, most important first."""
        yield from (partial(self.sums, dtype, False, norms) for dtype in DTYPES for norms in (False, True))
        yield self.many_tensors
        yield from (partial(self.exchange, codec, anchored) for codec in ROWS for anchored in (False, True))
        yield from (partial(self.general_exchange, codec) for codec in ("f32", "bf16"))
        yield from (partial(self.accumulate, k, is_exact) for is_exact in (False, True) for k in (1, 8))
        yield from (partial(self.exchange, codec, False, True) for codec in ("f32", "int8"))
        yield from (partial(self.robust, what, k) for what in ("median", "inner products") for k in (10, 64))
        yield from (self.server_step, self.optimizer_step, self.direction_step)
        yield from (partial(self.quantise, codec) for codec in list(ROWS)[1:])
        yield from (self.squared_norms, self.mix, partial(self.sums, "float32", True, True))


def halves(found):
    """Return the line that compares summing bfloat16 rows with float32 rows."""
    took = {one["what"]: one["seconds"] for one in found}
    whole, half = (took.get(f"weighted sum of 32 {dtype} rows") for dtype in ("float32", "bfloat16"))
    bytes_of = {one["what"]: one["bytes"] for one in found}
    if whole is None or half is None:
        return line("bfloat16 rows in place of float32 ones", None, targets={"float32": 1.8})
    each = whole / bytes_of["weighted sum of 32 float32 rows"] * (32 * 4 + 4)
    ours = half / bytes_of["weighted sum of 32 bfloat16 rows"] * (32 * 2 + 4)
    return line("bfloat16 rows in place of float32 ones", ours, rivals={"float32": each}, targets={"float32": 1.8})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4)
    lines, found = Lines(parser.parse_args().gigabytes), []
    show(line("copy on the device", lines.copy and 8 * lines.size(8) / lines.copy, 8 * lines.size(8)))
    for make in lines.each():
        found.append(make())
        show(found[-1])
    show(halves(found))


if __name__ == "__main__":
    main()
