"""A row of the table: a framework's result for a set, beside fedcore's and the right one."""

import importlib
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import torch

from tests.conformance.cases import Case, Reply

FRAMEWORKS = ("flower", "nvflare", "pfl", "appfl", "fedlab", "server", "aggregate")
"""The modules beside this one, in the order of the table's columns.

Each has ``theirs(case)`` and ``ours(case)``, which return the next model by name. Its constants are ``NAME``;
``PACKAGE`` and ``EXTRA``, which install the framework; and by the set's name ``DEVIATES`` (a name in ``DEVIATIONS``),
``WRONG`` (the framework's fault) and ``CANNOT`` (why the framework has no such replies). Two may be left out:
``STAYS``, sets in which fedcore refuses all replies, and ``RAISES``, the errors of an average that has no round.
"""

DEVIATIONS = {
    "counters": "An integer counter of 32 bits or more stays an integer. fedcore takes the largest value, "
    "because a number of batches has no meaningful average ([the average](api/aggregate.md)).",
    "dtypes": "A buffer of bools or small integers keeps its dtype and its values, because it has no "
    "meaningful average ([the average](api/aggregate.md)).",
    "rejected": "fedcore rejects a reply that cannot be averaged, names the client, and averages the others "
    "([trust](trust.md)). The framework aborts the round, or averages the reply anyway.",
    "zero weight": "fedcore rejects a client without examples. If no client has examples, the model does not change"
    " ([trust](trust.md)).",
    "same weights": "fedcore averages float buffers with the same weights as parameters, n_k / n ([the "
    "average](api/aggregate.md)).",
    "no duplicates": "A client counts once per round: fedcore takes the first copy of its reply ([trust](trust.md)).",
    "late update": "A reply to an earlier round counts only with `RoundPolicy(max_staleness=)`. It is measured against"
    " the model that the client started from ([the server](api/server.md)).",
}
"""The deliberate deviations of fedcore, and the reasons."""

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of dtypes that are coarser than float32, in which fedcore calculates."""


@dataclass(frozen=True)
class Row:
    """The result of a set in a framework.

    Attributes:
        state: "equal", "deviates", "framework is wrong", "cannot", "not run" or, in a failing test,
            "fedcore is wrong".
        why: the deviation, or how the results differ.
    """

    state: str
    why: str = ""


def framework(name: str) -> ModuleType:
    """The module of a framework."""
    return importlib.import_module(f"tests.conformance.{name}")


def numpy_of(tensor: Any) -> np.ndarray:
    """A tensor of any library as an array, bfloat16 as ml_dtypes'."""
    if not isinstance(tensor, torch.Tensor):
        return np.asarray(tensor)
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.float().numpy().astype(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def right(case: Case) -> dict[str, np.ndarray]:
    """The next model by definition: x = sum n_k x_k / sum n_k over the replies that count, in float64."""
    x0 = {name: numpy_of(tensor) for name, tensor in case.x0.items()}
    counted = [one for one in case.models() if one.counts]
    if not counted:
        return x0
    weights = np.array([1.0 if one.examples is None else one.examples for one in counted])
    return {name: _right_tensor(before, name, counted, weights / weights.sum()) for name, before in x0.items()}


def _right_tensor(before: np.ndarray, name: str, replies: list[Reply], shares: np.ndarray) -> np.ndarray:
    values = [numpy_of(one.tensors[name]) for one in replies]
    if before.dtype.kind in "iu" and before.shape == ():
        return np.asarray(max(values))
    if before.dtype.kind in "iub" or not np.isfinite(before.astype(np.float64)).all():
        return before
    mean = sum(share * value.astype(np.float64) for share, value in zip(shares, values, strict=True))
    return np.asarray(mean).astype(before.dtype)


def bound(case: Case) -> float:
    """The greatest difference of two averages that are equal: four roundings of the coarsest dtype of the set."""
    return 4 * max(EPSILON.get(str(numpy_of(tensor).dtype), 2.0**-23) for tensor in case.x0.values())


def difference(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], case: Case) -> str | None:
    """The first difference between two models that is more than rounding; None if they are equal."""
    if a.keys() != b.keys():
        return f"tensors {sorted(a)}, {sorted(b)}"
    for name in a:
        if a[name].dtype != b[name].dtype or a[name].shape != b[name].shape:
            return f"{name}: {a[name].dtype}{list(a[name].shape)}, {b[name].dtype}{list(b[name].shape)}"
        first, second = a[name].astype(np.float64), b[name].astype(np.float64)
        close = np.isclose(first, second, rtol=bound(case), atol=bound(case), equal_nan=True)
        if not close.all():
            at = np.unravel_index(int(np.argmin(close)), close.shape)
            return f"{name}: {first[at]:.6g}, {second[at]:.6g}"
    return None


def outcome(average: Callable[[Case], Mapping[str, Any]], case: Case) -> dict[str, np.ndarray] | Exception:
    """The model of an average, or the error that it raises."""
    try:
        return {name: numpy_of(tensor) for name, tensor in average(case).items()}
    except Exception as error:  # A framework can raise any class; the error is the result.
        return error


def compare(name: str, case: Case) -> tuple[Row, Any]:
    """Run a set in a framework and in fedcore; return the row, and the framework's own result."""
    module = framework(name)
    if case.name in module.CANNOT:
        return Row("cannot", module.CANNOT[case.name]), None
    if case.needs is not None and find_spec(case.needs) is None:
        return Row("not run", f"{case.needs} is not installed"), None
    case = of_framework(module, case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the frameworks
        logging.disable(logging.CRITICAL)
        try:
            theirs, ours = outcome(module.theirs, case), outcome(module.ours, case)
        finally:
            logging.disable(logging.NOTSET)
    return _row(module, case, theirs, ours), theirs


def of_framework(module: ModuleType, case: Case) -> Case:
    """The set in its library; no reply counts where the set is one of the framework's ``STAYS``."""
    case = case.in_its_library()
    if case.name in getattr(module, "STAYS", ()):
        case = replace(case, replies=tuple(replace(one, counts=False) for one in case.replies))
    return case


def _row(module: ModuleType, case: Case, theirs: Any, ours: Any) -> Row:
    if isinstance(ours, Exception):
        # A function of a list has no round that continues without a client: it raises an error.
        if all(one.counts for one in case.replies) or not isinstance(ours, getattr(module, "RAISES", ())):
            return Row("fedcore is wrong", f"fedcore raises {_error(ours)}")
    else:
        if not isinstance(theirs, Exception) and difference(theirs, ours, case) is None:
            return Row("equal")
        if (apart := difference(right(case), ours, case)) is not None:
            return Row("fedcore is wrong", f"right and fedcore: {apart}")
    if case.name in module.WRONG:
        return Row("framework is wrong", module.WRONG[case.name])
    if case.name in module.DEVIATES:
        return Row("deviates", module.DEVIATES[case.name])
    got = f"raises {_error(theirs)}" if isinstance(theirs, Exception) else difference(theirs, right(case), case)
    return Row("framework is wrong", f"not listed: {got}")


def _error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"


def expected(name: str, case: Case) -> Row:
    """The row that is due."""
    module = framework(name)
    for state, known in (
        ("cannot", module.CANNOT),
        ("framework is wrong", module.WRONG),
        ("deviates", module.DEVIATES),
    ):
        if case.name in known:
            return Row(state, known[case.name])
    return Row("equal")
