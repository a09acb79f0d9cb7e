"""The keys by which a server's rows are rounded, where a codec rounds."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedcore import randomness
from fedcore.clients import ClientId
from fedcore.store import ClientStore

Occasion = Literal["a reply", "a history that is folded", "a warm start"]
"""Why a row is written. A client has at most one row of each in a round, so no two rows share their random bits."""


def rounding_keys(
    store: ClientStore, occasion: Occasion, round: int, clients: Sequence[ClientId]
) -> npt.NDArray[np.uint64] | None:
    """Keys for ``kernels.exchange``, uint64[k, 2]; None where rows are float32.

    They depend on the round, the client and the occasion alone: not on slots, on who else is there, or on when the
    round is done. So a round that was left half-way, or lost with the process, has the same bits when it is done again.

    Args:
        round: the one that is open.
    """
    if store.codec == "f32":
        return None
    return randomness.keys(f"row of {occasion}", round=round, clients=clients)
