"""Checks that a method's table does not contradict itself, and that its results are those due.

A table's entries are read in several places, each of which leaves out what it does not know: a contradiction would not
fail there, but be another method.
"""

import math
from collections.abc import Callable
from dataclasses import astuple
from inspect import Parameter, signature
from numbers import Real
from typing import Any, TypeVar, get_args

import numpy as np

from fedcore.algorithms.algorithm import (
    NOTHING,
    Algorithm,
    Anchor,
    Direction,
    Linear,
    Placement,
    Step,
    Terms,
    Unit,
)
from fedcore.algorithms.cohort import EXAMPLE, Claims
from fedcore.arguments import due_in
from fedcore.errors import AlgorithmError, UnknownNameError
from fedcore.local_rules import LocalRule
from fedcore.native import core
from fedcore.typing import F64

FLAGS = ("keeps_total", "sums_changes", "takes_server_rate", "steps_without_clients", "needs_shares")
CHOICES = (("anchor", get_args(Anchor)), ("placement", get_args(Placement)), ("unit", get_args(Unit)))

PLAIN = frozenset((float, int))
"""What nearly all numbers of a table are; others are looked at one by one."""

Result = TypeVar("Result")


def check_table(algorithm: Algorithm) -> None:
    """Refuse a method whose entries contradict each other, or whose options are not kept as attributes.

    ``weigh`` and ``step`` are tried on a cohort of two clients; what they return for others is seen when it is used.

    Raises:
        UnknownNameError: ``anchor``, ``placement`` or ``unit`` is not one of those that there are.
        AlgorithmError: anything else is not what ``Algorithm`` says of it.
    """
    method = type(algorithm).__name__
    for entry, known in CHOICES:
        if getattr(algorithm, entry) not in (known if entry != "anchor" else (None, *known)):
            raise UnknownNameError.of(f"{method}.{entry}", getattr(algorithm, entry), known)

    def expect(right: bool, entry: str, due: str) -> None:
        if not right:
            raise AlgorithmError(f"{method}.{entry}: expected {due}, got {getattr(algorithm, entry)!r}")

    for flag in FLAGS:
        expect(isinstance(getattr(algorithm, flag), bool), flag, "True or False")
    for entry in ("row", "adds"):
        form = getattr(algorithm, entry)
        expect(isinstance(form, Terms) and _are_finite(form), entry, "Terms of finite numbers")
    second, d = algorithm.second_vector, algorithm.direction
    named = second is None or (isinstance(second, str) and second != "")
    expect(named, "second_vector", "None, or what clients send beside y: 'mean gradient', or words of your own")
    expect(isinstance(algorithm.local_rule, LocalRule), "local_rule", "a LocalRule, as fedcore.local_rules.Sgd()")
    expect(isinstance(d, Direction) and _are_finite(d), "direction", "a Direction of finite numbers")
    row, adds = algorithm.row, algorithm.adds
    expect(not row.row, "row", "a form over h, r and q")
    expect(row == NOTHING or algorithm.placement == "server", "row", "no numbers, since clients keep their rows")
    expect(row == NOTHING or not second, "row", "no numbers, since the second vector becomes the row")
    alone = "h alone, since y makes no row: say what the row becomes"
    expect(row != NOTHING or not (adds.r or adds.q or adds.row), "adds", alone)
    expect(not algorithm.keeps_history or algorithm.keeps_total, "keeps_total", "True beside anchor = 'v[t]'")
    has_rows = algorithm.keeps_rows or algorithm.placement == "client"
    expect(not d.from_row or has_rows, "direction", "from_row = 0, since there are no rows: say row, or second_vector")
    expect(not d.from_mean or algorithm.keeps_total, "direction", "from_mean = 0, since keeps_total is False")
    expect(not algorithm.sums_changes or has_rows or bool(second), "sums_changes", "False, since there are no rows")
    for option, parameter in signature(type(algorithm)).parameters.items():
        if parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and not hasattr(algorithm, option):
            raise AlgorithmError(
                f"{method}.{option}: expected the option as an attribute of its name, by which a saved server knows "
                f"it, got none: say self.{option} = {option}"
            )
    _try(lambda: algorithm.weigh(EXAMPLE.claims), lambda weights: check_weights(algorithm, weights, EXAMPLE.claims))
    _try(lambda: algorithm.step(EXAMPLE), lambda step: check_step(algorithm, step))


