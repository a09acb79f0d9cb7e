"""The server: what it sends out, and the rounds that change it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args
from weakref import ReferenceType, ref

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import Algorithm, named
from fedcore.algorithms.rates import Rate, as_rate, rate_at
from fedcore.errors import ArrayError, RangeError, RoundError, ShapeError, UnknownNameError
from fedcore.layout import Layout
from fedcore.server.report import RoundReport
from fedcore.server.round import Round
from fedcore.server.state import Settings, State
from fedcore.server.sums import Precision
from fedcore.server.update import Limits, Update, is_integer
from fedcore.store import ClientId, ClientStore

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Broadcast:
    """What the clients of a round start from.

    Attributes:
        ids: the clients it is for.
        round: the round's number.
        x: float32[n], read-only, and never changed later.
        lr: eta, the rate of the local steps.
        local_rule: what the clients do, by its name in ``fedcore.local``.
    """

    ids: tuple[ClientId, ...]
    round: int
    x: F32
    lr: float
    local_rule: str


class Server:
    """A federated server: a model x, an algorithm, and one row of state per client where the algorithm keeps one.

    Args:
        algorithm: one of ``fedcore.algorithms``, or its name.
        x0: float32[n] or anything ``Layout.of`` takes; copied.
        clients: how many there are (ids 0..clients - 1), or their ids, each an int in 0..2**64 - 1 or a str. May be
            left out where ``store`` is a ClientStore, which knows.
        lr: eta, the rate of the clients' local steps: a number, or a function of the round.
        server_lr: gamma: a number, or a function of the round. None averages the clients' models (FedAvg), or uses
            the cohort's mean of eta_i K_i (methods in gradient units; in a round without clients the last gamma).
        store: "ram", or a ClientStore with rows of ``n_parameters`` elements.
        fold: how many updates a round may hold to fold them in one pass, where they may be held at all.
        accumulate: what a round's sums are kept in; always float64 where the method keeps a total (MIFA, MimiC).
        max_steps, max_examples, max_lr: an update that claims more is refused.

    Raises:
        UnknownNameError, RangeError, ShapeError, DtypeError, ArrayError: an argument is not what is said above.

    Cost: 20 n bytes (44 n where the method keeps a total), and 4 n for each row (MimiC: and for each round that a row
        refers to).

    >>> server = Server("FedAvg", np.zeros(2, np.float32), clients=2, lr=0.1)
    >>> with server.open_round() as round:
    ...     round.add(0, np.float32([1, 2]), steps=5, examples=30)
    ...     round.add(1, np.float32([3, 6]), steps=5, examples=10)
    >>> server.x
    array([1.5, 3. ], dtype=float32)
    """

    def __init__(
        self,
        algorithm: Algorithm | str,
        x0: Any,
        clients: int | Iterable[ClientId] | None = None,
        *,
        lr: float | Rate,
        server_lr: float | Rate | None = None,
        store: str | ClientStore = "ram",
        fold: int = 8,
        accumulate: Precision = "float32",
        max_steps: int = 10**6,
        max_examples: int = 10**9,
        max_lr: float = 100.0,
    ) -> None:
        for name, value in (("fold", fold), ("max_steps", max_steps), ("max_examples", max_examples)):
            if not is_integer(value, 1, 2**53):
                raise RangeError(f"{name}: expected an integer in 1..2**53, got {value!r}")
        if isinstance(algorithm, str):
            algorithm = named(algorithm)
        if not isinstance(algorithm, Algorithm):
            raise UnknownNameError(f"algorithm: expected an Algorithm or the name of one, got {algorithm!r}")
        if accumulate not in get_args(Precision):
            raise UnknownNameError.of("accumulate", accumulate, get_args(Precision))
        layout = Layout.of(x0)
        if layout.n_parameters < 1:
            raise ShapeError(f"x0: expected at least one parameter, got {layout.n_parameters}")
        self._settings = Settings(
            algorithm=algorithm,
            layout=layout,
            lr=as_rate(lr),
            server_lr=None if server_lr is None else as_rate(server_lr),
            fold=int(fold),
            accumulate=accumulate,
            limits=Limits(int(max_steps), int(max_examples), as_rate(max_lr)(0)),
        )
        x = layout.flatten(x0)
        if not np.isfinite(x).all():
            raise ArrayError("x0: expected finite numbers, got a NaN or an infinity")
        self._state = State(
            self._settings, x, _open_store(store, clients, layout.n_parameters), layout.read_counters(x0)
        )
        # Weak, so that a round that was dropped does not stay open for ever.
        self._round: ReferenceType[Round] | None = None

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm."""
        return self._settings.algorithm

    @property
    def layout(self) -> Layout:
        """Where the model's tensors lie in x."""
        return self._settings.layout

    @property
    def store(self) -> ClientStore:
        """The clients' rows."""
        return self._state.store

    @property
    def x(self) -> F32:
        """The model, float32[n]: a read-only view, never changed later (a round makes a new one)."""
        return self._state.x.view()

    @property
    def round_number(self) -> int:
        """How many rounds were finished, which is the number of the next."""
        return self._state.round_number

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The model by name, as copies: parameters and buffers in float32, counters in their own integer types."""
        named: dict[str, npt.NDArray[Any]] = dict(self.layout.unflatten(self._state.x.copy()))
        named |= {name: counter.copy() for name, counter in self._state.counters.items()}
        return named | {alias: named[name] for alias, name in self.layout.aliases.items()}

    def correction(self, client: ClientId) -> npt.NDArray[np.float64]:
        """c_i, float64[n_parameters]: what MimiC adds to the client's next mean gradient; zero elsewhere."""
        written, row = self.store.round_of(client), self.store.row(client)
        if not self.algorithm.keeps_history or written is None or row is None:
            return np.zeros(self.layout.n_parameters)
        return self._state.history[written].astype(np.float64) - row

    def broadcast(self, ids: Iterable[ClientId]) -> Broadcast:
        """What those clients start from in the next round.

        Raises:
            UnknownClientError: one of them is not registered.
        """
        known = tuple(self.store.registry.check(client) for client in ids)
        lr = rate_at(self._settings.lr, self.round_number)
        return Broadcast(known, self.round_number, self.x, lr, self.algorithm.local_rule)

    def open_round(self) -> Round:
        """Start a round; there is one at a time.

        Raises:
            RoundError: one is open already.
        """
        return self._open(self._settings.fold, may_hold=False)

    def round(self, updates: Iterable[Update]) -> RoundReport:
        """A whole round from an iterable of updates, which may be made while they are read.

        Errors are those of ``Round.add`` and ``Round.finish``; the server is then as it was before.
        """
        # A list's arrays live as long as this call and change only if another thread does it: all in one pass.
        listed = isinstance(updates, list | tuple)
        fold = max(self._settings.fold, len(updates)) if isinstance(updates, list | tuple) else self._settings.fold
        with self._open(fold, may_hold=listed) as opened:
            for update in updates:
                opened.add_update(update)
            return opened.finish()

    def _open(self, fold: int, *, may_hold: bool) -> Round:
        before = self._round() if self._round is not None else None
        if before is not None and before.is_open:
            raise RoundError(f"round {self.round_number} is open already: finish or abort it first")
        opened = Round(self._settings, self._state, fold=fold, may_hold=may_hold)
        self._round = ref(opened)
        return opened


def _open_store(store: str | ClientStore, clients: int | Iterable[ClientId] | None, n: int) -> ClientStore:
    if isinstance(store, ClientStore):
        if clients is not None:
            raise RangeError("clients: expected none beside a ClientStore, which knows its clients")
        if len(store) > 0:
            raise RangeError(f"store: expected one without rows, whose sums nobody knows, got {len(store)} rows")
        if store.n != n:
            raise ShapeError(f"store: expected rows of {n} parameters, got {store.n}")
        return store
    if store != "ram":
        raise UnknownNameError.of("store", store, ["ram"])
    if clients is None:
        raise RangeError("clients: expected a count or the ids, got None")
    return ClientStore(clients, n)
