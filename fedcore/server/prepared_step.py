"""A round's step before it counts: what it would make of the server, and what it came from."""

from collections.abc import Sequence
from typing import NamedTuple

from fedcore.aggregation import Result
from fedcore.algorithms import Cohort, Step
from fedcore.server.snapshot import Snapshot


class PreparedStep(NamedTuple):
    """A step of which nothing has changed yet: before ``State.accept`` a vote, noise or a measurement fits."""

    before: Snapshot
    result: Result
    cohort: Cohort
    after: Snapshot
    """What the server knows once the step counts."""
    step: Step | None = None
    """The coefficients of v and T'; None where nobody was heard and x stays."""
    v_square: float = 0.0
    """|v|^2."""
    gamma: float = 0.0
    """The step along v; 0 where x stays."""
    awaited: int = 0
    """How many clients were never heard, for which x waits."""
    most_steps: int | None = None
    """How many steps gamma has counted of a client that claimed more; None where it counted all of everybody's."""
    rounds: Sequence[int | None] = ()
    """Of the cohort's rows before the round, where the server keeps rows; None for a client without one."""
