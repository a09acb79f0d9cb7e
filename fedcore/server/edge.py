"""An edge server: it folds the updates of its own clients, and sends one partial sum upward."""

from collections.abc import Iterable
from typing import Any

from fedcore.algorithms import Algorithm
from fedcore.arguments import whole
from fedcore.clients import ClientId
from fedcore.errors import ArrayError, RangeError, RoundError
from fedcore.kernels import all_finite
from fedcore.memory import copied, empty, freeze
from fedcore.rates import Rate
from fedcore.server.partial import Partial, require_partial_sums
from fedcore.server.report import RoundReport
from fedcore.server.round import Round
from fedcore.server.server import Server
from fedcore.server.update import Update, as_vector, in_float32


class EdgeRound(Round):
    """An open round of an edge; its end is ``partial``, for the step is the upper server's."""

    def finish(self) -> RoundReport:
        """Refuse to, and leave the edge as it was before the round.

        Raises:
            RoundError: always.
        """
        self.abort()
        raise RoundError("round: expected partial() before an edge's round ends, got none: the upper server steps")


class Edge:
    """A server between clients and the server: one level of a hierarchy.

    In each round it is given the model that the upper server broadcast, hears its clients as a ``Server`` does, and
    makes one ``Partial`` of them, 16 n bytes in place of 4 n a client. The upper server, one with accumulate="exact",
    takes it in by ``Round.add_partial``, and has the bits of a server that heard every client itself. Whether an update
    counts (its shape, numbers, claims and length) is decided here, where it is whole: above, a sum is checked against
    the norms and claims that the edge says (``Partial``). An edge that heard nobody sends zeros, and its refusals.

    Args:
        algorithm: the upper server's method; one that adds h alone, as FedAvg, FedProx and FedAvg-M do.
        x0: a model of the upper server's layout; what it holds does not matter.
        clients: the ids of the edge's own clients, which are registered at the upper server too.
        lr, server_lr: the upper server's: they say the units of updates.
        population: the most clients that the upper server will have, where those are more than 2,048: the more they
            are, the shorter an update has to be for an exact sum of them all. One that is too long is refused here
            then, and not above, where the whole partial sum would be.
        options: more of ``Server``'s arguments: ``fold``, the limits (``max_steps``, ``max_norm``, ``max_norm_ratio``
            and the like), ``own_rates``, ``signed_buffers``.

    Raises:
        RangeError: the method does more than to add h, or the layout has integer counters.
        FedcoreError: whatever ``Server`` raises of an argument.

    Cost: 52 n bytes.

    >>> import numpy as np
    >>> from fedcore import Server
    >>> server = Server("FedAvg", np.zeros(2, np.float32), clients=4, lr=0.1, accumulate="exact")
    >>> edges = [Edge("FedAvg", np.zeros(2, np.float32), ids, lr=0.1) for ids in ([0, 1], [2, 3])]
    >>> with server.open_round() as round:
    ...     for edge in edges:
    ...         with edge.open_round(server.x, round=server.round_number) as own:
    ...             for client in edge.clients:
    ...                 _ = own.add(client, np.float32([client, 1]), steps=5)
    ...             round.add_partial(own.partial().to_bytes(), "edge", clients=edge.clients)
    >>> server.x
    array([1.5, 1. ], dtype=float32)
    """

    def __init__(
        self,
        algorithm: Algorithm | str,
        x0: Any,
        clients: Iterable[ClientId],
        *,
        lr: float | Rate,
        server_lr: float | Rate | None = None,
        population: int = 0,
        **options: Any,
    ) -> None:
        for name in ("accumulate", "store", "client_sizes", "late_rounds", "optimizer", "device", "on_report"):
            if name in options:
                raise RangeError(f"{name}: expected an edge without one, got one: it is the upper server's")
        population = whole("population", population, 0, 2**53)
        self._server = Server(algorithm, x0, clients, lr=lr, server_lr=server_lr, accumulate="exact", **options)
        require_partial_sums(self._server._settings)
        self._server._state.upper_population = population

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The edge's own clients."""
        return tuple(self._server.clients)

    def open_round(self, x: Any, *, round: int) -> Round:
        """Open a round on what the upper server broadcast; its end is ``Round.partial``.

        Args:
            x: the model as it was sent: float32[n], its bytes, or a model that the layout fits; it is copied.
            round: the round's number.

        Raises:
            RoundError: a round is open.
            FedcoreError: x does not fit the layout, or is not finite.

        Cost: reads and writes 4 n bytes.
        """
        number = whole("round", round, 0, 2**53)
        server = self._server
        server._between_rounds()
        flat, n = as_vector("x", x, server.layout.n), server.layout.n
        vector = server.layout.flatten(x, empty(n)) if flat is None else copied(in_float32(flat))
        if not all_finite([vector])[0]:
            raise ArrayError("x: expected finite numbers, got a NaN or an infinity")
        freeze(vector)
        state = server._state
        state.snapshot = state.snapshot._replace(x=vector, x_prev=vector, round_number=number)
        return server._open(server._settings.fold, may_hold=False, kind=EdgeRound)

    def fold(self, x: Any, updates: Iterable[Update], *, round: int) -> Partial:
        """One round in one call: what the updates of the edge's clients make; arguments are those of ``open_round``."""
        with self.open_round(x, round=round) as opened:
            for update in updates:
                opened.add_update(update)
            return opened.partial()
