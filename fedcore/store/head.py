"""What an index says beside the rows and clients."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedcore.errors import CorruptionError, RangeError
from fedcore.store.header import digest
from fedcore.store.row_format import Codec


@dataclass(frozen=True)
class StoredVector:
    """Where a vector lies: in a slot of the file for its payload."""

    payload: int
    slot: int
    dtype: str
    shape: tuple[int, ...]
    seal: int


@dataclass(frozen=True)
class Head:
    """The small part of an index, one JSON text.

    Attributes:
        store: the id that the files of one store share, in hexadecimal.
        codec, n: of the rows.
        clients: how many a count registered; 0 where all ids are listed.
        sequence: how many transactions there were.
        round: the last committed round.
        state: the caller's state as JSON.
        rows_sum, clients_sum: the sums of the digests of all listed rows and clients.
    """

    store: str
    codec: Codec
    n: int
    clients: int
    sequence: int = 0
    round: int | None = None
    state: str | None = None
    vectors: dict[str, StoredVector] = field(default_factory=dict)
    rows_sum: int = 0
    clients_sum: int = 0

    def text(self) -> str:
        """The head as JSON, with a digest of it in front."""
        content = json.dumps(asdict(self))
        return digest(content.encode()).hex() + content

    @classmethod
    def parsed(cls, text: object) -> "Head":
        """The head of which this is the text.

        Raises:
            CorruptionError: it is no head's.
        """
        check, content = (text[:16], text[16:]) if isinstance(text, str) else ("", "")
        if check != digest(content.encode()).hex():
            raise CorruptionError("its head was changed")
        fields = json.loads(content)
        fields["vectors"] = {
            name: StoredVector(**{**vector, "shape": tuple(vector["shape"])})
            for name, vector in fields["vectors"].items()
        }
        return cls(**fields)


def state_text(state: Mapping[str, Any] | None) -> str | None:
    """A caller's state as JSON; None for none.

    Raises:
        RangeError: JSON cannot hold it.
    """
    if state is None:
        return None
    try:
        return json.dumps(dict(state))
    except (TypeError, ValueError) as error:
        raise RangeError(f"state: expected what JSON can hold: {error}") from None
