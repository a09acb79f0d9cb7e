"""Vectors of a model's length are calculated with in kernels alone, and born in ``fedcore.memory``."""

from pathlib import Path

import pytest

import fedcore
from tests.architecture.arithmetic import found_in

ROOT = Path(fedcore.layout.__file__).parent
ROOMS = ("server", "aggregation", "network", "store")
FILES = [ROOT / "optimizers.py", *(file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py")))]

BUFFERS = "stretches of the float buffers, a hundredth of a model at most, which are compared and not summed"
AUDIT = "an audit of the totals, on purpose by other means than the kernels that made them"
OTHER = "something else of that name"
EXCEPTIONS = {
    ("server/buffers.py", "never_negative"): (BUFFERS, {"comparison of a vector"}),
    ("server/buffers.py", "allow"): (BUFFERS, {"comparison of a vector"}),
    ("server/invariant.py", "total_problems"): (
        AUDIT,
        {
            *("np.zeros_like of a model's length", ".astype() of a vector", "Sub of a vector", "Add of a vector"),
            *("Add into a vector", "np.abs of a vector", "Mult of a vector", "comparison of a vector"),
        },
    ),
    ("server/newcomers.py", "settle"): (f"{OTHER}: the clients' examples in total", {"Div of a vector"}),
    ("server/norm_window.py", "unpacked"): (f"{OTHER}: the norms heard lately", {"np.isnan of a vector"}),
}


def test_vectors_are_calculated_with_in_kernels_alone():
    left = set()
    for file in FILES:
        for function, line, what in found_in(file.read_text()):
            where = str(file.relative_to(ROOT))
            left.add((where, function, what))
            allowed = EXCEPTIONS.get((where, function), ("", set()))[1]
            assert what in allowed, f"{where}:{line}, {function}: {what}; call a kernel, or fedcore.memory"
    stale = {(*place, what) for place, (_, every) in EXCEPTIONS.items() for what in every} - left
    assert not stale, "exceptions that nothing needs any more"


PLANTED = {
    "def f(self): return self.snapshot.x - 0.5 * self._spare_v": "Sub of a vector",
    "def f(self): self._sum += 1": "Add into a vector",
    "def f(now, p): return -now.x[:p]": "USub of a vector",
    "def f(result, W): return result.A / W": "Div of a vector",
    "def f(v: F32, gamma: float): return gamma * v": "Mult of a vector",
    "def f(u: F32 | None): return u**2": "Pow of a vector",
    "def f(moments: Moments): return np.sqrt(moments[1])": "np.sqrt of a vector",
    "def f(now, x): np.subtract(now.x, 1, out=x)": "np.subtract of a vector",
    "def f(self, client): return self.store.read(client) > 0": "comparison of a vector",
    "def f(self, client):\n    part = self.store.read(client)\n    rest = part\n    rest *= 2": "Mult into a vector",
    "def f(total): return np.einsum('i,i->', total, total)": "np.einsum of a vector",
    "def f(self): return self.snapshot.momentum.astype(np.float64)": ".astype() of a vector",
    "def f(self): return self.snapshot.total.copy()": ".copy() of a vector",
    "def f(layout): return np.zeros(layout.n_parameters)": "np.zeros of a model's length",
    "def f(n): return np.empty((2, n))": "np.empty of a model's length",
    "def f(total): return np.zeros_like(total)": "np.zeros_like of a model's length",
    "def f(history): return [v + 1 for v in history.directions]": "Add of a vector",
    "def f(a, b, g):\n    if (u := kernels.combine(a, b)) is not None:\n        return u @ g": "MatMult of a vector",
    "wide = np.ones(n)\nother = wide + 1": "Add of a vector",
}


@pytest.mark.parametrize("source", PLANTED)
def test_what_is_planted_is_found(source):
    assert PLANTED[source] in {what for _, _, what in found_in(source)}


@pytest.mark.parametrize(
    "source",
    [
        "def f(total: int, by): return total / by",
        "def f(now): return now.total is None or len(now.x) - 1",
        "def f(k): return -np.ones(k)",
        "def f(self, p): return kernels.combine([self.x[:p], self._sum], [1.0, -1.0], zeros(p))",
        "def f(staged, x, p): staged[p:] = x[p:]",
        "def f(weights: F64, W): return weights / W",
        "def f(file): return file.read(8) != HEADER",
        "def f(x): return x if x.shape == (3,) else x.reshape(-1)",
    ],
)
def test_what_is_none_is_let_be(source):
    assert list(found_in(source)) == []
