"""torch's own random numbers, for a while from a seed of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedcore.randomness import generator


@contextmanager
def seeded(seed: int, purpose: str, *, round: int = 0, client: int = 0) -> Iterator[None]:
    """Inside, torch on the CPU draws numbers that depend on the arguments alone; afterwards it goes on as before.

    The arguments are those of ``fedcore.randomness.generator``.

    Cost: about 45 microseconds.
    """
    number = int(generator(seed, purpose, round=round, client=client).integers(2**63))
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would seed the accelerators too, whose state is not forked here.
        torch.default_generator.manual_seed(number)
        yield
