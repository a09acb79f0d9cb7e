"""Engines, which do the clients' work: the contract, the clients' examples, and clients that keep rows of their own."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import MEAN_GRADIENT, Algorithm, Direction, FedAvgM, LocalDescent, MimiC, is_made_here
from fedcore.arguments import whole
from fedcore.arrays import F32, copy_into, to_host
from fedcore.atomic_file import replacing, require_file
from fedcore.errors import RangeError, UnknownClientError
from fedcore.network import Network, NetworkReport
from fedcore.server import Broadcast, Report, Server, Update
from fedcore.server.broadcast import WholeVectors
from fedcore.server.instructions import Instructions
from fedcore.simulation.local_rules import Indices, LocalRule, Sgd, Table, minibatch_table, minibatches
from fedcore.simulation.participation import Active
from fedcore.store.registry import ClientId

if TYPE_CHECKING:
    from fedcore.simulation.sgd import LocalOptions

NO_ROUND = 2**32 - 1
"""The round of a warm start's minibatches, which no run reaches."""


@dataclass(frozen=True)
class Evaluation:
    """A model's result on a test set: the share of correct answers, and the mean cross entropy."""

    accuracy: float
    loss: float


class Engine(Protocol):
    """Client work, in this process or in others."""

    @property
    def together(self) -> bool:
        """Whether clients are trained together."""

    @property
    def waited(self) -> float:
        """Seconds so far of waiting for updates from other processes; 0 for an engine without any."""

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast, each when its update is read.

        Args:
            active: the clients of the broadcast with the share of its steps that each does, and how often it was
                drawn. Default: all steps, once.

        Yields:
            An ``Update`` for each id, in their order unless the engine is set to another; the next one may overwrite
            ``y`` unless ``keep`` is true.
        """

    def gradients(self, broadcast: Broadcast, minibatches: int | None = None) -> dict[ClientId, F32]:
        """The mean of each client's minibatch gradients at a broadcast's x, float32[n_parameters] by client.

        Args:
            minibatches: of each client. Default: as many as a round has local steps.
        """

    def evaluate(self, x: F32) -> Evaluation:
        """Accuracy and loss of a model, float32[n], on the engine's test set."""

    def most_steps(self, local_rule: LocalRule) -> int:
        """The most local steps of a client's complete work, over all clients."""

    def close(self) -> None:
        """Release what the engine holds beside memory, such as other processes."""


def check_method(algorithm: Algorithm) -> None:
    """Refuse a method that asks clients for what those of an engine cannot do.

    Raises:
        RangeError: clients would have to keep rows of an unknown kind (``KeepingClients`` keeps those of MimiC and of
            the SCAFFOLDs, ``RecoveringClients`` FedAvg-M's momentum), or send such a second vector.
    """
    if not (algorithm.sends_row_change or (algorithm.rows_at_clients and isinstance(algorithm, MimiC | FedAvgM))):
        _check_asked(algorithm.rows_at_clients, algorithm.second_vector)


def _check_asked(keeps_row: bool, second: str | None) -> None:
    if keeps_row:
        raise RangeError(
            "placement: must be 'server', since engines.KeepingClients keeps only the rows of MimiC and the SCAFFOLDs"
        )
    if not is_made_here(second):
        raise RangeError(
            f"second_vector={second!r}: simulated clients send only {MEAN_GRADIENT!r} beside y: train in your own loop"
        )


class Sent(Protocol):
    """The instructions and vectors that clients receive: a ``Broadcast``, or a worker's part of one."""

    @property
    def x(self) -> F32:
        """float32[n], from which clients start, read-only and in host memory."""
        ...

    @property
    def common(self) -> Instructions:
        """The instructions to all of them, without an offset."""
        ...

    def of(self, client: int) -> Instructions:
        """The instructions to one of them; its offset is made by this call."""
        ...


@dataclass(frozen=True)
class Plan:
    """The work of a round, in the order in which its clients are trained.

    Attributes:
        clients: indices into the parts.
        steps: the local steps of each.
        counts: how often each was drawn.
        sent: their instructions and vectors, which are read only when a client is trained.
    """

    clients: Sequence[int]
    steps: Sequence[int]
    counts: Sequence[int]
    sent: Sent


