"""The pattern in which everybody takes part, in every round."""

from fedcore.participation.active import Active
from fedcore.participation.pattern import Participation


class Always(Participation):
    """Full participation; in a composition it changes nothing.

    Args:
        clients, among, seed, first_round: see ``Participation``.

    Raises:
        RangeError: an argument is outside its range.

    >>> Always(3).active(7).clients
    array([0, 1, 2])
    """

    def _choose(self, round: int, candidates: Active) -> Active:
        return candidates
