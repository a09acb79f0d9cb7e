"""Rival implementations on a GPU: torch with single operations, with lists and compiled, and CuPy."""

import torch

try:
    import cupy
except ImportError:
    cupy = None


def weighted_sums(rows, weights, out):
    """Return functions by name that set out = sum_i weights[i] rows[i]."""
    on_device = torch.tensor(weights, device="cuda", dtype=rows[0].dtype)

    def one_by_one():
        out.zero_()
        for row, weight in zip(rows, weights, strict=True):
            out.add_(row, alpha=weight)

    @torch.compile(dynamic=False)
    def fused(rows):
        total = weights[0] * rows[0]
        for row, weight in zip(rows[1:], weights[1:], strict=True):
            total = total + weight * row
        return total

    found = {
        "torch out.add_(row, alpha=w)": one_by_one,
        "torch compiled": lambda: out.copy_(fused(rows)),
        "torch stack, then mv": lambda: torch.mv(torch.stack(rows).t(), on_device, out=out),
    }
    if cupy is not None:
        found["CuPy, one kernel of as many arguments"] = _by_cupy(rows, weights, out)
    return found


def _by_cupy(rows, weights, out):
    views, to = [cupy.from_dlpack(row) for row in rows], cupy.from_dlpack(out)
    arguments = ", ".join(f"float32 x{i}" for i in range(len(rows)))
    terms = " + ".join(f"x{i} * {weight}f" for i, weight in enumerate(weights))
    kernel = cupy.ElementwiseKernel(arguments, "float32 y", f"y = {terms}", "fused_sum")

    def run():
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel(*views, to)

    return run


def tensors_apart(models, weights, outs):
    """Return functions by name that sum models of many tensors."""

    def by_lists():
        torch._foreach_zero_(outs)
        for model, weight in zip(models, weights, strict=True):
            torch._foreach_add_(outs, model, alpha=weight)

    return {"torch._foreach_add_": by_lists}


class Round:
    """A round of MIFA (v = None) or MimiC in torch: h = (x - y) s; sum += h - r (+ v[t]); r = h; x -= gamma sum / N.

    Sums are float32, as usual in torch; fedcore's sums are float64.

    Args:
        x, total: the model and the sum, float32[n], changed in place.
        rows: the rows of the cohort, float32[n] each, changed in place.
        v: float32[n], or None.
    """

    def __init__(self, x, total, rows, v, scale, gamma, clients):
        self.x, self.total, self.rows, self.v = x, total, rows, v
        self.scale, self.gamma, self.clients = scale, gamma, clients
        self._compiled = None

    def one_by_one(self, ys):
        for y, row in zip(ys, self.rows, strict=True):
            h = (self.x - y).mul_(self.scale)
            self.total.add_(h).sub_(row)
            if self.v is not None:
                self.total.add_(self.v)
            row.copy_(h)
        self.x.sub_(self.total, alpha=self.gamma / self.clients)

    def by_lists(self, ys):
        h = torch._foreach_sub([self.x] * len(ys), ys)
        torch._foreach_mul_(h, self.scale)
        changes = torch._foreach_sub(h, self.rows)
        for change in changes:
            self.total.add_(change)
        if self.v is not None:
            self.total.add_(self.v, alpha=len(ys))
        torch._foreach_copy_(self.rows, h)
        self.x.sub_(self.total, alpha=self.gamma / self.clients)

    def compiled(self, ys):
        self._compiled = self._compiled or torch.compile(self._folded, dynamic=False)
        x, total, rows = self._compiled(self.x, self.total, self.rows, self.v, ys)
        self.x, self.total, self.rows = x, total, rows

    def _folded(self, x, total, rows, v, ys):
        made = []
        for y, row in zip(ys, rows, strict=True):
            h = (x - y) * self.scale
            total = total + (h - row)
            if v is not None:
                total = total + v
            made.append(h)
        return x - self.gamma / self.clients * total, total, made

    def ways(self, ys):
        """Return functions by name that run a round on the models ``ys``."""
        return {
            "torch, operation by operation": lambda: self.one_by_one(ys),
            "torch foreach": lambda: self.by_lists(ys),
            "torch compiled": lambda: self.compiled(ys),
        }
