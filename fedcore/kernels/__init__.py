"""The kernels on bare arrays; ``fedcore.kernels.reference`` defines each of them in NumPy."""

from fedcore.kernels import reference
from fedcore.kernels.aggregate import accumulate, server_step, weighted_sum
from fedcore.kernels.direction import direction_offset, direction_step
from fedcore.kernels.exchange import exchange
from fedcore.kernels.mix import mix
from fedcore.kernels.norms import all_finite, squared_norms

__all__ = [
    "accumulate",
    "all_finite",
    "direction_offset",
    "direction_step",
    "exchange",
    "mix",
    "reference",
    "server_step",
    "squared_norms",
    "weighted_sum",
]
