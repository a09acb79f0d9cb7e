"""Engines, which train clients: their protocol, the clients' examples, and clients that keep rows."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fedcore.algorithms import MEAN_GRADIENT, Algorithm, FedAvgM, MimiC, is_computed_locally, local_rules
from fedcore.algorithms.local_rules import Indices, LocalRule, Sgd, Table
from fedcore.arrays import F32, copy_into, to_host
from fedcore.errors import FedcoreError, RangeError, StoreError, UnknownClientError
from fedcore.files import reading, replacing
from fedcore.server import Broadcast, Report, Server, Update
from fedcore.server.broadcast import Instructions, WholeVectors
from fedcore.sim.clock import Arrivals
from fedcore.sim.network import Network
from fedcore.sim.participation import Active
from fedcore.store.registry import ClientId
from fedcore.validation import check_integer, shorten

if TYPE_CHECKING:
    from fedcore.sim.sgd import LocalOptions

SENT = ("value", "control")
"""The fields of an update that are vectors."""
NO_ROUND = 2**32 - 1
"""The round number for the minibatches of a warm start; no run reaches it."""


@dataclass(frozen=True)
class Evaluation:
    """The result of a model on a test set: the share of correct answers, and the mean cross entropy."""

    accuracy: float
    loss: float


class Engine(Protocol):
    """Trains clients, in this process or in others."""

    @property
    def together(self) -> bool:
        """Whether clients are trained together."""

    @property
    def waited(self) -> float:
        """Total seconds of waiting for updates from other processes; 0 for an engine in this process."""
        return 0.0

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast, each when its update is read.

        Args:
            active: the clients of the broadcast, the share of its steps that each does, and how often it was drawn.
                Default: all clients do all steps, and were drawn once.

        Yields:
            An ``Update`` for each id, in the order of the ids unless the engine's settings change it. The next update
            may overwrite ``value`` unless ``keep`` is true.
        """

    def gradients(self, broadcast: Broadcast, minibatches: int | None = None) -> dict[ClientId, F32]:
        """Return the mean of each client's minibatch gradients at a broadcast's x, float32[n_parameters] by client.

        ``minibatches`` is the number for each client. Default: the number of local steps in a round.
        """

    def evaluate(self, x: F32) -> Evaluation:
        """Return accuracy and loss of a model, float32[n], on the engine's test set."""

    def most_steps(self, local_rule: LocalRule) -> int:
        """Return the maximum of E over all clients, where E is the number of local steps of a client with share 1."""

    def close(self) -> None:
        """Release resources other than memory, such as processes."""
        return


def check_method(algorithm: Algorithm) -> None:
    """Reject a method for which simulated clients would have to keep unknown rows or send an unknown second vector.

    ``KeepingClients`` keeps the rows of MimiC and of the SCAFFOLDs, ``RecoveringClients`` the momentum of FedAvg-M.
    """
    if not (algorithm.sends_row_change or (algorithm.rows_at_clients and isinstance(algorithm, MimiC | FedAvgM))):
        _check_clients_can(algorithm.rows_at_clients, algorithm.second_vector)


def _check_clients_can(keeps_row: bool, second: str | None) -> None:
    if keeps_row:
        raise RangeError("placement: must be 'server', since clients keep only the rows of MimiC and SCAFFOLDs")
    if not is_computed_locally(second):
        raise RangeError(
            f"second_vector={second!r}: simulated clients can send only {MEAN_GRADIENT!r} in addition to y; write your "
            "own training loop for this method"
        )


class Sent(Protocol):
    """The instructions and vectors that clients receive: a ``Broadcast``, or the part of one that a worker receives."""

    @property
    def x(self) -> F32:
        """float32[n], the model from which clients start, read-only and in host memory."""

    @property
    def common(self) -> Instructions:
        """The instructions to all clients, without an offset."""

    def of(self, client: int) -> Instructions:
        """Compute the offset of one client, and return the instructions to this client."""


@dataclass(frozen=True)
class Plan:
    """The work of a round, in the order in which its clients (indices into the parts) are trained.

    ``counts`` is how often each client was drawn. A client's vectors in ``sent`` are read only when it is trained.
    """

    clients: Sequence[int]
    steps: Sequence[int]
    counts: Sequence[int]
    sent: Sent


