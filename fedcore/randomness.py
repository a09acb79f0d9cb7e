"""Every random number comes from (seed, round, client, purpose), so that any part of a run can be repeated alone."""

import hashlib

import numpy as np


def tag(purpose: str) -> int:
    """The 64 bits that stand for a purpose: the first of its BLAKE2s digest, little-endian.

    >>> tag("minibatches") == tag("cohort")
    False
    """
    return int.from_bytes(hashlib.blake2s(purpose.encode(), digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, *, round: int = 0, client: int = 0) -> np.random.Generator:
    """A generator that depends on its arguments alone.

    Args:
        seed: the run's seed, any int >= 0.
        purpose: what the numbers are for (``"minibatches"``); two purposes never share a stream.
        round: the round, where the numbers are drawn anew each round.
        client: the client's index, where each client has its own.

    Returns:
        A NumPy ``Generator`` over the counter-based Philox.

    Determinism: the same on every platform for one version of NumPy.
    Cost: about 20 microseconds.

    >>> float(generator(7, "example").random()) == float(generator(7, "example").random())
    True
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, tag(purpose), round, client])))
