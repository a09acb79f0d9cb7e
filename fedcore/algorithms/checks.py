"""Whether a method's table contradicts itself, and whether what it returns is what was due.

A table's entries are read in several places, each of which leaves out what it does not know: a contradiction would not
fail there, but be another method.
"""

import math
from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, signature
from numbers import Real
from typing import Any, TypeVar, get_args

import numpy as np

from fedcore.algorithms.algorithm import F64, Added, Algorithm, Claims, Cohort, Direction, Placement, Step
from fedcore.errors import AlgorithmError, UnknownNameError

FLAGS = ("keeps_total", "averages_models", "takes_server_rate", "steps_without_clients", "needs_shares")
OF_TOTAL = ("from_total", "keep_sum", "keep_control", "keep_v")

# What ``weigh`` and ``step`` are tried with before there is a round.
CLAIMS = Claims(np.array([1.0, 2.0]), np.array([1.0, 3.0]), np.ones(2), np.array([0.25, 0.75]), None)
COHORT = Cohort(S=2, weighed=2, N=3, devices=3, W=2.0, rows=2)

Result = TypeVar("Result")


def check_table(algorithm: Algorithm) -> None:
    """Refuse a method whose entries contradict each other, or whose options are not kept as attributes.

    ``weigh`` and ``step`` are tried on a cohort of two clients; what they return for others is seen when it is used.

    Raises:
        UnknownNameError: ``adds`` or ``placement`` is not one of those that there are.
        AlgorithmError: anything else is not what ``Algorithm`` says of it.
    """
    method = type(algorithm).__name__
    for entry, known in (("adds", get_args(Added)), ("placement", get_args(Placement))):
        if getattr(algorithm, entry) not in known:
            raise UnknownNameError.of(f"{method}.{entry}", getattr(algorithm, entry), known)

    def expect(right: bool, entry: str, due: str) -> None:
        if not right:
            raise AlgorithmError(f"{method}.{entry}: expected {due}, got {getattr(algorithm, entry)!r}")

    for flag in FLAGS:
        expect(isinstance(getattr(algorithm, flag), bool), flag, "True or False")
    second, d = algorithm.second, algorithm.direction
    named = second is None or (isinstance(second, str) and second != "")
    expect(named, "second", "None, or what clients send beside y: 'mean gradient', or words of your own")
    expect(isinstance(algorithm.local_rule, str), "local_rule", "the name of a local rule")
    expect(isinstance(d, Direction) and _are_finite(d), "direction", "a Direction of finite numbers")
    for_rows = "'h', since the second vector becomes the row" if second else "'h', since clients keep their rows"
    expect(algorithm.adds == "h" or (not second and algorithm.placement == "server"), "adds", for_rows)
    expect("v[t]" not in algorithm.adds or algorithm.keeps_total, "keeps_total", "True beside adds = 'h - r + v[t]'")
    expect("raw" not in algorithm.adds or d.a != 0, "direction", "a != 0, by which raw_i is divided")
    has_rows = algorithm.keeps_rows or algorithm.placement == "client"
    expect(not d.from_row or has_rows, "direction", "from_row = 0, since there are no rows: adds one, or second")
    expect(not d.from_mean or algorithm.keeps_total, "direction", "from_mean = 0, since keeps_total is False")
    for option, parameter in signature(type(algorithm)).parameters.items():
        if parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and not hasattr(algorithm, option):
            raise AlgorithmError(
                f"{method}.{option}: expected the option as an attribute of its name, by which a saved server knows "
                f"it, got none: say self.{option} = {option}"
            )
    _try(lambda: algorithm.weigh(CLAIMS), lambda weights: check_weights(algorithm, weights, CLAIMS))
    _try(lambda: algorithm.step(COHORT), lambda step: check_step(algorithm, step))


def check_weights(algorithm: Algorithm, weights: Any, claims: Claims) -> F64:
    """What ``weigh`` returned, if it is what was due.

    Raises:
        AlgorithmError: it is not float64[k], finite and >= 0.
    """
    k = len(claims.steps)
    if isinstance(weights, np.ndarray) and weights.dtype == np.float64 and weights.shape == (k,):
        if np.isfinite(weights).all() and (weights >= 0).all():
            return weights
        got = f"{weights[~(np.isfinite(weights) & (weights >= 0))][0]:g}"
    else:
        got = f"{weights.dtype}{list(weights.shape)}" if isinstance(weights, np.ndarray) else repr(weights)[:100]
    raise AlgorithmError(f"{type(algorithm).__name__}.weigh: expected float64[{k}], finite and >= 0, got {got}")


def check_step(algorithm: Algorithm, step: Any) -> Step:
    """What ``step`` returned, if it is what was due.

    Raises:
        AlgorithmError: it is no Step of finite numbers, or has coefficients of what the method does not keep.
    """
    method = f"{type(algorithm).__name__}.step"
    if not isinstance(step, Step):
        raise AlgorithmError(f"{method}: expected a Step, got {type(step).__name__}")
    if not _are_finite(step):
        raise AlgorithmError(f"{method}: expected finite numbers, got {step}")
    if not algorithm.keeps_total:
        for name in OF_TOTAL:
            if getattr(step, name):
                raise AlgorithmError(
                    f"{method}: expected {name} = 0, since keeps_total is False, got {getattr(step, name)!r}: "
                    "say keeps_total = True"
                )
    if step.keep_control and not algorithm.second:
        raise AlgorithmError(
            f"{method}: expected keep_control = 0, since clients send no second vector, got {step.keep_control!r}"
        )
    return step


def _are_finite(numbers: Direction | Step) -> bool:
    values = [getattr(numbers, field.name) for field in fields(numbers)]
    return all(isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) for value in values)


def _try(call: Callable[[], Result], check: Callable[[Result], object]) -> None:
    """Check what a call returns; one that fails may be right for the cohorts that there will be."""
    try:
        with np.errstate(all="ignore"):
            result = call()
    except Exception:
        return
    check(result)