def standing(broadcast: Broadcast) -> Broadcast:
    """Return a broadcast for a warm start: clients stay at x, and send the mean of their gradients there.

    Their steps have length zero. Their minibatches differ from those of every round.
    """
    still = replace(broadcast, a=0.0, b=0.0, mu=0.0, from_row=0.0, has_offset=False)
    return replace(still, second_vector=MEAN_GRADIENT, round=NO_ROUND)


class Minibatches(NamedTuple):
    """The size, the number and the seed of the minibatches; see ``InProcess``."""

    batch: int
    epochs: int | None
    steps: int | None
    seed: int


class Parts:
    """The training examples of each client, with the minibatches.

    Client i has the training examples ``held[i]``, int64[m_i]. ``examples`` is the size of the training set. For the
    other arguments see ``InProcess``.
    """

    def __init__(self, held: Sequence[Indices], examples: int, sizes: Minibatches, options: "LocalOptions") -> None:
        if not len(held):
            raise RangeError("parts: must not be empty")
        lengths = np.fromiter(map(len, held), np.int64, len(held))
        if not lengths.all():
            raise RangeError(f"parts: client {lengths.argmin()} has no examples")
        if not 0 <= (every := np.concatenate(held)).min() <= every.max() < examples:
            for client, part in enumerate(held):
                if not 0 <= part.min() <= part.max() < examples:
                    raise RangeError(f"parts: client {client} has {part.min()}..{part.max()}; pass 0..{examples - 1}")
        self._held = list(held)
        self.largest = int(lengths.max())
        self.seed, self.options, self._sizes = sizes.seed, options, sizes
        self.minibatches(0, 0, Sgd())  # Reject wrong sizes now, not in the first round.

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._held)

    def __getitem__(self, client: int) -> Indices:
        """Return the indices of a client's training examples."""
        return self._held[client]

    def plan(self, broadcast: Broadcast, active: Active | None, *, minibatches: int | None = None) -> Plan:
        """Return the work of a broadcast's clients; reject unknown clients and methods.

        The broadcast has its vectors in host memory. ``minibatches`` replaces E.
        """
        _check_clients_can(broadcast.keeps_row, broadcast.second_vector)
        if broadcast.plain and not self.options.plain:
            raise RangeError(f"options: {self.options}: plain steps are needed, without momentum or clip")
        ids: list[Any] = list(broadcast.ids)
        if unknown := [one for one in ids if not (isinstance(one, int) and 0 <= one < len(self))]:
            raise UnknownClientError(f"ids: unknown clients {unknown}; the clients are 0 .. {len(self) - 1}")
        steps, counts = self._full_steps(ids, broadcast.local_rule), np.ones(len(ids), np.int64)
        if minibatches is not None:
            steps = np.full_like(steps, check_integer("minibatches", minibatches, 1))
        if active is not None:
            if active.clients.tolist() != ids:
                raise RangeError(f"active: its clients {active.clients.tolist()} differ from the broadcast's {ids}")
            steps = active.steps(steps)
            counts = counts if active.counts is None else active.counts
        return Plan(ids, steps.tolist(), counts.tolist(), broadcast)

    def most_steps(self, local_rule: LocalRule) -> int:
        """Return the maximum of E over all clients; see ``Engine``."""
        return int(self._full_steps(range(len(self)), local_rule).max())

    def batch(self, local_rule: LocalRule) -> int:
        """Return the size of a minibatch under a local rule."""
        return local_rules.batch_of(local_rule, self._sizes.batch)

    def minibatches(
        self, round: int, client: int, local_rule: LocalRule, steps: int | None = None
    ) -> Iterator[Indices]:
        """Return a client's minibatches in a round as indices into its part: ``steps`` of them. Default: E."""
        stream = {"seed": self.seed, "round": round, "client": client}
        length = {"epochs": self._sizes.epochs, "steps": self._sizes.steps} if steps is None else {"steps": steps}
        return local_rules.minibatches(len(self[client]), self.batch(local_rule), **length, **stream)

    def table(self, round: int, client: int, local_rule: LocalRule, steps: int) -> Table:
        """Return a client's minibatches as a table. The width affects bits; it depends only on the client's size."""
        part = self[client]
        size, power = self.batch(local_rule), 1 << (len(part) - 1).bit_length()
        width = max(2, min(size, power))  # torch computes a product with a single column differently.
        orders = local_rules.orders_of(len(part), self.seed, round, client)
        table = local_rules.minibatch_table(orders, len(part), size, steps=steps, width=width)
        table = local_rules.in_table(local_rule, table, len(part))
        return Table(part[table.indices], table.sizes)

    def _full_steps(self, clients: Iterable[int], local_rule: LocalRule) -> Indices:
        """Return E of each client."""
        batch, epochs, own, _ = self._sizes
        full, length = local_rules.full_steps_of, {"epochs": epochs, "steps": own}
        return np.array([full(local_rule, len(self[one]), batch, **length) for one in clients], np.int64)


