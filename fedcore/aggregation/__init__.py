"""Aggregators, which make sums of a cohort's replies: one contract, and today's way of doing it."""

from fedcore.aggregation.aggregator import Admission, Aggregator, Lengths, Opened, Result
from fedcore.aggregation.replies import Counters, Replies
from fedcore.aggregation.row_exchange import exchange_whole
from fedcore.aggregation.sum import Precision, Sum, longest_update

__all__ = [
    "Admission",
    "Aggregator",
    "Counters",
    "Lengths",
    "Opened",
    "Precision",
    "Replies",
    "Result",
    "Sum",
    "exchange_whole",
    "longest_update",
]
