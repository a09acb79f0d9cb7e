"""The head of an index: everything beside the rows and clients."""

import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import get_args

import numpy as np

from fedcore.arguments import whole
from fedcore.errors import CorruptionError
from fedcore.store.files.slot_file_header import digest
from fedcore.store.row_format import Codec

_MOST, _SUMS = 2**62, 2**64 - 1


@dataclass(frozen=True)
class StoredVector:
    """The place of a vector: in a slot of the file for its payload."""

    payload: int
    slot: int
    dtype: str
    shape: tuple[int, ...]
    seal: int

    def check(self) -> None:
        """Refuse what no store says of a vector.

        Raises:
            ValueError, TypeError: it is such a thing.
        """
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biufc" or dtype.str != self.dtype:
            raise ValueError(f"vectors: expected the dtype of numbers, got {self.dtype!r}")
        whole("payload", self.payload, 1, _MOST)
        whole("slot", self.slot, 1, _MOST)
        whole("seal", self.seal, 0, _SUMS)
        for length in self.shape:
            whole("shape", length, 0, _MOST)
        if self.payload != max(1, dtype.itemsize * math.prod(self.shape)):
            raise ValueError(f"vectors: expected {self.payload} bytes, got {dtype}{list(self.shape)}")


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
        previous: the digest of what the index keeps of the commit before, to which an undo goes back; None for nothing.
        copy: whether a save wrote it, and nothing was committed since: another save may replace it.
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
    previous: str | None = None
    copy: bool = False

    def text(self) -> str:
        """The head as JSON, with a digest of it in front."""
        fields = asdict(self)
        if self.previous is None:
            del fields["previous"]  # which older formats have not
        if not self.copy:
            del fields["copy"]  # likewise
        content = json.dumps(fields)
        return digest(content.encode()).hex() + content

    @classmethod
    def parsed(cls, text: object) -> "Head":
        """The head of which this is the text.

        Raises:
            CorruptionError: it is no head's.
        """
        check, content = (text[:16], text[16:]) if isinstance(text, str) else ("", "")
        if check != digest(content.encode()).hex():
            raise CorruptionError("head: expected the text that was written, got another")
        try:
            fields = json.loads(content)
            fields["vectors"] = {
                name: StoredVector(**{**vector, "shape": tuple(vector["shape"])})
                for name, vector in fields["vectors"].items()
            }
            head = cls(**fields)
            head.check()
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptionError(f"head: expected a store's: {error}") from error
        return head

    def check(self) -> None:
        """Refuse what no store says of itself: who made the digest may have made up the rest.

        Raises:
            ValueError, TypeError, RecursionError: it is such a thing.
        """
        if len(bytes.fromhex(self.store)) != 16:
            raise ValueError(f"store: expected 16 bytes, got {self.store!r}")
        if self.codec not in get_args(Codec):
            raise ValueError(f"codec: expected one of {get_args(Codec)}, got {self.codec!r}")
        whole("n", self.n, 1, _MOST)
        whole("clients", self.clients, 0, _MOST)
        whole("sequence", self.sequence, 0, _MOST)
        whole("round", 0 if self.round is None else self.round, 0, _MOST)
        whole("rows_sum", self.rows_sum, 0, _SUMS)
        whole("clients_sum", self.clients_sum, 0, _SUMS)
        if self.previous is not None and not re.fullmatch("[0-9a-f]{16}", self.previous):
            raise ValueError(f"previous: expected a digest, got {self.previous!r}")
        if self.state is not None:
            json.loads(self.state)
        for vector in self.vectors.values():
            vector.check()
