"""The kernels on bare arrays; ``fedcore.kernels.reference`` defines each of them in NumPy."""

from fedcore.kernels import checksum_reference, exact_reference, reference
from fedcore.kernels.aggregate import (
    accumulate,
    server_step,
    weighted_sum,
    weighted_sum_segments,
)
from fedcore.kernels.combine import combine, combined_square
from fedcore.kernels.direction import direction_step
from fedcore.kernels.exact import (
    ExactSum,
    accumulate_exact,
    combine_exact,
    exchange_exact,
    read_exact,
    sum_of_partials_exact,
)
from fedcore.kernels.exchange import exchange
from fedcore.kernels.forms import Linear, Terms
from fedcore.kernels.mix import mix
from fedcore.kernels.norms import all_finite, squared_norms, sum_of_partials
from fedcore.kernels.optimizer import optimizer_step
from fedcore.kernels.quantise import Codes, dequantise, quantise
from fedcore.kernels.summed import Summed
from fedcore.native import add_twins

for twins in (reference, checksum_reference, exact_reference):
    add_twins(twins)

__all__ = [
    "Codes",
    "ExactSum",
    "Linear",
    "Summed",
    "Terms",
    "accumulate",
    "accumulate_exact",
    "all_finite",
    "combine",
    "combine_exact",
    "combined_square",
    "dequantise",
    "direction_step",
    "exchange",
    "exchange_exact",
    "mix",
    "optimizer_step",
    "quantise",
    "read_exact",
    "reference",
    "server_step",
    "squared_norms",
    "sum_of_partials",
    "sum_of_partials_exact",
    "weighted_sum",
    "weighted_sum_segments",
]
