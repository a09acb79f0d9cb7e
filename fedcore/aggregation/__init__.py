"""Aggregators, which make sums of a cohort's replies: one contract, and today's way of doing it."""

from fedcore.aggregation.aggregator import Admission, Aggregator, Lengths, Opened, Result
from fedcore.aggregation.replies import COUNTED, NO_COUNT, WEIGHTED, Counters, Replies
from fedcore.aggregation.row_exchange import exchange_whole
from fedcore.aggregation.sum import Precision, Sum, longest_term, longest_update
from fedcore.aggregation.whole import Alone, Squares, Whole, combined_square

__all__ = [
    "COUNTED",
    "NO_COUNT",
    "WEIGHTED",
    "Admission",
    "Aggregator",
    "Alone",
    "Counters",
    "Lengths",
    "Opened",
    "Precision",
    "Replies",
    "Result",
    "Squares",
    "Sum",
    "Whole",
    "combined_square",
    "exchange_whole",
    "longest_term",
    "longest_update",
]