def _inner(name: str) -> Any:
    """Return a member of an engine's wrapper: that of the inner engine."""
    return property(lambda wrapper: getattr(wrapper.inner, name), doc=f"See ``Engine.{name}``.")


class EngineWrapper:
    """Base class of engines that forward calls to an ``inner`` engine."""

    updates, together, waited = _inner("updates"), _inner("together"), _inner("waited")
    gradients, evaluate = _inner("gradients"), _inner("evaluate")
    most_steps, close = _inner("most_steps"), _inner("close")

    def __init__(self, engine: Engine) -> None:
        self.inner = engine


class KeepingClients(EngineWrapper):
    """The engine whose clients keep a row each, float32[n_parameters], that the server does not store.

    MimiC's clients send the model that they would have reached along h_i + c_i, and set c_i = v - h_i after the round.
    The clients of the SCAFFOLDs add their row's part to the offset, send c_i+ - c_i as ``control``, and keep c_i+. If
    the server did not use a client's update, its row does not change. A client without a row in ``rows`` has a zero
    row. ``bytes_more`` counts bytes that the server sends in addition to the broadcast: 0 here.

    Cost: 4 n bytes for each client with an update so far, and for each client of a round. A checkpoint writes all rows.
    """

    def __init__(self, engine: Engine, algorithm: Algorithm) -> None:
        super().__init__(engine)
        self._algorithm = algorithm
        self.rows: dict[ClientId, F32] = {}
        self.bytes_more = 0
        self._next: dict[ClientId, F32] = {}
        """The new rows of the open round: c_i+, or h_i until v is known."""

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast; see ``Engine.updates``."""
        self._next.clear()
        change = broadcast.second_vector is not None
        sent = self._with_rows(broadcast) if change else _without_rows(broadcast)
        for update in self.inner.updates(sent, active):
            yield self._with_change(update) if change else self._with_correction(update, broadcast)

    def _with_rows(self, broadcast: Broadcast) -> Broadcast:
        """Return the broadcast with each client's row in its offset, and the mean gradient as its second vector."""
        from_row = np.float32(broadcast.from_row)

        def offset(client: ClientId) -> F32:
            shared: F32 = to_host(broadcast.offset(client))
            row = self.rows.get(client)
            return shared if row is None else shared + from_row * row

        return replace(_with_offsets(_without_rows(broadcast), offset), second_vector=MEAN_GRADIENT)

    def _with_change(self, update: Update) -> Update:
        client = update.client
        self._next[client] = raw = np.array(update.control)
        return update._replace(control=raw - self.rows[client] if client in self.rows else raw)

    def _with_correction(self, update: Update, broadcast: Broadcast) -> Update:
        """Return the update with x - eta K (h_i + c_i) instead of the parameters of y."""
        assert update.lr is not None
        unit = np.float32(1 if self._algorithm.averages else update.lr * update.steps)
        client, p = update.client, len(broadcast.offset(broadcast.ids[0]))
        y = np.array(update.value, np.float32)
        self._next[client] = (to_host(broadcast.x)[:p] - y[:p]) / unit
        if client in self.rows:
            y[:p] -= unit * self.rows[client]
        return update._replace(value=y, keep=True)

    def after(self, server: Server, report: Report) -> None:
        """Store the new rows of the clients whose updates the server used."""
        v = to_host(server.v) if self._algorithm.second_vector is None else None
        for client in report.accepted:
            self.rows[client] = self._next[client] if v is None else v - self._next[client]
        self._next.clear()

    def gradients(self, broadcast: Broadcast, minibatches: int | None = None) -> dict[ClientId, F32]:
        """Return the gradients from which the server starts; the clients' rows start from them too."""
        gradients = self.inner.gradients(_without_rows(broadcast), minibatches)
        self.rows = {client: gradient.copy() for client, gradient in gradients.items()}
        return gradients

    def save(self, path: Path) -> None:
        """Write all rows into a file, atomically."""
        write_arrays(path, **{str(client): row for client, row in self.rows.items()})

    def load(self, path: Path) -> None:
        """Read the rows that ``save`` wrote."""
        with read_arrays(path) as file:
            self.rows = {int(client): file[client] for client in file.files}


