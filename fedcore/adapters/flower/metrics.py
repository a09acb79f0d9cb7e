"""The numbers that clients say of their work, read without believing any of them, so that nobody's can spoil a mean."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from flwr.app import MetricRecord, RecordDict

from fedcore.errors import ArrayError, FedcoreError, RangeError
from fedcore.server.limits import is_integer, shown

MOST = 10**9
"""Examples that a reply may claim where it weighs nothing but means."""

Refused: TypeAlias = list[tuple[int, str]]
Form: TypeAlias = tuple[str, tuple[tuple[str, int], ...]]
"""The record's name, and each metric's with the length of its list, or -1."""


def only_record(content: RecordDict) -> MetricRecord:
    """The one record of metrics in a reply.

    Raises:
        ArrayError: there is another number of them.
    """
    records = content.metric_records
    if len(records) != 1:
        raise ArrayError(f"metrics: expected one record, got {len(records)}")
    return next(iter(records.values()))


def whole(value: object) -> Any:
    """A float that is an integer as that, as stock ClientApps send their counts; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def usual_metrics(contents: Mapping[int, RecordDict], weight: str) -> tuple[list[RecordDict], Refused]:
    """The replies whose metrics can be averaged, and the nodes and reasons of the others.

    Those are left out that have no record or more than one, no number of examples, a number that is not finite, or
    other names and lengths than most.

    Args:
        contents: by node.
        weight: the metric that says how many examples a client used.
    """
    forms: dict[int, Form] = {}
    refused: Refused = []
    for node, content in contents.items():
        try:
            forms[node] = _form(content, weight)
        except FedcoreError as error:
            refused.append((node, str(error)))
    counted = Counter(forms.values())
    usual = max(counted, key=lambda form: counted[form], default=None)
    for node, form in forms.items():
        if form != usual:
            refused.append((node, "metrics: expected those that most replies have, got other names or lengths"))
    return [contents[node] for node, form in forms.items() if form == usual], refused


def _form(content: RecordDict, weight: str) -> Form:
    record = only_record(content)
    if not is_integer(whole(record.get(weight)), 1, MOST):
        raise RangeError(f"{weight}: expected an integer in 1..{MOST}, got {shown(record.get(weight))}")
    form = []
    for name, value in record.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(math.isfinite(number) for number in numbers):
            raise ArrayError(f"metrics: expected finite numbers, got {shown(value)} for {name[:40]!r}")
        form.append((name, len(numbers) if isinstance(value, list) else -1))
    return next(iter(content.metric_records)), tuple(sorted(form))