def check_weights(algorithm: Algorithm, weights: Any, claims: Claims) -> F64:
    """The weights that ``weigh`` returned, if they are as they should be.

    Raises:
        AlgorithmError: it is not float64[k], finite and >= 0.
    """
    k = len(claims.steps)
    if isinstance(weights, np.ndarray) and weights.dtype == np.float64 and weights.shape == (k,):
        together: F64 = np.ascontiguousarray(weights)  # of a caller's own it may be every other one
        least, most = core.column_range(together)
        if least >= 0 and most < math.inf:  # as a NaN is not
            return together
        got = f"{weights[~(np.isfinite(weights) & (weights >= 0))][0]:g}"
    else:
        got = f"{weights.dtype}{list(weights.shape)}" if isinstance(weights, np.ndarray) else repr(weights)[:100]
    raise AlgorithmError(f"{type(algorithm).__name__}.weigh: expected float64[{k}], finite and >= 0, got {got}")


def check_step(algorithm: Algorithm, step: Any) -> Step:
    """The step that ``step`` returned, if it is as it should be.

    Raises:
        AlgorithmError: it is no Step of finite numbers, or has coefficients of what the method does not keep.
    """
    method = f"{type(algorithm).__name__}.step"
    if not isinstance(step, Step):
        raise AlgorithmError(f"{method}: expected a Step, got {type(step).__name__}")
    for name, form in (("v", step.v), ("T", step.T)):
        if not isinstance(form, Linear):
            raise AlgorithmError(f"{method}: expected {name} to be a Linear, got {type(form).__name__}")
    if not _are_finite((*step.v, *step.T, step.lookahead)):
        raise AlgorithmError(f"{method}: expected finite numbers, got {step}")
    if not (step.gamma is None or (_is_finite(step.gamma) and step.gamma > 0)):
        raise AlgorithmError(f"{method}: expected gamma to be None or {due_in('(0, inf)')}, got {step.gamma!r}")
    if step.v.v:
        raise AlgorithmError(f"{method}: expected v to be a form over A, B, T and g, got {step.v}")
    if not algorithm.keeps_total and (step.v.T or Linear(T=1) != step.T):
        raise AlgorithmError(
            f"{method}: expected no total, since keeps_total is False, got {step}: say keeps_total = True"
        )
    for said, entry in (
        (step.v.g or step.T.g, "keeps_momentum"),
        (step.gamma is not None, "says_gamma"),
        (step.lookahead, "looks_ahead"),
    ):
        if said and not getattr(algorithm, entry):
            raise AlgorithmError(
                f"{method}: expected what a first step of two clients showed, got {step}: say {entry} = True"
            )
    if not algorithm.sums_changes and (step.v.B or step.T.B):
        raise AlgorithmError(f"{method}: expected B = 0, since sums_changes is False, got {step}")
    return step


def _are_finite(numbers: Terms | Linear | Direction | tuple[float, ...]) -> bool:
    listed = numbers if isinstance(numbers, tuple) else astuple(numbers)
    if PLAIN.issuperset(map(type, listed)):
        return all(map(math.isfinite, listed))
    return all(map(_is_finite, listed))


def _is_finite(number: object) -> bool:
    known = type(number) is float or (isinstance(number, Real) and not isinstance(number, bool))
    return known and math.isfinite(number)  # type: ignore[arg-type]  # a float or a Real


def _try(call: Callable[[], Result], check: Callable[[Result], object]) -> None:
    """Check what a call returns; one that fails may be right for the cohorts that there will be."""
    try:
        with np.errstate(all="ignore"):
            result = call()
    except Exception:
        return
    check(result)
