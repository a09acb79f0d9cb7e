"""Who the clients are to the objective: their shares p^k of all examples, and when they came."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.errors import RangeError, UnknownClientError
from fedcore.store import ClientId

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Population:
    """The registered sizes n_k, and the rounds of arrival.

    Attributes:
        sizes: n_k of every client that was ever in the objective; empty where the server was told none.
        arrived: the round in which a client came that was not there from the start.
        included: n_k of those that have departed and whose shares the objective keeps.
        total: n, the sum of the sizes in the objective.
    """

    sizes: Mapping[ClientId, int] = field(default_factory=dict)
    arrived: Mapping[ClientId, int] = field(default_factory=dict)
    included: Mapping[ClientId, int] = field(default_factory=dict)
    total: int = 0

    @classmethod
    def of(cls, examples: Mapping[ClientId, int] | Sequence[int] | None, clients: Iterable[ClientId]) -> "Population":
        """The population of a new server.

        Args:
            examples: n_k by client id, or a list in the order of the ids; None where no method asks.
            clients: the registered ids.

        Raises:
            RangeError: a size is no integer >= 1, or a client's is missing.
            UnknownClientError: a size is for a client that is not registered.
        """
        if examples is None:
            return cls()
        known = list(clients)
        named = dict(examples) if isinstance(examples, Mapping) else dict(zip(known, examples, strict=False))
        if len(named) != len(known) or len(examples) != len(known):
            raise RangeError(f"examples: expected a size for each of {len(known)} clients, got {len(examples)}")
        registered = set(known)
        if strangers := [client for client in named if client not in registered]:
            raise UnknownClientError(f"examples: expected registered ids, got {strangers[0]!r}")
        for client, size in named.items():
            _check_size(client, size)
        sizes = {client: int(size) for client, size in named.items()}
        return cls(sizes, {}, {}, sum(sizes.values()))

    def with_client(self, client: ClientId, size: int | None, round: int | None, *, sized: bool) -> "Population":
        """The population after a client came, in that round (None: it was there from the start).

        One that the objective has kept comes back to its share: it is no newcomer.

        Args:
            sized: whether the clients have sizes: all of them, or none.

        Raises:
            RangeError: ``size`` is no integer >= 1 where the others have theirs, or not None where they have none.
        """
        arrived = self.arrived
        if round is not None and client not in self.included:
            arrived = {**arrived, client: round}
        if not sized and size is not None:
            raise RangeError(f"examples: expected None for client {client!r}, as for all others, got {size!r}")
        if not sized:
            return replace(self, arrived=arrived)
        number = _check_size(client, size)
        total = self.total + number - self.included.get(client, 0)
        return Population({**self.sizes, client: number}, arrived, _without(self.included, client), total)

    def without_client(self, client: ClientId, *, from_objective: bool) -> "Population":
        """The population after a client went; the shares of the others grow if the objective forgets it."""
        size = self.sizes.get(client, 0)
        sizes, arrived = _without(self.sizes, client), _without(self.arrived, client)
        if from_objective or not size:
            return Population(sizes, arrived, self.included, self.total - size)
        return Population(sizes, arrived, {**self.included, client: size}, self.total)

    def shares(self, clients: Sequence[ClientId]) -> F64 | None:
        """p^k = n_k / n, float64[k]; None where no sizes are known."""
        if not self.sizes:
            return None
        return np.array([self.sizes[client] for client in clients], np.float64) / self.total

    def ages(self, clients: Sequence[ClientId], round: int) -> F64 | None:
        """Rounds since each client's arrival (1 in its first), float64[k]; infinite for those of the start, or None for
        all of them."""
        if not self.arrived:
            return None
        return np.array([round + 1 - self.arrived.get(client, -np.inf) for client in clients], np.float64)

    def to_state(self) -> dict[str, Any]:
        """The population as JSON can hold it."""
        listed = {name: list(getattr(self, name).items()) for name in ("sizes", "arrived", "included")}
        return listed | {"total": self.total}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Population":
        """The population that ``to_state`` described."""
        sizes, arrived = (dict(map(tuple, state[name])) for name in ("sizes", "arrived"))
        included = dict(map(tuple, state.get("included", [])))  # older folders have none
        return cls(sizes, arrived, included, state["total"])


def _check_size(client: ClientId, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
        raise RangeError(f"examples: expected an integer >= 1 for client {client!r}, got {size!r}")
    return int(size)


def _without(numbers: Mapping[ClientId, int], client: ClientId) -> dict[ClientId, int]:
    return {other: number for other, number in numbers.items() if other != client}
