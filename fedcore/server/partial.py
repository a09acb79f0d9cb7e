"""A partial sum of a round as a value: what an edge has folded of its clients' updates, on its way to the server."""

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import Algorithm
from fedcore.algorithms.algorithm import NOTHING, H
from fedcore.algorithms.descriptions import describe
from fedcore.arguments import bounded, whole
from fedcore.clients import ClientId
from fedcore.clients.registry import canonical
from fedcore.errors import ArrayError, RangeError
from fedcore.kernels import ExactSum
from fedcore.representation import Represented
from fedcore.server.rounded_model import as_sent
from fedcore.server.settings import Settings
from fedcore.server.snapshot import Snapshot
from fedcore.server.update import reads_sent
from fedcore.typing import F64

MAGIC = b"fedcore partial sum 1\n"
GRID = (-10, -60)
"""Exponents of the words' units."""
COLUMNS = ("steps", "examples", "counts", "eta_steps", "weights", "squares", "has_buffers")
MOST_HEADER = 1 << 28
"""Bytes of ids, refusals and names that are read at most."""


@dataclass(frozen=True, repr=False)
class Partial(Represented):
    """A round's sum over some clients, exact, so that it can join others in any order and tree with the same bits.

    Whoever takes it in checks its claims, norms and weights, and that |sum_i w_i h_i| is no longer than sum_i w_i |h_i|
    and what rounding can add; not that the norms are those of the clients. One of nobody is zeros.

    Attributes:
        round: the round's number.
        made_under: what says that two servers sum the same: the grid, the method, the layout, the units of h and x as
            it was sent, as a SHA-256 in hexadecimal.
        high, low: int64[n], the words of ``kernels.ExactSum``: sum_i w_i h_i, and of x - y_i over the float buffers.
        clients: those whose updates are in it.
        steps, examples, counts, eta_steps, weights, squares, has_buffers: float64[k], their claims, the lengths
            eta_i K_i, w_i and |h_i|^2, and whether they sent buffers. Examples are 0 where clients give no number.
        refused: (client, reason) of those whose updates are not.
        received: the bytes that the clients sent.
    """

    round: int
    made_under: str
    high: npt.NDArray[np.int64]
    low: npt.NDArray[np.int64]
    clients: tuple[ClientId, ...]
    steps: F64
    examples: F64
    counts: F64
    eta_steps: F64
    weights: F64
    squares: F64
    has_buffers: F64
    refused: tuple[tuple[ClientId, str], ...] = ()
    received: int = 0

    @property
    def sum(self) -> ExactSum:
        """The words."""
        return ExactSum(self.high, self.low)

    def to_bytes(self) -> bytes:
        """The partial sum as a message: a header in JSON, and the arrays, little-endian.

        Cost: 16 n + 56 k bytes.
        """
        header = {
            "round": self.round,
            "made_under": self.made_under,
            "n": len(self.high),
            "clients": list(self.clients),
            "refused": [list(entry) for entry in self.refused],
            "received": self.received,
        }
        told = json.dumps(header).encode()
        arrays = [getattr(self, name).astype("<f8").tobytes() for name in COLUMNS]
        words = [words.astype("<i8", copy=False).tobytes() for words in (self.high, self.low)]
        return b"".join([MAGIC, len(told).to_bytes(8, "little"), told, *arrays, *words])

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "Partial":
        """The partial sum that ``to_bytes`` wrote; whether it can be believed, ``Round.add_partial`` says.

        Args:
            data: may come from anybody: nothing of it is run, and no more is allocated than it is long.

        Raises:
            ArrayError: it is no such message.
        """
        given = memoryview(data).cast("B")
        start = len(MAGIC) + 8
        size = int.from_bytes(given[len(MAGIC) : start], "little")
        if bytes(given[: len(MAGIC)]) != MAGIC or size > min(MOST_HEADER, len(given) - start):
            raise ArrayError(f"partial: expected what Partial.to_bytes wrote, got {len(given)} other bytes")
        try:
            header = json.loads(bytes(given[start : start + size]))
            n, clients = header["n"], header["clients"]
            refused = tuple((_id(client), bounded(str(reason))) for client, reason in header["refused"])
            numbers = [header["round"], n, header["received"]]
            if not isinstance(clients, list) or not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError("numbers")
            ids, made_under = tuple(_id(client) for client in clients), str(header["made_under"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArrayError(f"partial: expected the header of Partial.to_bytes, got another one: {error!r}") from None
        k, at = len(ids), start + size
        if len(given) - at != 8 * len(COLUMNS) * k + 16 * n:
            raise ArrayError(
                f"partial: expected {8 * len(COLUMNS) * k + 16 * n} bytes of arrays for {k} clients and n = {n}, "
                f"got {len(given) - at}"
            )
        # (Copies: a message may lie anywhere in memory, and whoever sent it may still change it.)
        columns = np.frombuffer(given, "<f8", len(COLUMNS) * k, at).reshape(len(COLUMNS), k).astype(np.float64)
        words = np.frombuffer(given, "<i8", 2 * n, at + columns.nbytes).reshape(2, n).astype(np.int64)
        told: dict[str, Any] = dict(zip(COLUMNS, columns, strict=True))
        return cls(
            header["round"], made_under, words[0], words[1], ids, **told, refused=refused, received=header["received"]
        )

    def _facts(self) -> dict[str, Any]:
        return {"round": self.round, "clients": len(self.clients), "refused": len(self.refused), "n": len(self.high)}


@reads_sent
def read_partial(given: object) -> Partial:
    """A partial sum that came as a message or as an object, its arrays not looked at yet.

    Raises:
        ArrayError: it is neither, or has something else in the place of ids, names or numbers.
    """
    if isinstance(given, bytes | bytearray | memoryview):
        return Partial.from_bytes(given)
    if not isinstance(given, Partial):
        raise ArrayError(f"partial: expected a Partial or its bytes, got {type(given).__name__}")
    values = {field.name: getattr(given, field.name) for field in fields(Partial)}
    if type(values["made_under"]) is not str:
        raise ArrayError(f"made_under: expected a str, got {type(values['made_under']).__name__}")
    refused = tuple((canonical(client), bounded(str(reason))) for client, reason in values["refused"])
    clients = tuple(canonical(client) for client in values["clients"])
    round = whole("round", values["round"], 0)
    return Partial(**values | {"round": round, "clients": clients, "refused": refused})


def require_partial_sums(settings: Settings) -> None:
    """Check that a round's sums can be had in parts.

    Raises:
        RangeError: they cannot, and why.
    """
    algorithm = settings.algorithm
    if not settings.is_exact:
        raise RangeError(
            f'partial: expected a server with accumulate="exact", got accumulate="{settings.accumulate}": the bits of '
            "other sums depend on who folded what"
        )
    if not adds_alone(algorithm):
        raise RangeError(
            f"partial: expected a method that adds h alone (FedAvg, FedProx, FedAvg-M and the like), got {algorithm}, "
            "which needs rows, second vectors or shares where it folds: let its clients reply to the server itself"
        )
    if settings.layout.counters:
        names = ", ".join(piece.name for piece in settings.layout.counters)
        raise RangeError(f"partial: expected a layout without integer counters, got {names}: leave them out of x0")


def adds_alone(algorithm: Algorithm) -> bool:
    """Tell whether all that an update does is that w_i h_i is added to one sum."""
    keeps = algorithm.keeps_rows or algorithm.sums_changes or algorithm.second_vector is not None
    return algorithm.adds == H and algorithm.row == NOTHING and not (keeps or algorithm.needs_shares)


def fingerprint(settings: Settings, now: Snapshot) -> str:
    """The digest of all that two servers have in common whose sums may join: see ``Partial.made_under``.

    Cost: reads 4 n bytes.
    """
    method = describe("algorithm", settings.algorithm) or {}
    if "class" in method:  # one's own: another process may find it by another name, and an object may show its address
        method = {key: method[key] for key in ("class", "options")}
    facts = [GRID, method, settings.layout.to_state(), settings.averages_models, list(settings.nonnegative)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(as_sent(settings.layout, now.sent)).data)
    return digest.hexdigest()


def _id(client: Any) -> ClientId:
    if type(client) not in (int, str):
        raise ValueError("ids")
    return canonical(client)
