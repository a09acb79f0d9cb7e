"""Kernels on plain arrays; ``tests/oracle`` has a NumPy reference for each.

All kernels raise ShapeError, DtypeError, ArrayError, RangeError or UnknownNameError for an invalid argument, and then
write nothing. Their results are bit-identical on every ISA level and thread count. They change only outputs.
"""

from fedcore.kernels.aggregate import Summed, accumulate, weighted_sum, weighted_sum_segments
from fedcore.kernels.exact import ExactSum, combine_exact, read_exact, sum_of_partials_exact
from fedcore.kernels.forms import Linear, Terms
from fedcore.kernels.norms import all_finite, squared_norms, sum_of_partials
from fedcore.kernels.robust import gram_matrix, mean_near_median, trimmed_mean
from fedcore.kernels.rows import Codes, dequantise, exchange, quantise
from fedcore.kernels.step import (
    add_discrete_gaussian,
    combine,
    combined_square,
    direction_step,
    mix,
    optimizer_step,
    server_step,
)

__all__ = [
    "Codes",
    "ExactSum",
    "Linear",
    "Summed",
    "Terms",
    "accumulate",
    "add_discrete_gaussian",
    "all_finite",
    "combine",
    "combine_exact",
    "combined_square",
    "dequantise",
    "direction_step",
    "exchange",
    "gram_matrix",
    "mean_near_median",
    "mix",
    "optimizer_step",
    "quantise",
    "read_exact",
    "server_step",
    "squared_norms",
    "sum_of_partials",
    "sum_of_partials_exact",
    "trimmed_mean",
    "weighted_sum",
    "weighted_sum_segments",
]
