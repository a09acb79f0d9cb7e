"""The numbers that clients say of their work, read without believing any of them, so that nobody's can spoil a mean."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import ERROR, WARNING
from typing import Any, TypeAlias, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcore.adapters.flower.grid import failure_of, request_of
from fedcore.adapters.flower.records import EXAMPLES
from fedcore.adapters.session import rejections
from fedcore.arguments import integral, real, reason_of, shown, whole
from fedcore.errors import ArrayError, RangeError
from fedcore.rules import median

MOST = 2**53
IN_RANGE = f"(0, {MOST}]"
"""Examples that a reply may claim where it weighs nothing but means; a fraction too, as Flower takes one."""

LARGEST = float(np.finfo(np.float32).max)

HEAVIEST = 2**16
"""Bytes of the metrics of one reply, which are kept until the round's end."""

Node = TypeVar("Node")
T = TypeVar("T")
M = TypeVar("M")
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)
Rejected: TypeAlias = list[tuple[int, str]]
Sizes: TypeAlias = Mapping[int, int] | Callable[[int], int] | None
Form: TypeAlias = tuple[str, tuple[tuple[str, int], ...]]
"""The record's name, and each metric's with the length of its list, or -1."""


def records_of(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """The records of one kind, by name; Flower's own properties make a dictionary that checks each again, for 20 us."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def only_record(content: RecordDict) -> MetricRecord:
    """The one record of metrics in a reply.

    Raises:
        ArrayError: there is another number of them.
    """
    records = records_of(content, MetricRecord)
    if len(records) != 1:
        raise ArrayError(f"metrics: expected one record, got {len(records)}")
    return next(iter(records.values()))


def within_medians(
    claims: Mapping[Node, float], where: str, ratio: float | None = None, accepted: Sequence[float] = ()
) -> dict[Node, float]:
    """Numbers of examples by node, none of them more than ``ratio`` times the median of all, which the log says.

    Of an even number the median is the lower of the two in the middle.

    Args:
        where: what the claims are of, for the log.
        ratio: that of ``CapExamples``; None for no limit.
        accepted: what other nodes claimed before.
    """
    if not claims or ratio is None:
        return dict(claims)
    most = min(ratio * float(median(np.array([*claims.values(), *accepted], np.float64))), MOST)
    most = int(most) if most >= 1 else most
    for node, claim in claims.items():
        if claim > most:
            told = where, node, most, claim, ratio
            log(
                WARNING,
                "%s: node %s counts with %g of %g examples: CapExamples(%g)",
                *told,
            )
    return {node: min(claim, most) for node, claim in claims.items()}


class Collected:
    """The metrics of a round's replies as they come, and nothing else of these: no more than ``HEAVIEST`` of each."""

    def __init__(self) -> None:
        self._contents: dict[int, RecordDict] = {}
        self._rejected: Rejected = []

    def __len__(self) -> int:
        return len(self._contents) + len(self._rejected)

    def add(self, node: int, reply: Message) -> None:
        """Keep what is used of a reply's content."""
        try:
            records = records_of(reply.content, MetricRecord)
            if (weight := _bytes_of(records.values())) > HEAVIEST:
                raise RangeError(f"metrics: expected at most {HEAVIEST} bytes, got {weight}")
            self._contents[node] = RecordDict({str(name): _copied(record) for name, record in records.items()})
        except Exception as error:
            self._rejected.append((node, reason_of(error)))

    def usual(
        self, weight: str, where: str, ratio: float | None = None, nodes: Iterable[int] | None = None
    ) -> tuple[list[RecordDict], Rejected]:
        """The replies whose metrics can be averaged, and the nodes and reasons of the others.

        Those are left out that have no record or more than one, no number of examples, a number that is not finite or
        past float32's range, or other names and lengths than most; where as many have others, none counts. With a
        ratio a claim of examples weighs up to so many times the median. Any other number is believed, and moves the
        mean by its share of the examples.

        Args:
            weight: the metric that says how many examples a client used; that of a claim too large is lowered.
            where: what the metrics are of, for the log.
            ratio: that of ``CapExamples``; None for no limit.
            nodes: whose replies alone count; None for all.
        """
        chosen = [*self._contents] if nodes is None else [node for node in nodes if node in self._contents]
        forms: dict[int, Form] = {}
        rejected = list(self._rejected)
        for node in chosen:
            try:
                forms[node] = _form(self._contents[node], weight)
            except Exception as error:
                rejected.append((node, reason_of(error)))
        counted = Counter(forms.values())
        first = counted.most_common(2)
        usual = first[0][0] if len(first) == 1 or (first and first[0][1] > first[1][1]) else None
        for node, form in forms.items():
            if form != usual:
                rejected.append((node, "metrics: expected those that most replies have, got other names or lengths"))
        chosen = [node for node, form in forms.items() if form == usual]
        records = {node: only_record(self._contents[node]) for node in chosen}
        claims = {node: integral(record[weight]) for node, record in records.items()}
        for node, most in within_medians(claims, where, ratio).items():
            if records[node][weight] != most:
                records[node][weight] = most
        return [self._contents[node] for node in chosen], rejected


def mean_of(function: Callable[[list[T]], M], replies: list[T]) -> M | None:
    """The result of a user's function of the replies' metrics, without those for which alone it raises.

    Clients choose the metrics: those of one must not end a run. None where no reply is left.

    Raises:
        Exception: the function raises for every one of several replies, or for all that are left together.
    """
    if not replies:
        return None
    try:
        return function(replies)
    except Exception:
        good = [reply for reply in replies if _is_usable(function, reply)]
        if len(good) == len(replies) or (not good and len(replies) > 1):
            raise
        left_out = len(replies) - len(good)
        log(
            ERROR, "metrics: %d replies are left out, for which the function of metrics failed", left_out, exc_info=True
        )
        return function(good) if good else None


def _is_usable(function: Callable[[list[T]], object], reply: T) -> bool:
    try:
        function([reply])
    except Exception:
        return False
    return True


def require_finite(name: object, value: object) -> None:
    """Refuse a metric that would spoil a mean, by its name, so that a summary counts the replies of each.

    Raises:
        ArrayError: it is a number, or has one, that is not finite, or that float32 cannot hold: sums would be infinite.
    """
    numbers = value if isinstance(value, list) else [value]
    if not all(-LARGEST <= number <= LARGEST for number in numbers if isinstance(number, float | int)):
        raise ArrayError(f"metric {str(name)[:40]!r}: expected finite numbers, got {shown(value)}")


def _bytes_of(records: Iterable[MetricRecord]) -> int:
    """The weight of records, about: 8 bytes a number, and the names."""
    return sum(
        len(name) + 8 * (len(value) if isinstance(value, list) else 1)
        for record in records
        for name, value in record.items()
    )


def plain_number(value: object) -> Any:
    """An integer or a float of a class of its own as the number that it holds; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)


def _copied(record: MetricRecord) -> MetricRecord:
    """A record of the same numbers, in whose making Flower checks their types."""
    return MetricRecord(
        {
            str(name): [plain_number(number) for number in value] if isinstance(value, list) else plain_number(value)
            for name, value in record.items()
        }
    )


def _form(content: RecordDict, weight: str) -> Form:
    record = only_record(content)
    real(weight, record.get(weight), IN_RANGE)
    form = []
    for name, value in record.items():
        require_finite(name, value)
        form.append((name, len(value) if isinstance(value, list) else -1))
    return next(iter(records_of(content, MetricRecord))), tuple(sorted(form))


# The query for each node's number of examples, for the methods that weigh by it.


def ask_sizes(
    grid: Grid,
    nodes: Iterable[int],
    known: Sizes,
    config_key: str,
    ratio: float | None = None,
    accepted: Sequence[int] = (),
) -> dict[int, int]:
    """n_k of the nodes: as is known, or as they answer to a query; without those that give no integer in 1..10^9.

    An answer counts up to ``ratio`` times the median of all (of an even number the lower of the two in the middle).

    Args:
        ratio: that of ``CapExamples``; None for no limit.
        accepted: what other nodes answered before.
    """
    nodes = list(nodes)
    if callable(known):
        return {node: known(node) for node in nodes}
    if known is not None:
        return {node: known[node] for node in nodes if node in known}
    question = RecordDict({config_key: ConfigRecord({"fedcore": EXAMPLES})})
    messages = [Message(question, node, "query") for node in nodes]
    replies = list(grid.send_and_receive(messages, timeout=60.0))
    asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    sizes: dict[int, int] = {}
    rejected: Rejected = []
    for reply in replies:
        node = request_of(asked, reply)
        if node is None or failure_of(node, reply):
            continue
        try:
            sizes[node] = whole(EXAMPLES, integral(only_record(reply.content).get(EXAMPLES)), 1, MOST)
        except Exception as error:
            rejected.append((node, reason_of(error)))
    if rejected:
        log(WARNING, "query: %s", rejections(rejected, len(sizes)))
    return {node: int(size) for node, size in within_medians(sizes, "query", ratio, accepted).items()}
