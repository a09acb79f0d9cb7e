"""The query for each node's number of examples, for the methods that weigh by it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import WARNING
from typing import TypeAlias

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcore.adapters.flower.metrics import MOST, Refused, only_record, within_medians
from fedcore.adapters.flower.pending import failure_of, request_of
from fedcore.adapters.refusals import refusals
from fedcore.arguments import integral, reason_of, whole

Sizes: TypeAlias = Mapping[int, int] | Callable[[int], int] | None
EXAMPLES = "num-examples"


def ask_sizes(
    grid: Grid,
    nodes: Iterable[int],
    known: Sizes,
    config_key: str,
    ratio: float | None = None,
    heard: Sequence[int] = (),
) -> dict[int, int]:
    """n_k of the nodes: as is known, or as they answer to a query; without those that give no integer in 1..10^9.

    An answer counts up to ``ratio`` times the median of all (of an even number the lower of the two in the middle).

    Args:
        ratio: ``max_examples_ratio``; None for no limit.
        heard: what other nodes answered before.
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
    refused: Refused = []
    for reply in replies:
        node = request_of(asked, reply)
        if node is None or failure_of(node, reply):
            continue
        try:
            sizes[node] = whole(EXAMPLES, integral(only_record(reply.content).get(EXAMPLES)), 1, MOST)
        except Exception as error:
            refused.append((node, reason_of(error)))
    if refused:
        log(WARNING, "query: %s", refusals(refused, len(sizes)))
    return {node: int(size) for node, size in within_medians(sizes, "query", ratio, heard).items()}
