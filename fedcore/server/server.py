"""The server: what it sends out, and the rounds that change it."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, Unpack

from fedcore import devices
from fedcore.aggregation.sum import Precision
from fedcore.algorithms import Algorithm
from fedcore.clients import ClientId
from fedcore.interrupts import uninterrupted
from fedcore.layout import Layout
from fedcore.memory import empty, freeze
from fedcore.optimizers import Optimizer
from fedcore.rates import Rate
from fedcore.server.audit import checked
from fedcore.server.beginning import (
    first_settings,
    first_state,
    require_clients,
    require_finite,
    resumed_state,
    weights_by_client,
    with_buffers_of,
    with_weights,
)
from fedcore.server.broadcast import Broadcast, broadcast
from fedcore.server.buffers import SIGNED
from fedcore.server.changes import change, change_on_loading
from fedcore.server.folder_checks import believed
from fedcore.server.limits import LimitOptions, Limits
from fedcore.server.newcomers import Coming
from fedcore.server.population import Sizes, arriving
from fedcore.server.report import OnReport, RoundReport, tell, warn_if_lowered
from fedcore.server.round import LOGGER, Round
from fedcore.server.round_lock import RoundLock
from fedcore.server.server_store import new_rows, saved_rows
from fedcore.server.settings import Changes, said_again
from fedcore.server.state import State
from fedcore.server.update import Update, held_together
from fedcore.server.view import ServerView
from fedcore.server.weighing import Weights, require_weighing
from fedcore.server.whole_round import WholeRound, may_be_whole, whole_round
from fedcore.store import ClientStore, Durability


class Server(ServerView):
    """A federated server: a model x, an algorithm, and one row of state per client where the algorithm keeps one.

    Args:
        algorithm: one of ``fedcore.algorithms``, or its name.
        x0: float32[n] or anything ``Layout.of`` takes; copied.
        clients: how many there are (ids 0..clients - 1), or their ids, each an int in 0..2**64 - 1 or a str: none, if
            they come later (``arrive``, ``open_round``). May be left out where ``store`` is a ClientStore, which knows.
        lr: eta, the rate of the clients' local steps: a number, or a function of the round.
        server_lr: gamma: a number, or a function of the round. None averages the clients' models (FedAvg), or uses
            the cohort's mean of eta_i K_i (methods in gradient units; in a round without clients the last gamma). With
            an adaptive optimizer None is its ``eta``.
        store: "ram", "mmap:PATH" (a new folder; ``Server.load`` goes on with an old one), "cuda" (all rows in the
            memory of ``device``), or a ClientStore with rows of ``n_parameters`` elements, which a codec rounds
            stochastically by the round and the client alone.
        optimizer: one of ``fedcore.optimizers``, which turns the method's direction into the step's.
        client_sizes: n_k, the examples of every client, by id or in the order of the ids, for the methods that weigh by
            p^k = n_k / n. A client that claims more, or gives no number, is counted with n_k.
        weights: weights >= 0 in the place of n_i, for methods that weigh by examples: by client, or a function of one
            client's ``fedcore.algorithms.Claims``, such as ``lambda claims: np.sqrt(claims.examples)``. They are not
            saved: ``load`` takes them again.
        late_rounds: how many rounds late a reply may be and still count, measured against the x that it started from.
        history_rounds: MimiC keeps the directions of so many rounds that rows refer to, and folds those of others into
            their rows (r - v[t] in place of r and v[t]): fewer take less memory, and rewrite more rows.
        fold: how many updates a round may hold to fold them in one pass, where they may be held at all. None is 8, or
            for a small model as many as weigh 1 MiB.
        accumulate: what a round's sums are kept in: "float32", "float64", or "exact". Always float64, if not exact,
            where the method keeps a total or sums what rows are short of (MIFA, MimiC). Exact sums and totals are
            integers on a grid of 2^-60: the same bits for replies in any order, a total without drift, and a client
            that departs leaves nothing in it. Nobody's update may then be longer than 2^39, nor than 2^50 / N.
        diagnostics: whether reports have ``diversity`` and ``correction_norm`` also where that takes a reading of rows.
        limits: "open" for a federation that strangers can join: updates longer than the median of the last 1,000 are
            scaled down to it, and claims of examples and steps count up to 2 medians. None for no such limit.
        max_steps, max_steps_ratio, max_examples, max_examples_ratio, max_lr, max_norm, max_norm_ratio, own_rates: what
            a client may claim and send: see ``fedcore.server.limits.Limits``. Its rate is the one that was sent, unless
            ``own_rates`` is True.
        signed_buffers: patterns of the names of float buffers that may become negative. Of others, such as variances,
            one that is not negative in ``x0``, nor zero throughout, may not: an update in which it is is refused.
        device: where the model, the sums and the rows of a round lie: "cpu", or a GPU's "cuda" or "cuda:1", with the
            same bits. ``x`` and offsets are then ``DeviceArray``s, and a client's y that lies on the device goes in as
            it is; a reply in host memory is copied to the device once.
        hot_rows: on a device, about how many rows of a store in host memory stay there between rounds; None for as many
            as 4 GiB hold. What a round uses comes on top.
        undoable: whether the folder of an mmap store keeps what the last round, arrival, departure or warm start
            replaced, so that it can be taken back where no server holds the folder (``ClientStore.undo``, ``fedcore
            store undo PATH``). ``load`` goes on with it.
        audit: whether each round leaves a document in its transaction: the digest and weight of each update, the
            rejections, the options, and the digests of x before and after; see ``audit_log``.
        on_report: called with the RoundReport of each round after it counted, in the thread that finished it. What it
            raises is logged and undoes nothing; it may read the server, and is no part of what is saved.

    Attributes:
        on_report: as given; another one may take its place between rounds.

    Raises:
        UnknownNameError, RangeError, UnknownClientError, ShapeError, DtypeError, ArrayError: an argument is not what is
            said above.
        DeviceError: there is no such device, or no driver: nothing was made.
        AlgorithmError: the table of a method of one's own contradicts itself.

    A server on an mmap store holds its folder until it is closed: ``close()``, or ``with Server(...) as server:``.

    Cost: 20 n bytes (44 n where the method keeps a total; 52 n and 108 n where sums are exact), and 4 n for each row
        (MimiC: and for at most history_rounds directions). With max_norm_ratio a copy of up to 7 updates, until 8 were
        heard.

    >>> import numpy as np
    >>> server = Server("FedAvg", np.zeros(2, np.float32), clients=2, lr=0.1)
    >>> with server.open_round() as round:
    ...     _ = round.add(0, np.float32([1, 2]), steps=5, examples=30)
    ...     _ = round.add(1, np.float32([3, 6]), steps=5, examples=10)
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
        optimizer: Optimizer | None = None,
        client_sizes: Sizes | None = None,
        weights: Weights | None = None,
        late_rounds: int = 0,
        history_rounds: int = 64,
        fold: int | None = None,
        accumulate: Precision = "float32",
        diagnostics: bool = False,
        limits: Literal["open"] | None = None,
        max_steps: int = 10**6,
        max_steps_ratio: float | None = None,
        max_examples: int = 2**53,
        max_examples_ratio: float | None = None,
        max_lr: float = 100.0,
        max_norm: float | None = None,
        max_norm_ratio: float | None = None,
        own_rates: bool = False,
        signed_buffers: Sequence[str] = SIGNED,
        device: str = devices.CPU,
        hot_rows: int | None = None,
        undoable: bool = False,
        audit: bool = False,
        on_report: OnReport | None = None,
    ) -> None:
        device = devices.named(device)
        layout = Layout.of(x0)
        self._settings = first_settings(
            algorithm,
            layout,
            lr=lr,
            server_lr=server_lr,
            optimizer=optimizer,
            late_rounds=late_rounds,
            history_rounds=history_rounds,
            fold=fold,
            accumulate=accumulate,
            diagnostics=diagnostics,
            limits=Limits.of(
                {
                    "limits": limits,
                    "max_steps": max_steps,
                    "max_steps_ratio": max_steps_ratio,
                    "max_examples": max_examples,
                    "max_examples_ratio": max_examples_ratio,
                    "max_lr": max_lr,
                    "max_norm": max_norm,
                    "max_norm_ratio": max_norm_ratio,
                    "own_rates": own_rates,
                }
            ),
            device=device,
        )
        x = layout.flatten(x0, empty(layout.n, device=device))
        require_finite(x, layout)
        freeze(x)
        self._settings = with_buffers_of(self._settings, x, signed_buffers)
        self._settings = replace(with_weights(self._settings, weights), audit=bool(audit))
        with new_rows(store, clients, layout.n_parameters, device, hot_rows, undoable) as rows:
            require_clients(rows, clients)
            state = first_state(self._settings, x, layout.read_counters(x0), client_sizes, rows)
            self._start(state, on_report, weights)

    def _start(self, state: State, on_report: OnReport | None, weights: Weights | None) -> None:
        self._state, self.on_report, self._weights = state, on_report, weights_by_client(weights)
        self._round_lock = RoundLock()

    @property
    def weights(self) -> Weights | None:
        """The weights in the place of n_i: see the argument. Others may be set between rounds.

        Raises (where they are set):
            RangeError: the method does not weigh by examples.
        """
        return self._weights

    @weights.setter
    def weights(self, weights: Weights | None) -> None:
        if weights is not None:
            require_weighing(self._settings.algorithm, "weights")
        self._weights = weights_by_client(weights)
        self._state.settings = self._settings = replace(self._settings, own_weights=weights is not None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a named copy of everything: the model, the sums, the rows, the counters, and what they mean.

        A server on an mmap store needs it only for copies: every finished round is there already.

        Args:
            path: a new or empty folder, or an older copy, which stays until the new one is whole. A folder in which a
                server has gone on is no copy any more.

        Raises:
            RoundError, StoreError: a round is open; the folder is something else, or the disk is full.

        Cost: reads and writes every row once.
        """
        self._between_rounds()
        self._state.save(path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | ClientStore,
        *,
        medium: Literal["ram", "mmap", "cuda"] | None = None,
        device: str | None = None,
        durability: Durability | None = None,
        undoable: bool | None = None,
        algorithm: Algorithm | None = None,
        lr: float | Rate | None = None,
        server_lr: float | Rate | None = None,
        optimizer: Optimizer | None = None,
        hot_rows: int | None = None,
        weights: Weights | None = None,
        on_report: OnReport | None = None,
        **limits: Unpack[LimitOptions],
    ) -> "Server":
        """The server of a folder as its last finished round left it; its rounds go on as if nothing had happened.

        Args:
            path: what ``save`` wrote, or the folder of an mmap store; or a ClientStore that was opened from one, after
                an undo, say. The server then closes it.
            medium: "mmap" goes on in the folder itself, "ram" and "cuda" leave it alone; None is the writer's, or "ram"
                where that is "cuda" and the server is not on a device.
            device: where it goes on, with the same bits; None is the writer's.
            durability: of an mmap store; see ``ClientStore``. None is "round".
            undoable: as for a new server; None is the writer's, where it goes on in the folder.
            algorithm, optimizer: to be given again where they are the caller's own code; ``weights`` where the saved
                server had some.
            lr, server_lr: likewise; or others than the saved ones: then they change, as by ``change``, with a warning.
            hot_rows, on_report, limits (``max_norm``, ...): as for a new server; others than the saved limits change.

        Raises:
            DeviceError: there is no such device: another one can be given.
            StoreError: there is no store, or one of a newer version.
            LockedError: it is open for writing, in another process or this one; medium="ram" only looks.
            CorruptionError: a file was damaged.
            CheckpointError: it is a store without a server, or an argument is missing or not what was saved.
            RangeError: what is said of a ClientStore is not what it is.
        """
        given = said_again(algorithm, lr, server_lr, optimizer)
        device = None if device is None else devices.named(device)
        with saved_rows(path, medium, durability, device, hot_rows, undoable) as (rows, said, device):
            with believed(path.path or "store" if isinstance(path, ClientStore) else path):
                state = resumed_state(rows, said, given, device)
            change_on_loading(state, said["settings"], given, limits)
            server = cls.__new__(cls)
            state.settings = server._settings = with_weights(state.settings, weights)
            server._start(state, on_report, weights)
        return server

    def audit_log(self) -> list[dict[str, Any]]:
        """The documents of all rounds of a server with ``audit=True``, the first one first.

        Each has the digest of the one before, as ``previous``. Digests are BLAKE2b-256: of vectors as little-endian
        float32 in the layout's order, whatever came; of documents as their JSON text.

        Raises:
            CorruptionError: a document was changed, or is missing.
        """
        snapshot = self._state.snapshot
        return checked(self._state.store.documents(), snapshot.audited, snapshot.round_number)

    def close(self) -> None:
        """Give up a round that is open, and close the store, one that was given too: its folder can be opened again.

        ``x`` and what else is in memory can still be read. A server whose rows are in memory has nothing to close.
        """
        if (opened := self._round_lock.opened) is not None:
            opened.abort()
        self._state.close()

    def checkpoint(self) -> None:
        """Make every finished round safe, where durability="checkpoint"; elsewhere it is already. Between rounds."""
        self._between_rounds()
        self._state.store.checkpoint()

    def compact(self) -> None:
        """Give back slots that nobody needs; between rounds. See ``ClientStore.compact``."""
        self._between_rounds()
        self._state.store.compact()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def arrive(self, clients: ClientId | Iterable[ClientId], *, client_sizes: int | Sizes | None = None) -> None:
        """A client comes, or many do: all of them or, if one is refused, none. They count from the next round on.

        Args:
            clients: a new id, or many.
            client_sizes: n_k of the one client, or by id or in their order, where the others' are known, and else none;
                either where nobody is left.

        Raises:
            RoundError, RangeError: a round is open; one is registered already, or sizes are missing or not expected.
            UnknownClientError: one is no id, or sizes are for somebody else.

        Cost: one commit; on average it does not depend on how many clients there are.
        """
        self._between_rounds()
        listed, sizes = arriving(clients, client_sizes)
        if listed:
            self._state.arrive(listed, sizes)

    def resize(self, client_sizes: Mapping[ClientId, int]) -> None:
        """Let registered clients hold other numbers of examples: p^k = n_k / n is of these from the next round on.

        The objective shifts as with an arrival, and a rate eta_0 / t should restart (Ruan et al. 2021, Sec. 4.2).

        Args:
            client_sizes: n_k by id, of those that have changed.

        Raises:
            RoundError, RangeError: a round is open; the clients have no sizes, or one is no integer in 1..2^53.
            UnknownClientError: a client is not registered.

        Cost: one commit; on average it does not depend on how many clients there are.
        """
        self._between_rounds()
        if client_sizes:
            self._state.repopulate(self._state.population.with_sizes(self._state.store.registry, client_sizes))

    def depart(self, client: ClientId, *, from_objective: bool = True) -> None:
        """A client goes: its row's share leaves every running sum, and its slot is used again.

        Args:
            from_objective: whether the others' shares p^k grow (Ruan et al. 2021, Sec. 4.3: *exclude*; the rate should
                restart then), or stay as they are, without it (*include*).

        Raises:
            RoundError: a round is open.
            UnknownClientError: it is not registered.
            RangeError: the clients keep their rows, so that nobody here knows what its share is.
        """
        self._between_rounds()
        self._state.depart(client, from_objective)

    def change(self, **options: Unpack[Changes]) -> None:
        """Change rates and limits from the next round on; the report of that round has them as ``changed``.

        Call it before ``broadcast``. With another lr, late replies of the rounds before are refused.

        Args:
            options: lr, server_lr, limits, max_steps, max_steps_ratio, max_examples, max_examples_ratio, max_lr,
                max_norm, max_norm_ratio or own_rates, as for a new server.

        Raises:
            RoundError, UnknownNameError: a round is open; it is another option, which stays as it was made.
            RangeError: as for a new server; or server_lr would begin or end the averaging of models.
        """
        self._between_rounds()
        with uninterrupted():
            try:
                change(self._state, options)
            finally:
                self._settings = self._state.settings

    def warm_start(self, gradients: Mapping[ClientId, Any]) -> None:
        """Start from rows that are not zero: c_i = the client's mean gradient at x_0, over some minibatches.

        c follows as the mean of all rows, of which a client left out has one of zero, and g_0 = c for the methods that
        are variance-reduced (Cheng et al. 2024, Thms 2-4); without rows, g_0 is the mean of the gradients given. Where
        the clients keep their rows, they start from the same.

        Args:
            gradients: float32[n_parameters] by client.

        Raises:
            RoundError: a round was finished or is open, or there was a warm start already.
            RangeError: the method has nothing that could start from gradients.
            UnknownClientError, DtypeError, ShapeError, ArrayError: a client or its gradient is not what is said above.
        """
        self._between_rounds()
        self._state.warm_start({self.clients.check(client): g for client, g in gradients.items()})

    def broadcast(self, ids: Iterable[ClientId], *, newcomers: Iterable[ClientId] = ()) -> Broadcast:
        """The broadcast to those clients for the next round; their rows are read ahead from a disk while they train.

        Args:
            newcomers: those of them that are not registered, and may come with the round (``open_round``).

        Raises:
            UnknownClientError: one of them is not registered, and no newcomer.
        """
        return broadcast(self._settings, self._state, ids, newcomers)

    def open_round(self, *, newcomers: Coming = ()) -> Round:
        """Start a round; there is one at a time.

        Args:
            newcomers: clients that are not registered, and may come with the round: each is from then on if the round
                hears it, and else never was. With n_k by id, where the others' are known. Until the round is finished
                the shares p^k and the registry are with all of them.

        Raises:
            RoundError: one is open already.
            RangeError, UnknownClientError: a newcomer is registered already, or is no id, or sizes are missing or not
                expected.
        """
        return self._open(self._settings.fold, may_hold=False, newcomers=newcomers)

    def round(self, updates: Iterable[Update]) -> RoundReport:
        """A whole round from an iterable of updates, which may be made while they are read.

        Errors are those of ``Round.add`` and ``Round.finish``; the server is then as it was before.
        """
        # A list's arrays live as long as this call and change only if another thread does it: all in one pass.
        listed = list(updates) if isinstance(updates, list | tuple) else None
        plain = self._weights is None and may_be_whole(self._settings, self._state)
        if listed and plain and (report := self._whole_round(listed)) is not None:
            return report
        fold = max(self._settings.fold, len(listed or ()))
        with self._open(fold, may_hold=listed is not None) as opened:
            for some in held_together(updates, fold) if listed is None else [listed]:
                opened.add_all(some)
            return opened.finish()

    def _whole_round(self, updates: list[Update]) -> RoundReport | None:
        """The round in one call, if that is possible; None where it takes a ``Round``."""
        state, began = self._state, time.perf_counter()
        state.store.prefetch(())  # raises where the store is closed
        opened = self._round_lock.open(state.snapshot.round_number, WholeRound)
        try:
            done = whole_round(state, self._settings, updates, opened, began)
        finally:
            opened.is_open = False
        if done is None:
            return None
        report, weighing = done
        warn_if_lowered(report.round, weighing.lowered, None, LOGGER)
        state.waiting.tell(report.awaited, state.store, LOGGER)
        tell(self.on_report, report, LOGGER)
        return report

    def _between_rounds(self) -> None:
        """Refuse to go on while a round is open, and forget what one has left that was dropped."""
        self._round_lock.require_none(self.round_number)
        self._state.abandon()

    def _open(self, fold: int, *, may_hold: bool, newcomers: Coming = (), kind: type[Round] = Round) -> Round:
        self._state.store.prefetch(())  # raises where the store is closed
        make = partial(kind, self._settings, self._state, fold=fold, may_hold=may_hold, on_report=self.on_report)
        make = partial(make, weights=self._weights)
        opened = self._round_lock.open(self.round_number, make)
        opened.begin(newcomers)
        return opened