def standing(broadcast: Broadcast) -> Broadcast:
    """A broadcast for a warm start: the clients stay at x and send the mean of their gradients there.

    Their steps have length zero, along minibatches that no round takes.
    """
    still = replace(broadcast, direction=Direction(a=0.0), has_offset=False)
    return replace(still, second_vector=MEAN_GRADIENT, round=NO_ROUND)


class Parts:
    """The parts of a training set that the clients hold, with the sizes and seed of their minibatches.

    Args:
        held: client i holds the training examples ``held[i]``, int64[m_i].
        examples: of the training set.
        batch, epochs, steps, seed, options: as for ``InProcess``.

    Raises:
        RangeError: there is no part, one is empty or points outside the training examples, or a number is out of range.
    """

    def __init__(
        self,
        held: Sequence[npt.NDArray[np.int64]],
        examples: int,
        *,
        batch: int,
        epochs: int | None,
        steps: int | None,
        seed: int,
        options: "LocalOptions",
    ) -> None:
        if not len(held):
            raise RangeError("parts must not be empty")
        for client, part in enumerate(held):
            if not len(part):
                raise RangeError(f"parts: client {client} has no examples")
            if not 0 <= part.min() <= part.max() < examples:
                raise RangeError(
                    f"parts: client {client} has indices {part.min()} .. {part.max()}, must be 0 .. {examples - 1}"
                )
        self._held = list(held)
        self.largest = max(map(len, held))
        self.seed, self.options = seed, options
        self._batch, self._epochs, self._steps = batch, epochs, steps
        self.minibatches(0, 0, Sgd())  # refuses wrong sizes now, not in the first round

    def __len__(self) -> int:
        """The number of clients."""
        return len(self._held)

    def __getitem__(self, client: int) -> npt.NDArray[np.int64]:
        """The training examples that a client holds."""
        return self._held[client]

    def plan(self, broadcast: Broadcast, active: Active | None, *, minibatches: int | None = None) -> Plan:
        """The work of a broadcast's clients.

        Args:
            broadcast: its vectors in host memory.
            active: as for ``Engine.updates``.
            minibatches: how many make complete work. Default: the parts' own number.

        Raises:
            UnknownClientError: an id is no index into the parts.
            RangeError: ``active`` is of other clients; or the method asks for what simulated clients cannot do.
        """
        _check_asked(broadcast.keeps_row, broadcast.second_vector)
        if broadcast.plain and not self.options.plain:
            raise RangeError(
                "options: expected no momentum and no clip, since the server derives gradients from plain steps, got"
                f" {self.options}"
            )
        ids = [self._known(client) for client in broadcast.ids]
        due, counts = self._full_steps(ids, broadcast.local_rule), np.ones(len(ids), np.int64)
        due = due if minibatches is None else np.full_like(due, whole("minibatches", minibatches, 1))
        if active is not None:
            if active.clients.tolist() != ids:
                raise RangeError(f"active: expected the clients {ids}, got {active.clients.tolist()}")
            due = active.steps(due)
            counts = counts if active.counts is None else active.counts
        return Plan(ids, due.tolist(), counts.tolist(), broadcast)

    def most_steps(self, local_rule: LocalRule) -> int:
        """The most local steps of a client's complete work, over all clients."""
        return int(self._full_steps(range(len(self)), local_rule).max())

    def batch(self, local_rule: LocalRule) -> int:
        """The size of a minibatch under a rule."""
        return local_rule.batch(self._batch)

    def minibatches(
        self, round: int, client: int, local_rule: LocalRule, steps: int | None = None
    ) -> Iterator[Indices]:
        """A client's minibatches in a round, as indices into its own part: so many, or those of complete work."""
        return minibatches(
            len(self[client]),
            self.batch(local_rule),
            epochs=self._epochs if steps is None else None,
            steps=self._steps if steps is None else steps,
            seed=self.seed,
            round=round,
            client=client,
        )

    def table(self, round: int, client: int, local_rule: LocalRule, steps: int) -> Table:
        """A client's minibatches; as wide as its own size makes it, so that its bits do not depend on the others."""
        part = self[client]
        power = 1 << (len(part) - 1).bit_length()
        size = self.batch(local_rule)
        table = minibatch_table(
            len(part),
            size,
            steps=steps,
            width=max(2, min(size, power)),  # one column of one client is another product to torch
            seed=self.seed,
            round=round,
            client=client,
        )
        table = local_rule.in_table(table, len(part))
        return Table(part[table.indices], table.sizes)

    def _known(self, client: object) -> int:
        if not isinstance(client, int) or not 0 <= client < len(self):
            raise UnknownClientError(f"ids: expected 0 .. {len(self) - 1}, got {client!r}")
        return client

    def _full_steps(self, clients: Sequence[int], local_rule: LocalRule) -> Indices:
        """The steps of each client's complete work."""
        due = [
            local_rule.full_steps(len(self[client]), self._batch, epochs=self._epochs, steps=self._steps)
            for client in clients
        ]
        return np.array(due, np.int64)


