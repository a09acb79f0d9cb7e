"""Checks of the metrics and numbers of examples that clients report, so that no client can distort a mean."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import ERROR, WARNING
from typing import Any, TypeAlias, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcore.adapters.flower.grid import Request, answers, by_id
from fedcore.adapters.flower.records import EXAMPLES
from fedcore.adapters.session import rejections
from fedcore.errors import ArrayError, RangeError
from fedcore.options import LARGEST
from fedcore.rules.windows import least_logged, median
from fedcore.validation import as_integer, check_integer, check_number, rejection_reason, short_repr

MOST = 2**53
IN_RANGE = f"(0, {MOST}]"
"""The valid range of a reported number of examples that only weights a mean. Fractions are allowed, as in Flower."""

HEAVIEST = 2**16
"""The maximum size in bytes of one reply's metrics, which are kept until the end of the round."""

T = TypeVar("T")
M = TypeVar("M")
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)
Rejected: TypeAlias = list[tuple[int, str]]
Sizes: TypeAlias = Mapping[int, int] | Callable[[int], int] | None


def records_of(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """Return the records of one kind, by name; avoids the 20 us of Flower's own properties, which copy and check."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def only_record(content: RecordDict) -> MetricRecord:
    """Return the only record of metrics in a reply."""
    records = records_of(content, MetricRecord)
    if len(records) != 1:
        raise ArrayError(f"metrics: the reply has {len(records)} metric records; it must have exactly one")
    return next(iter(records.values()))


def within_medians(
    claims: Mapping[int, float], where: str, ratio: float | None = None, accepted: Sequence[float] = ()
) -> dict[int, float]:
    """Return the numbers of examples by node, capped at ``ratio`` times their median, and log great claims.

    The median of an even number of values is the lower of the two middle values. It includes ``accepted``, the earlier
    numbers of other nodes.
    """
    if not claims or ratio is None:
        return dict(claims)
    most = min(ratio * float(median(np.array([*claims.values(), *accepted], np.float64))), MOST)
    most = int(most) if most >= 1 else most
    for node, claim in claims.items():
        if claim > most * least_logged(ratio):
            text = "%s: node %s: examples capped at %g (reported: %g) by CapExamples(%g)"
            log(WARNING, text, where, node, most, claim, ratio)
    return {node: min(claim, most) for node, claim in claims.items()}


class Collected:
    """The metrics of a round's replies, at most ``HEAVIEST`` bytes of each."""

    def __init__(self) -> None:
        self._contents: dict[int, RecordDict] = {}
        self._rejected: Rejected = []

    def __len__(self) -> int:
        return len(self._contents) + len(self._rejected)

    def add(self, node: int, reply: Message) -> None:
        """Keep a copy of a reply's metric records; Flower checks their types."""
        try:
            records, size = records_of(reply.content, MetricRecord), 0
            for record in records.values():
                size += sum(len(k) + 8 * (len(v) if isinstance(v, list) else 1) for k, v in record.items())
            if size > HEAVIEST:
                raise RangeError(f"metrics: {size} bytes; must be at most {HEAVIEST}")
            copies: dict[str, Any] = {
                str(name): MetricRecord({str(k): _plain(v) for k, v in record.items()})
                for name, record in records.items()
            }
            self._contents[node] = RecordDict(copies)
        except Exception as error:
            self._rejected.append((node, rejection_reason(error)))

    def usual(
        self, weight: str, where: str, ratio: float | None = None, nodes: Iterable[int] | None = None
    ) -> tuple[list[RecordDict], Rejected]:
        """Return the replies whose metrics can be averaged, and (node, reason) for each rejected reply.

        A reply is rejected in these cases:

        * It does not have exactly one record of metrics.
        * It has no valid number of examples in the metric ``weight``.
        * A metric is not finite, or outside float32's range.
        * Its names or lengths differ from those of most replies. All are rejected if two forms are equally frequent.

        ``within_medians`` caps the number of examples. Other metrics are unchanged.
        """
        chosen = [*self._contents] if nodes is None else [node for node in nodes if node in self._contents]
        forms: dict[int, Any] = {}
        rejected = list(self._rejected)
        for node in chosen:
            try:
                forms[node] = _form(self._contents[node], weight)
            except Exception as error:
                rejected.append((node, rejection_reason(error)))
        first = Counter(forms.values()).most_common(2)
        usual = first[0][0] if len(first) == 1 or (first and first[0][1] > first[1][1]) else None
        other = "metrics: the names or lengths differ from those of most replies"
        rejected += [(node, other) for node, form in forms.items() if form != usual]
        records = {node: only_record(self._contents[node]) for node, form in forms.items() if form == usual}
        claims = {node: as_integer(record[weight]) for node, record in records.items()}
        for node, most in within_medians(claims, where, ratio).items():
            if records[node][weight] != most:
                records[node][weight] = most
        return [self._contents[node] for node in records], rejected


def mean_of(function: Callable[[list[T]], M], replies: list[T]) -> M | None:
    """Return a user's function of the replies' metrics, without replies for which it fails; None without any reply.

    Clients choose the metrics, so one client's metrics must not end a run.
    """
    if not replies:
        return None
    try:
        return function(replies)
    except Exception:
        good = [reply for reply in replies if _is_usable(function, reply)]
        if len(good) == len(replies) or (not good and len(replies) > 1):
            raise
        failed = len(replies) - len(good)
        log(ERROR, "metrics: the aggregation failed for %d of %d replies", failed, len(replies), exc_info=True)
        return function(good) if good else None


def _is_usable(function: Callable[[list[T]], object], reply: T) -> bool:
    try:
        function([reply])
    except Exception:
        return False
    return True


def _plain(value: Any) -> Any:
    """Convert a number or a list of numbers to plain Python types; return other values unchanged."""
    if isinstance(value, list):
        return [_plain(number) for number in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)


def _form(content: RecordDict, weight: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return the record's name, and each metric's name with the length of its list, or -1 for a number."""
    record = only_record(content)
    check_number(weight, record.get(weight), IN_RANGE)
    for name, value in record.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(-LARGEST <= number <= LARGEST for number in numbers if isinstance(number, float | int)):
            raise ArrayError(
                f"metric {str(name)[:40]!r}: must be finite and in float32's range, got {short_repr(value)}"
            )
    return next(iter(records_of(content, MetricRecord))), tuple(
        sorted((k, len(v) if isinstance(v, list) else -1) for k, v in record.items())
    )


# The query for each node's number of examples, for methods that weight by it.


def ask_sizes(
    grid: Grid, nodes: Iterable[int], known: Sizes, config_key: str, ratio: float | None, accepted: Sequence[int]
) -> dict[int, int]:
    """Return n_k by node, from ``known`` or by a query; omit nodes that do not report an integer in 1..2^53.

    ``within_medians`` caps the reported numbers.
    """
    nodes = list(nodes)
    if callable(known):
        return {node: known(node) for node in nodes}
    if known is not None:
        return {node: known[node] for node in nodes if node in known}
    question = RecordDict({config_key: ConfigRecord({"fedcore": EXAMPLES})})
    messages = [Message(question, node, "query") for node in nodes]
    replies = list(grid.send_and_receive(messages, timeout=60.0))
    pending = by_id(Request(message.metadata, message.metadata.dst_node_id) for message in messages)
    sizes: dict[int, float] = {}
    rejected: Rejected = []
    for request, reply, failure in answers(replies, pending):
        if request is None or failure is not None:
            continue
        try:
            sizes[request.node] = check_integer(EXAMPLES, as_integer(only_record(reply.content).get(EXAMPLES)), 1, MOST)
        except Exception as error:
            rejected.append((request.node, rejection_reason(error)))
    if rejected:
        log(WARNING, "query: %s", rejections(rejected, len(sizes)))
    return {node: int(size) for node, size in within_medians(sizes, "query", ratio, accepted).items()}
