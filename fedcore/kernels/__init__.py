"""The kernels on bare arrays; ``fedcore.kernels.reference`` defines each of them in NumPy."""

from fedcore.kernels import reference
from fedcore.kernels.aggregate import (
    accumulate,
    server_step,
    weighted_sum,
    weighted_sum_norms,
    weighted_sum_segments,
    weighted_sum_segments_norms,
)
from fedcore.kernels.direction import direction_offset, direction_step
from fedcore.kernels.exchange import exchange
from fedcore.kernels.mix import mix
from fedcore.kernels.norms import all_finite, squared_norms
from fedcore.kernels.quantise import Codes, dequantise, quantise
from fedcore.kernels.summed import Summed

__all__ = [
    "Codes",
    "Summed",
    "accumulate",
    "all_finite",
    "dequantise",
    "direction_offset",
    "direction_step",
    "exchange",
    "mix",
    "quantise",
    "reference",
    "server_step",
    "squared_norms",
    "weighted_sum",
    "weighted_sum_norms",
    "weighted_sum_segments",
    "weighted_sum_segments_norms",
]
