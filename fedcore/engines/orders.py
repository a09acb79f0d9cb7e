"""The orders of a round as an engine carries them out, wherever the clients are trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fedcore.algorithms import MEAN_GRADIENT, Direction
from fedcore.assignment import Assignment
from fedcore.server import Broadcast
from fedcore.typing import F32

NO_ROUND = 2**32 - 1
"""The round whose minibatches a warm start takes: one that no run comes to."""


class Sent(Protocol):
    """The words and vectors that clients are sent: a ``Broadcast``, or what a worker got of one."""

    @property
    def x(self) -> F32:
        """float32[n], from which clients start, read-only and in host memory."""
        ...

    @property
    def common(self) -> Assignment:
        """The order to all of them alike, without an offset."""
        ...

    def of(self, client: int) -> Assignment:
        """The whole order to one of them; its offset is made when it is asked for."""
        ...


@dataclass(frozen=True)
class Orders:
    """The orders to some clients of a round, in the order in which they are trained.

    Attributes:
        clients: indices into the parts.
        steps: the local steps that each is to do.
        counts: how often each was drawn.
        sent: what they are asked, and the vectors with it, which are read when somebody trains, and not before.
    """

    clients: Sequence[int]
    steps: Sequence[int]
    counts: Sequence[int]
    sent: Sent


def standing(broadcast: Broadcast) -> Broadcast:
    """A broadcast by which the clients stay at x and send the mean of their gradients there, for a warm start.

    Steps of length zero, along other minibatches than any round's.
    """
    still = replace(broadcast, direction=Direction(a=0.0), has_offset=False)
    return replace(still, second_vector=MEAN_GRADIENT, round=NO_ROUND)