class OverEngine:
    """An engine over another one, to which all is left that a subclass does not do itself.

    Args:
        engine: closed with this one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def gradients(self, broadcast: Broadcast, minibatches: int | None = None) -> dict[ClientId, F32]:
        """See ``Engine.gradients``."""
        return self._engine.gradients(broadcast, minibatches)

    def evaluate(self, x: F32) -> Evaluation:
        """See ``Engine.evaluate``."""
        return self._engine.evaluate(x)

    def most_steps(self, local_rule: LocalRule) -> int:
        """See ``Engine.most_steps``."""
        return self._engine.most_steps(local_rule)

    @property
    def together(self) -> bool:
        """See ``Engine.together``."""
        return self._engine.together

    @property
    def waited(self) -> float:
        """See ``Engine.waited``."""
        return self._engine.waited

    def close(self) -> None:
        """See ``Engine.close``."""
        self._engine.close()


class KeepingClients(OverEngine):
    """The engine whose clients have a row each, float32[n_parameters], that the server never sees.

    MimiC's send the model that they would have reached along h_i + c_i, and have c_i = v - h_i after the round. Those
    of the SCAFFOLDs add their row's part to the offset, send c_i+ - c_i as ``control``, and keep c_i+. A client that
    whose update was not used keeps its row.

    Args:
        engine: who trains; it is closed with this one.
        algorithm: the server's, with its rows at the clients.

    Attributes:
        rows: by client; one that is not there is zero.
        bytes_more: what the clients of the last broadcast were sent beside it: nothing.

    Cost: 4 n bytes for each client with an update so far, and for each of a round's; a checkpoint writes them all.
    """

    def __init__(self, engine: Engine, algorithm: Algorithm) -> None:
        super().__init__(engine)
        self._algorithm = algorithm
        self.rows: dict[ClientId, F32] = {}
        self.bytes_more = 0
        self._next: dict[ClientId, F32] = {}
        """The rows of the open round: c_i+, or h_i until v is known."""

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast; see ``Engine.updates``."""
        self._next.clear()
        change = broadcast.second_vector is not None
        for update in self._engine.updates(self._own(broadcast) if change else _without_rows(broadcast), active):
            yield self._with_change(update) if change else self._with_correction(update, broadcast)

    def _own(self, broadcast: Broadcast) -> Broadcast:
        """The broadcast with each client's own row in its offset, and the gradient as its second vector."""
        from_row = np.float32(broadcast.direction.from_row)

        def offset(client: ClientId, out: Any) -> Any:
            shared = to_host(broadcast.offset(client))
            row = self.rows.get(client)
            own = shared if row is None else shared + from_row * row
            if out is None:
                return own
            copy_into(out, own)
            return out

        return replace(_without_rows(broadcast).with_offset(offset), second_vector=MEAN_GRADIENT)

    def _with_change(self, update: Update) -> Update:
        client = update.client
        self._next[client] = raw = np.array(update.control)
        return update._replace(control=raw - self.rows[client] if client in self.rows else raw)

    def _with_correction(self, update: Update, broadcast: Broadcast) -> Update:
        """The update with x - eta K (h_i + c_i) in the place of y, parameters only."""
        assert update.lr is not None
        unit = np.float32(1 if self._algorithm.averages else update.lr * update.steps)
        client, p = update.client, self._parameters(broadcast)
        y = np.array(update.value, np.float32)
        self._next[client] = (to_host(broadcast.x)[:p] - y[:p]) / unit
        if client in self.rows:
            y[:p] -= unit * self.rows[client]
        return update._replace(value=y, keep=True)

    @staticmethod
    def _parameters(broadcast: Broadcast) -> int:
        """The length of a row, which is that of an offset."""
        return len(broadcast.offset(broadcast.ids[0]))

    def after(self, server: Server, report: Report) -> None:
        """Update the rows of clients whose updates were used."""
        v = to_host(server.v) if self._algorithm.second_vector is None else None
        for client in report.accepted:
            row = self._next[client]
            self.rows[client] = row if v is None else v - row
        self._next.clear()

    def gradients(self, broadcast: Broadcast, minibatches: int | None = None) -> dict[ClientId, F32]:
        """The gradients from which the server starts, and the clients' rows with it."""
        found = self._engine.gradients(_without_rows(broadcast), minibatches)
        self.rows = {client: gradient.copy() for client, gradient in found.items()}
        return found

    def save(self, path: Path) -> None:
        """Write all rows into a file, which takes the place of one of that name as a whole."""
        write_arrays(path, **{str(client): row for client, row in self.rows.items()})

    def load(self, path: Path) -> None:
        """Take over the rows that ``save`` wrote."""
        with np.load(require_file(path)) as file:
            self.rows = {int(client): file[client] for client in file.files}


