"""The state of a server between two rounds, as one value: a round makes the next one, or leaves it alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import devices, kernels
from fedcore.aggregation import Counters
from fedcore.algorithms import Algorithm
from fedcore.clients import ClientId, Registry
from fedcore.kernels import ExactSum
from fedcore.memory import copied, freeze, zeros
from fedcore.optimizers import Optimizer
from fedcore.server.history import History
from fedcore.server.population import Population
from fedcore.store import ClientStore
from fedcore.typing import F32, F64

Vector = npt.NDArray[Any]

ON_HOST = ("counter/", "population/", "norms/")
"""Names of vectors that lie in host memory on whatever device the others do."""
OF_MODEL = ("x", "ahead", "x_prev", "past")
"""Names, up to a slash, of vectors with an element for each of the model's, float buffers too: others of the model's
length have its parameters alone."""


class Snapshot(NamedTuple):
    """All but the rows, which are the store's. None of its arrays is changed later, except ``total`` and ``momentum``,
    whose memory the round after next uses again.

    Attributes:
        round_number: rounds finished.
        x: float32[n], the model.
        ahead: float32[n], what clients are sent in the place of x by methods that look ahead; else None.
        x_prev: float32[n], x_{t-1}; x_{-1} = x_0.
        past: x by round, of the rounds whose late replies still count.
        starts: the round in which each client's last counted reply started, by client, of those rounds.
        momentum: float32[n_parameters], v of the last round, which is g in the papers.
        total: float64[n_parameters], T; None where the method keeps none.
        exact_total: T as integers, where sums are exact: ``total`` is then what it reads as. Their memory likewise.
        moments: the optimiser's, float32[n_parameters] each.
        history: v[t] while rows refer to it, where the method keeps them.
        counters: the integer counters by name.
        population: the clients' shares and arrivals.
        norms: of the replies heard lately, where a limit asks for them, and what they claimed of examples and steps.
        gamma: the last one, for a round without clients.
        transactions: rounds finished, arrivals, departures, resizings, changes of options and warm starts.
        changed: the options that were changed since the last round, as JSON holds them.
        audited: the digest of the last round's document; None where there is none.
    """

    x: F32
    x_prev: F32
    momentum: F32
    total: F64 | None
    moments: tuple[F32, ...]
    counters: Counters
    population: Population
    norms: Mapping[str, Vector] = {}
    past: Mapping[int, F32] = {}
    starts: Mapping[ClientId, int] = {}
    history: History = History()
    round_number: int = 0
    gamma: float = 0.0
    ahead: F32 | None = None
    transactions: int = 0
    exact_total: ExactSum | None = None
    changed: Mapping[str, Any] = {}
    audited: str | None = None

    @property
    def sent(self) -> F32:
        """float32[n], the model that clients start from."""
        return self.x if self.ahead is None else self.ahead

    @classmethod
    def first(
        cls,
        x: F32,
        counters: Counters,
        n_parameters: int,
        algorithm: Algorithm,
        optimizer: Optimizer | None,
        population: Population,
        device: str = devices.CPU,
        *,
        exact: bool = False,
    ) -> "Snapshot":
        """The snapshot of a new server; x lies on its device."""
        moments = optimizer.start(n_parameters) if optimizer is not None else ()
        return cls(
            x=x,
            x_prev=x,
            momentum=zeros(n_parameters, device=device),
            total=zeros(n_parameters, np.float64, device=device) if algorithm.keeps_total else None,
            moments=moments if device == devices.CPU else tuple(copied(m, device=device) for m in moments),
            counters=counters,
            population=population,
            exact_total=ExactSum.zeros(n_parameters) if exact and algorithm.keeps_total else None,
        )

    def vectors(self, algorithm: Algorithm) -> dict[str, Vector]:
        """The arrays by name, except those that the method never reads."""
        named: dict[str, Vector] = {"x": self.x}
        if self.ahead is not None:
            named["ahead"] = self.ahead
        if algorithm.direction.b:
            named["x_prev"] = self.x_prev
        if algorithm.keeps_momentum or algorithm.rows_at_clients:
            named["momentum"] = self.momentum
        if self.exact_total is not None:
            named |= {f"total/{word}": words for word, words in self.exact_total._asdict().items()}
        elif self.total is not None:
            named["total"] = self.total
        named |= {f"moment/{i}": moment for i, moment in enumerate(self.moments)}
        named |= {f"past/{t}": x for t, x in self.past.items()}
        named |= {f"v/{t}": v for t, v in self.history.directions.items()}
        named |= self.population.vectors()
        named |= {f"counter/{name}": counter for name, counter in self.counters.items()}
        named |= {f"norms/{sum}": norms for sum, norms in self.norms.items()}
        return named

    def on_disk(self, store: ClientStore) -> "Snapshot":
        """The same snapshot after a commit to a disk: what rounds leave alone lies there now, and not in memory."""
        found = {t: store.vector(f"v/{t}") for t in self.history}
        directions = {t: v for t, v in found.items() if v is not None}
        history = replace(self.history, directions=directions)
        if devices.of(self.x) != devices.CPU:  # where rounds need them
            history = self.history
        return self._replace(history=history, population=self.population.on_disk(store))

    def numbers(self) -> dict[str, Any]:
        """The rest, as JSON holds it."""
        return {
            "round_number": self.round_number,
            "transactions": self.transactions,
            "gamma": self.gamma,
            "references": sorted(self.history.references.items()),
            "population": self.population.to_state(),
            "changed": dict(self.changed),
            "starts": list(self.starts.items()),
            "audited": self.audited,
        }

    @classmethod
    def of(
        cls,
        vectors: Mapping[str, Vector],
        numbers: Mapping[str, Any],
        n_parameters: int,
        registry: Registry,
        device: str = devices.CPU,
    ) -> "Snapshot":
        """The snapshot that ``vectors`` and ``numbers`` describe. The arrays are taken over."""

        def under(folder: str) -> dict[str, Vector]:
            return {name.removeprefix(folder): v for name, v in vectors.items() if name.startswith(folder)}

        references = {int(t): int(count) for t, count in numbers["references"]}
        moments, words = under("moment/"), under("total/")
        exact_total = ExactSum(**words) if words else None
        return cls(
            x=vectors["x"],
            x_prev=vectors.get("x_prev", vectors["x"]),
            momentum=vectors["momentum"] if "momentum" in vectors else zeros(n_parameters, device=device),
            total=vectors.get("total") if exact_total is None else kernels.read_exact(exact_total),
            exact_total=exact_total,
            moments=tuple(moments[str(i)] for i in range(len(moments))),
            counters=under("counter/"),
            population=Population.from_state(numbers["population"], vectors, registry),
            norms=under("norms/"),
            past={int(t): x for t, x in under("past/").items()},
            history=History({int(t): v for t, v in under("v/").items()}, references),
            round_number=int(numbers["round_number"]),
            gamma=float(numbers["gamma"]),
            ahead=vectors.get("ahead"),
            transactions=count_of(numbers),
            changed=dict(numbers.get("changed", {})),
            audited=numbers.get("audited"),
            starts={client: int(t) for client, t in numbers.get("starts", [])},
        )


def count_of(numbers: Mapping[str, Any]) -> int:
    """The count of transactions in a snapshot's ``numbers``; older folders have counted their rounds alone."""
    return int(numbers.get("transactions", numbers["round_number"]))


def moved(vectors: Mapping[str, Vector], device: str) -> dict[str, Vector]:
    """A server's vectors with those of a model's length on its device, as writable as they were."""
    if device == devices.CPU:
        return dict(vectors)
    found = {}
    for name, vector in vectors.items():
        if not name.startswith(ON_HOST):
            there = copied(vector, device=device)
            if not vector.flags.writeable:
                freeze(there)
            vector = there
        found[name] = vector
    return found


def vectors_of(store: ClientStore) -> dict[str, Vector]:
    """A server's vectors out of a store that was opened: copies, except those that rounds never change."""
    vectors = {}
    for name in store.vector_names():
        vector = store.vector(name)
        assert vector is not None
        vectors[name] = vector if name.startswith(("v/", "population/")) else copied(vector)
        vectors[name].flags.writeable = name.partition("/")[0] in ("total", "momentum")
    return vectors
