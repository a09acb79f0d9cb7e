"""|A|^2 of a round, measured when a method first asks for it, and outside of the method's own code."""

from collections.abc import Callable
from typing import TypeVar

from fedcore.algorithms import Cohort

T = TypeVar("T")


class _NotMeasuredError(BaseException):
    """A method has asked for what is not measured yet. No Exception, since methods may handle those."""


class AskedSquare:
    """The ``Cohort.measure`` of a round. In a question it is answered once the question has been left, and put again.

    A shard that measures waits for the others. If it did so within a method's code, it would hold the locks that this
    has taken, such as that of a ``functools.cached_property``, of which Python 3.11 has one for all objects of a class:
    other shards in the same process would wait for it in turn. Methods answer by their arguments alone, so that they
    may be asked twice.

    Args:
        measure: what takes the time, and asks other shards.
    """

    def __init__(self, measure: Callable[[], float]) -> None:
        self._measure, self._value, self._in_question = measure, float("nan"), False
        self._is_measured = False

    def __call__(self) -> float:
        """The value."""
        if not self._is_measured:
            if self._in_question:
                raise _NotMeasuredError
            self._value, self._is_measured = self._measure(), True
        return self._value

    def answer(self, question: Callable[[Cohort], T], cohort: Cohort) -> T:
        """The answer of a method's function of a cohort, which has this as its ``measure``."""
        self._in_question = not self._is_measured
        try:
            return question(cohort)
        except _NotMeasuredError:
            pass  # nothing of the question is under way any more
        finally:
            self._in_question = False
        self()
        return question(cohort)