def _without_rows(broadcast: Broadcast) -> Broadcast:
    """The broadcast to clients that know no rows and no slices: an engine that keeps their rows sees whole vectors."""
    return replace(broadcast.whole(), keeps_row=False)


def write_arrays(path: Path, **arrays: Any) -> None:
    """Write arrays into a file at once: it stays as it was if this fails."""
    with replacing(path, "wb") as file:
        np.savez(file, **arrays)


class RecoveringClients(KeepingClients):
    """The engine whose clients recover g = (x_t - x_{t+1}) / gamma, so that known clients are sent only x.

    A client that was not sent x_t is sent it beside x_{t+1}, or what it was when x moved last: as much as g is.

    Args:
        engine: who trains; it is closed with this one.
        algorithm: FedAvg-M with its momentum at the clients.

    Attributes:
        bytes_more: what the clients of the last broadcast were sent beside x.

    Cost: 8 n bytes, since all clients find the same.
    """

    def __init__(self, engine: Engine, algorithm: FedAvgM) -> None:
        super().__init__(engine, algorithm)
        self._share = np.float32(1 - algorithm.beta)
        self._g: F32 | None = None
        self._know_g: set[ClientId] = set()
        self._sent: tuple[F32, set[ClientId]] | None = None
        """The x of the last round, and the clients that were sent it."""
        self._gamma = 0.0
        """The step from there along g; 0 if x stayed."""

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast; see ``Engine.updates``."""
        here, ids = _without_rows(broadcast.on_host()), set(broadcast.ids)
        if self._gamma and self._sent is not None:
            x, sent_to = self._sent
            p = len(broadcast.offset(broadcast.ids[0])) if broadcast.ids else len(x)
            self._g, self._know_g, self._gamma = (x[:p] - here.x[:p]) / np.float32(self._gamma), sent_to, 0.0
        self._sent = here.x, ids
        if self._g is None:
            yield from self._engine.updates(here, active)
            return
        self.bytes_more = self._g.nbytes * len(ids - self._know_g)
        self._know_g |= ids
        along = self._share * self._g

        def offset(client: ClientId, out: Any) -> Any:
            if out is None:
                return along
            copy_into(out, along)
            return out

        yield from self._engine.updates(here.with_offset(offset), active)

    def after(self, server: Server, report: Report) -> None:
        """Let the clients know how far x moves along what they are to find."""
        self._gamma = report.gamma

    def save(self, path: Path) -> None:
        """Write what clients know; see ``KeepingClients.save``."""
        x, sent_to = self._sent or (np.empty(0, np.float32), set())
        g = np.empty(0, np.float32) if self._g is None else self._g
        ids = {"sent_to": sorted(sent_to, key=str), "know_g": sorted(self._know_g, key=str)}
        write_arrays(path, x=to_host(x), g=g, gamma=np.float64(self._gamma), **{k: np.array(v) for k, v in ids.items()})

    def load(self, path: Path) -> None:
        """Take over what ``save`` wrote."""
        with np.load(require_file(path)) as file:
            x, g = file["x"], file["g"]
            self._sent = (x, set(file["sent_to"].tolist())) if len(x) else None
            self._g = g if len(g) else None
            self._know_g, self._gamma = set(file["know_g"].tolist()), float(file["gamma"])


class Nodes:
    """A ``Network`` as the loop of a trial sees a server: what a round's nodes start from, the round, and the output.

    Args:
        network: the models.
        algorithm: what their local steps are.
    """

    def __init__(self, network: Network, algorithm: LocalDescent) -> None:
        self.network = network
        self.algorithm: Algorithm = algorithm

    @property
    def round_number(self) -> int:
        """The number of finished rounds."""
        return self.network.round_number

    @property
    def x(self) -> F32:
        """The network's answer, sum_j q_j y_j, float32[n]."""
        return self.network.output()

    def broadcast(self, ids: Iterable[ClientId]) -> Broadcast:
        """The order to these nodes alike; its x is the output, and each starts from its own model (``of``).

        Its bytes are those of the models that the nodes get from their neighbours among them.
        """
        nodes = np.array(list(ids), np.int64)
        among = self.network.W[np.ix_(nodes, nodes)]
        edges = int(np.count_nonzero(among)) - int(np.count_nonzero(np.diag(among)))
        return self._broadcast(tuple(nodes.tolist()), self.x, 4 * self.network.layout.n * edges)

    def of(self, node: int) -> Broadcast:
        """The order to one node, from its own model."""
        return self._broadcast((node,), self.network.models[node], 0)

    def _broadcast(self, ids: tuple[int, ...], x: F32, weighs: int) -> Broadcast:
        zeros = np.zeros(self.network.layout.n_parameters, np.float32)
        return Broadcast(
            ids=ids,
            round=self.round_number,
            lr=self.network.lr,
            lr_of_step=self.network.lr_of_step,
            direction=self.algorithm.direction,
            second_vector=None,
            local_rule=self.algorithm.local_rule,
            keeps_row=False,
            has_offset=False,
            plain=False,
            bytes=weighs,
            vectors=WholeVectors(x, None, lambda client, out: zeros),
        )

    def round(self, updates: Iterable[Update]) -> NetworkReport:
        """A whole round: every update that comes in, and the mixing."""
        return self.network.round(updates)

    def save(self, path: Path) -> None:
        """Write a copy, which ``Network.load`` opens."""
        self.network.save(path)


class NodesEngine(OverEngine):
    """The engine of a network's nodes: each is trained from its own model.

    Args:
        engine: who trains them; it is closed with this one.
        nodes: whose models they start from.

    Cost: nodes are trained one call after another, since no two of them start from one model.
    """

    def __init__(self, engine: Engine, nodes: Nodes) -> None:
        super().__init__(engine)
        self._nodes = nodes

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the nodes of a broadcast; see ``Engine.updates``."""
        for place, node in enumerate(broadcast.ids):
            alone = None if active is None else active.only(np.arange(len(active)) == place)
            yield from self._engine.updates(self._nodes.of(int(node)), alone)

    @property
    def together(self) -> bool:
        """False: no two nodes start from one model."""
        return False