def _without_rows(broadcast: Broadcast) -> Broadcast:
    """Return the broadcast without rows and slices, for an engine whose clients keep no rows."""
    return replace(broadcast.whole(), keeps_row=False)


def _with_offsets(broadcast: Broadcast, offset_of: Callable[[ClientId], F32]) -> Broadcast:
    def offset(client: ClientId, out: Any) -> Any:
        own = offset_of(client)
        if out is not None:
            copy_into(out, own)
        return own if out is None else out

    return broadcast.with_offset(offset)


def write_arrays(path: Path, **arrays: Any) -> None:
    """Write arrays into a file, atomically."""
    with replacing(path, "wb") as file:
        np.savez(file, **arrays)


@contextmanager
def read_arrays(path: Path) -> Iterator[Any]:
    """Open a file of arrays; raise StoreError if ``write_arrays`` did not write what the block reads from it."""
    try:
        with reading(path) as content, np.load(content) as file:
            yield file
    except (FedcoreError, OSError):
        raise
    except Exception as error:  # NumPy and zipfile raise errors of many classes for invalid files
        reason = shorten(f"{type(error).__name__}: {error}")
        raise StoreError(f"{path}: is damaged ({reason}); delete the folder {path.parent} to start again") from None


class RecoveringClients(KeepingClients):
    """The engine whose clients recover FedAvg-M's g = (x_t - x_{t+1}) / gamma, so that the server sends them only x.

    A client that did not receive x_t gets x_t too, or the latest earlier x that differs from the current one. This
    vector has the size of g; ``bytes_more`` counts it.

    Cost: 8 n bytes, since all clients recover the same vector.
    """

    def __init__(self, engine: Engine, algorithm: FedAvgM) -> None:
        super().__init__(engine, algorithm)
        self._share = np.float32(1 - algorithm.beta)
        self._g: F32 | None = None
        self._know_g: set[ClientId] = set()
        self._sent: tuple[F32, set[ClientId]] | None = None
        """The x of the last round, and the clients that received it."""
        self._gamma = 0.0
        """The length of the server's step from that x along g; 0 if x did not change."""

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast; see ``Engine.updates``."""
        on_host, ids = _without_rows(broadcast.on_host()), set(broadcast.ids)
        if self._gamma and self._sent is not None:
            x, sent_to = self._sent
            self._g, self._know_g, self._gamma = (x - on_host.x) / np.float32(self._gamma), sent_to, 0.0
        self._sent, self.bytes_more = (on_host.x, ids), 0
        if self._g is not None and ids:
            along = self._share * self._g[: len(broadcast.offset(broadcast.ids[0]))]
            self.bytes_more = along.nbytes * len(ids - self._know_g)
            self._know_g |= ids
            on_host = _with_offsets(on_host, lambda _: along)
        yield from self.inner.updates(on_host, active)

    def after(self, server: Server, report: Report) -> None:
        """Store the length of the server's step for the clients."""
        self._gamma = report.gamma

    def save(self, path: Path) -> None:
        """Write the vectors and facts that the clients have; see ``KeepingClients.save``."""
        x, sent_to = self._sent or (np.empty(0, np.float32), set())
        g = np.empty(0, np.float32) if self._g is None else self._g
        ids = {"sent_to": sorted(sent_to, key=str), "know_g": sorted(self._know_g, key=str)}
        write_arrays(path, x=to_host(x), g=g, gamma=np.float64(self._gamma), **{k: np.array(v) for k, v in ids.items()})

    def load(self, path: Path) -> None:
        """Read the file that ``save`` wrote."""
        with read_arrays(path) as file:
            x, g = file["x"], file["g"]
            self._sent = (x, set(file["sent_to"].tolist())) if len(x) else None
            self._g = g if len(g) else None
            self._know_g, self._gamma = set(file["know_g"].tolist()), float(file["gamma"])


