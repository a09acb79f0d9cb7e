"""The requests that were sent, and the nodes that failed."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Asked:
    """A message that was made for a node: its metadata (a grid fills the id in), the round's number, and the draws."""

    metadata: Any
    node: int
    round: int
    count: int

    @property
    def message_id(self) -> str:
        """The id that a reply refers to. An error may come from another than the node, so this tells replies apart."""
        return str(self.metadata.message_id)


class Failure(NamedTuple):
    """A node that answered with an error: Flower's code and reason."""

    node: int
    code: int
    reason: str
