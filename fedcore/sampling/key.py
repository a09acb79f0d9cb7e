"""The key of a draw's random numbers."""

from fedcore.arguments import whole
from fedcore.randomness import tag

LONGEST = 2**63 - 1  # indices are int64
_WORD = 2**64 - 1

Key = tuple[int, int, int, int]  # seed, round, client, purpose


def key(seed: int, round: int, purpose: str) -> Key:
    """The key of a draw over all clients, for which no single client's number stands."""
    return whole("seed", seed, 0, _WORD), whole("round", round, 0, _WORD), 0, tag(purpose)