class AtWork(EngineWrapper):
    """The engine of asynchronous clients: a client trains when it starts, and its update waits until it arrives.

    Minibatches depend on the number of the work instead of the round, since a client may start twice in a round.

    Cost: 4 n bytes for each client at work, which checkpoints contain.
    """

    def __init__(self, engine: Engine, arrivals: Arrivals) -> None:
        super().__init__(engine)
        self.arrivals = arrivals
        self._updates: dict[int, Update] = {}

    def start(self, server: Server) -> int:
        """Train the clients that start now; return the bytes that they receive."""
        received = 0
        for number, active in self.arrivals.start():
            broadcast = server.broadcast(active.clients.tolist())
            [update] = self.updates(replace(broadcast, round=number), active)
            vectors = (getattr(update, name) for name in SENT)  # views, which the next client overwrites
            value, control = (None if vector is None else np.array(vector) for vector in vectors)
            self._updates[number] = update._replace(value=value, control=control, round=broadcast.round, keep=True)
            received += broadcast.bytes
        return received

    def next(self) -> Update | None:
        """Advance the clock; return the update that arrives, or None if clients may start first."""
        arrival = self.arrivals.next()
        return None if arrival is None else self._updates.pop(arrival.number)

    def save(self, path: Path) -> None:
        """Write the updates of the clients at work, and the number of arrivals, into a file, atomically."""
        vectors = {f"{name}{number}": getattr(self._updates[number], name) for number in self._updates for name in SENT}
        arrays = {name: vector for name, vector in vectors.items() if vector is not None}
        claims = {number: {**own._asdict(), **dict.fromkeys(SENT)} for number, own in self._updates.items()}
        write_arrays(path, count=np.int64(self.arrivals.count), claims=np.array(json.dumps(claims)), **arrays)

    def load(self, path: Path) -> None:
        """Read the file that ``save`` wrote, and repeat the clock's course until then."""
        with read_arrays(path) as file:
            for number, claims in json.loads(str(file["claims"])).items():
                vectors = {name: file[f"{name}{number}"] for name in SENT if f"{name}{number}" in file}
                self._updates[int(number)] = Update(**{**claims, **vectors})
            self.arrivals.skip(int(file["count"]))


class Nodes(Network):
    """A ``Network`` with the interface of a server, for the loop of a trial, which sets its ``algorithm``."""

    algorithm: Algorithm

    @property
    def x(self) -> F32:
        """The network's output, sum_j q_j y_j, float32[n]."""
        return self.output()

    def broadcast(self, ids: Iterable[ClientId]) -> Broadcast:
        """Return the common broadcast to these nodes; its x is the output, but each node starts from its own model.

        Its ``bytes`` count the models that these nodes receive from each other.
        """
        nodes = np.array(list(ids), np.int64)
        among = self.W[np.ix_(nodes, nodes)]
        edges = int(np.count_nonzero(among)) - int(np.count_nonzero(np.diag(among)))
        return self._broadcast(tuple(nodes.tolist()), self.x, 4 * self.layout.n * edges)

    def of(self, node: int) -> Broadcast:
        """Return the broadcast to one node; its x is the node's model."""
        return self._broadcast((node,), self.models[node], 0)

    def _broadcast(self, ids: tuple[int, ...], x: F32, count: int) -> Broadcast:
        zeros = np.zeros(self.layout.n_parameters, np.float32)
        return Broadcast(
            ids=ids,
            round=self.round_number,
            lr=self.lr,
            lr_of_step=self.lr_of_step,
            **{name: getattr(self.algorithm.direction, name) for name in ("a", "b", "mu")},
            local_rule=self.algorithm.local_rule,
            has_offset=False,
            bytes=count,
            vectors=WholeVectors(x, None, lambda client, out: zeros),
        )


class NodesEngine(EngineWrapper):
    """The engine of a network's nodes. It is called once for each node, since each starts from its own model."""

    def __init__(self, engine: Engine, nodes: Nodes) -> None:
        super().__init__(engine)
        self._nodes = nodes

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the nodes of a broadcast; see ``Engine.updates``."""
        for place, node in enumerate(broadcast.ids):
            own = None if active is None else active.only(np.arange(len(active)) == place)
            yield from self.inner.updates(self._nodes.of(int(node)), own)

    @property
    def together(self) -> bool:
        """False, since nodes start from different models."""
        return False
