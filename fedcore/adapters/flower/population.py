"""How many examples each node has, where a method weighs by them."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcore.server.update import is_integer

Sizes: TypeAlias = Mapping[int, int] | Callable[[int], int] | None
EXAMPLES = "num-examples"
MOST = 10**9


def ask_sizes(grid: Grid, nodes: Iterable[int], known: Sizes, config_key: str) -> dict[int, int]:
    """n_k of the nodes: as is known, or as they answer to a query; without those that give no integer in 1..10^9."""
    nodes = list(nodes)
    if callable(known):
        return {node: known(node) for node in nodes}
    if known is not None:
        return {node: known[node] for node in nodes if node in known}
    question = RecordDict({config_key: ConfigRecord({"fedcore": EXAMPLES})})
    sizes = {}
    for reply in grid.send_and_receive([Message(question, node, "query") for node in nodes], timeout=60.0):
        if reply.has_error():
            continue
        for record in reply.content.metric_records.values():
            size = record.get(EXAMPLES)
            if is_integer(size, 1, MOST):
                sizes[reply.metadata.src_node_id] = int(size)  # type: ignore[arg-type]
    return sizes
