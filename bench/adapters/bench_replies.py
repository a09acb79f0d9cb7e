"""The cost of a reply's checks before its numbers are read: headers, dtypes, shapes and memory of 62 tensors."""

import numpy as np

from fedcore import Layout
from fedcore.adapters import npy
from fedcore.arrays import core
from tests import oracle

TENSORS, ELEMENTS = 62, 64


def tensors():
    return {f"t{i}": np.full((ELEMENTS // 8, 8), i, np.float32) for i in range(TENSORS)}


def bench_known_heads(versus):
    """Time ``read_npy`` against reading each header with a cache."""
    named = tensors()
    datas, heads = [npy.write(one) for one in named.values()], [npy.head(one) for one in named.values()]
    shapes = [one.shape for one in named.values()]
    versus(
        f"heads of {TENSORS} tensors that are known",
        lambda: npy.read_known(datas, heads, shapes),
        {"npy.read each": lambda: [npy.read(data) for data in datas]},
        targets={"npy.read each": 5.0},
        bytes=None,
        calls=100,
    )


def bench_plain_tensors(versus):
    """Time the layout's ``read_plain_tensors`` against its Python reference."""
    named = tensors()
    layout, shapes = Layout.of(named), [one.shape for one in named.values()]
    versus(
        f"{TENSORS} named NumPy arrays as a layout's vectors",
        lambda: layout.pieces(named),
        {"read_plain_tensors in Python": lambda: oracle.read_plain_tensors([*named.values()], shapes)},
        targets={"read_plain_tensors in Python": 2.0},
        bytes=None,
        calls=100,
    )


def bench_immutable(versus):
    """Time ``are_immutable`` against its Python reference."""
    views = [npy.read(npy.write(one)) for one in tensors().values()]
    versus(
        f"whether {TENSORS} arrays are views of bytes",
        lambda: core.are_immutable(views),
        {"are_immutable in Python": lambda: oracle.are_immutable(views)},
        targets={"are_immutable in Python": 5.0},
        bytes=None,
        calls=100,
    )
