"""The server: what it sends to clients, and the rounds that change it."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Algorithm, named
from fedcore.algorithms.optimizers import Optimizer
from fedcore.algorithms.rates import REGISTRY as NAMED_RATES
from fedcore.algorithms.rates import Rate
from fedcore.arguments import absolute, whole
from fedcore.arrays import CPU, F32, Library, copied, device_named, empty, freeze, to_host, zeros
from fedcore.errors import ArrayError, CheckpointError, RangeError, RoundError, ShapeError, StoreError, UnknownNameError
from fedcore.interrupts import uninterrupted
from fedcore.model import Layout
from fedcore.options import (
    RATES,
    Callback,
    Changes,
    Compute,
    Limits,
    Settings,
    Storage,
    describe,
    given_again,
    is_same_rate,
)
from fedcore.pickling import Unpicklable
from fedcore.profiling import begin, span
from fedcore.representation import Represented
from fedcore.rules import Chain, Rule
from fedcore.server.aggregation import Counters, Reducer
from fedcore.server.broadcast import Broadcast, asked_of, broadcast_of
from fedcore.server.folder import believed, require_plausible, server_state
from fedcore.server.partial import PartialSum, require_partial_sums
from fedcore.server.report import Report, tell, warn_if_lowered
from fedcore.server.round import LOGGER, LocalRound, Round, RoundLock, WholeRound, whole_round
from fedcore.server.state import NewClients, State
from fedcore.server.step import Population, Sizes, Snapshot, moved, vectors_of
from fedcore.server.update import Update, as_vector, first_not_finite, held_together, in_float32
from fedcore.server.validation import never_negative
from fedcore.store import ClientStore
from fedcore.store.commits import require_files
from fedcore.store.device_store import DeviceRows
from fedcore.store.files.folder import remove
from fedcore.store.inspect import state_of
from fedcore.store.reader import Clients, ReadRows
from fedcore.store.registry import ClientId

Aggregation: TypeAlias = str | Sequence[Rule | str] | Chain | None


MANIFEST = "cluster.json"


def shards() -> Any:
    """The module of servers in shards, which is imported only where there are some."""
    return import_module("fedcore.cluster.backend")


def manifest_in(path: str | os.PathLike[str]) -> Path | None:
    """The manifest of a server in shards, if the path is one, or a folder that has one."""
    place = absolute(path)
    file = place / MANIFEST if place.is_dir() else place
    return file if file.name == MANIFEST and os.path.lexists(file) else None  # a pipe is rejected when it is read


class Server(Represented, Unpicklable):
    """A federated server: a model x, an algorithm, and one row of state per client where the algorithm keeps one.

    Args:
        model: x_0, float32[n], or anything ``Layout.of`` takes, such as an ``nn.Module``; it is copied.
        algorithm: one of ``fedcore.algorithms``, or its name.
        clients: their number N (ids 0..N - 1), their ids (int in 0..2**64 - 1, or str), or a mapping from id to n_k,
            the client's number of examples, for methods that weigh by p^k = n_k / n. A client that reports more than
            n_k, or no number, counts with n_k. Clients may also come later (``add_clients``, ``open_round``).
        lr: eta, the rate of the clients' local steps: a number, or a function of the round.
        server_lr: gamma: a number, or a function of the round. Default: the clients' models are averaged (FedAvg), or
            gamma is the cohort's mean of eta_i K_i (methods in gradient units; in a round without clients the last
            gamma). With an adaptive optimizer: its ``eta``.
        optimizer: one of ``fedcore.algorithms.optimizers``, which turns the method's direction into the step.
        aggregation: the rules that updates pass before they are summed (``fedcore.rules``): a list such as
            ``[CapExamples(2), ClipToMedian(), Mean()]``, or "open", for a federation that strangers can join.
            Default: "mean", in which every valid update counts.
        limits: what rejects a single update, whatever the others are.
        storage: where rows are stored: a ``Storage``, the path of a new folder (``Server.load`` resumes it), or a
            ``ClientStore`` with rows of ``n_parameters`` elements. Default: in memory.
        compute: the device, the precision of sums, the number of shards.
        max_staleness: the rounds between the model that a client was sent and the round in which its update may still
            count, measured against the model that it started from.
        callbacks: functions that are called with the ``Report`` of each finished round, in the thread that finished it.
            An exception is logged; the round stays. Callbacks may read the server; they are not saved.

    Attributes:
        callbacks: as given; others may be set between rounds.

    Raises:
        UnknownNameError, RangeError, UnknownClientError, ShapeError, DtypeError, ArrayError: an argument is wrong.
        DeviceError: there is no such device, or no driver.
        AlgorithmError: the coefficients of a custom method contradict each other.

    A server with a folder holds it until it is closed: ``close()``, or ``with Server(...) as server:``.

    Cost: 20 n bytes (44 n where the method keeps a total; 52 n and 108 n where sums are exact), and 4 n for each row
        (MimiC: and for each of its ``history`` directions). With a rule that needs medians, copies of up to 7 updates
        until 8 were accepted.

    >>> import numpy as np
    >>> server = Server(np.zeros(2, np.float32), "FedAvg", clients=2, lr=0.1)
    >>> with server.open_round() as round:
    ...     _ = round.add(0, np.float32([1, 2]), steps=5, examples=30)
    ...     _ = round.add(1, np.float32([3, 6]), steps=5, examples=10)
    >>> server.x
    array([1.5, 3. ], dtype=float32)
    """

    _instead = "write it by save(path), and read it by Server.load(path); clients are sent broadcast.of(client)"

    def __init__(
        self,
        model: Any,
        algorithm: Algorithm | str = "FedAvg",
        clients: int | Iterable[ClientId] | Mapping[ClientId, int] | None = None,
        *,
        lr: float | Rate,
        server_lr: float | Rate | None = None,
        optimizer: Optimizer | None = None,
        aggregation: Aggregation = None,
        limits: Limits = Limits(),  # noqa: B008  # a frozen value
        storage: Storage | str | os.PathLike[str] | ClientStore | None = None,
        compute: Compute = Compute(),  # noqa: B008
        max_staleness: int = 0,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        layout = Layout.of(model)
        given = storage if isinstance(storage, ClientStore) else None
        place = Storage() if isinstance(storage, ClientStore) else Storage.of(storage)
        ids, sizes = ids_of(clients) if isinstance(clients, Iterable) else (clients, None)
        settings = first_settings(
            algorithm,
            layout,
            lr=lr,
            server_lr=server_lr,
            optimizer=optimizer,
            aggregation=aggregation,
            limits=limits,
            compute=compute,
            max_staleness=max_staleness,
            audit=place.audit,
        )
        if compute.is_sharded:
            self._start(shards().new_backend(model, settings, ids, sizes, place, compute, given), callbacks)
            return
        x = layout.flatten(model, empty(layout.n, device=settings.device))
        require_finite(x, layout)
        freeze(x)
        settings = replace(settings, nonnegative=never_negative(layout, to_host(x), limits.signed_buffers))
        ids = None if given is not None and sizes is not None else ids
        with new_rows(given, place, ids, layout.n_parameters, settings.device) as rows:
            require_clients(rows, ids)
            self._start(first_state(settings, x, layout.read_counters(model), sizes, rows), callbacks)

    def _start(self, backend: Any, callbacks: Sequence[Callback]) -> None:
        self._backend: State = backend  # or a ShardedBackend, which has the same methods
        self.callbacks = tuple(callbacks)
        self._round_lock = RoundLock()

    @property
    def _settings(self) -> Settings:
        return self._backend.settings

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm."""
        return self._settings.algorithm

    @property
    def layout(self) -> Layout:
        """The places of the model's tensors in x."""
        return self._settings.layout

    @property
    def limits(self) -> Limits:
        """The limits of a single update."""
        return self._settings.limits

    @property
    def aggregation(self) -> tuple[Rule, ...]:
        """The chain of rules."""
        return self._settings.rules.rules

    @property
    def averages_models(self) -> bool:
        """Whether the step is the plain average of the clients' models."""
        return self._settings.averages_models

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | ClientStore,
        *,
        algorithm: Algorithm | None = None,
        lr: float | Rate | None = None,
        server_lr: float | Rate | None = None,
        optimizer: Optimizer | None = None,
        aggregation: Aggregation = None,
        limits: Limits | None = None,
        storage: Storage | None = None,
        compute: Compute | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> "Server":
        """Load the server of a folder as its last finished round left it; its rounds go on as if nothing had happened.

        Args:
            path: the folder of a server or a copy that ``save`` wrote; of a server in shards also its manifest; or a
                ``ClientStore`` that was opened from one, which the server then closes.
            algorithm, optimizer: to be given again where they are the caller's own code.
            lr, server_lr: likewise. Another rate than the saved one changes it, as ``change`` does, with a warning.
            aggregation, limits: other ones than the saved change them likewise. A ``Mean`` with weights must be given
                again.
            storage: how the rows are opened: ``Storage(medium="mmap")`` goes on in the folder, "ram" and "cuda" leave
                it as it is. Default: as saved, with "ram" in place of "cuda" if the device is a CPU.
            compute: where the server goes on, with the same bits. Default: as saved.
            callbacks: as for a new server.

        Raises:
            DeviceError: there is no such device; give another one.
            StoreError: there is no store, or one of a newer version.
            LockedError: another server writes to the folder; ``Storage(medium="ram")`` only reads it.
            CorruptionError: a file is damaged.
            CheckpointError: the store has no server, or an argument is missing or contradicts what was saved.
            RangeError: an argument does not fit the given ClientStore.
        """
        given = given_again(algorithm, lr, server_lr, optimizer)
        server = cls.__new__(cls)
        storage, compute = storage or Storage(), compute or Compute()
        if not isinstance(path, ClientStore) and (manifest := manifest_in(path)) is not None:
            backend, saved = shards().saved_backend(manifest, given, storage, compute)
            server._start(backend, callbacks)
            try:
                change_on_loading(backend, manifest, saved, given, aggregation, limits)
                shards().require_without_weights(backend.settings)
            except BaseException:
                server.close()
                raise
            return server
        if compute.is_sharded or storage.folders is not None:
            raise StoreError(f"{path}: no {MANIFEST} of a server in shards is there; fedcore.cluster.reshard makes one")
        with saved_rows(path, storage, compute) as (rows, saved, device):
            with believed(path.path or "store" if isinstance(path, ClientStore) else path):
                state = resumed_state(rows, saved, given, replace(compute, device=device))
            server._start(state, callbacks)
            change_on_loading(state, rows.path, saved["settings"], given, aggregation, limits)
        return server

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a copy of everything: the model, the sums, the rows, the counters and the options.

        A server with a folder needs it only for copies: its folder has every finished round.

        Args:
            path: a new or empty folder, or an older copy, which stays until the new one is complete. A folder in which
                a server went on is no copy any more.

        Raises:
            RoundError: a round is open.
            StoreError: the folder is something else, or the disk is full.

        Cost: reads and writes every row once.
        """
        self._between_rounds()
        with span("save"):
            self._backend.save(path)

    def audit_log(self) -> list[dict[str, Any]]:
        """Return the documents of all rounds of a server with ``Storage(audit=True)``, the first one first.

        Each has the digest of the one before, as ``previous``. Digests are BLAKE2b-256: of vectors as little-endian
        float32 in the layout's order; of documents as their JSON text.

        Raises:
            CorruptionError: a document was changed, or is missing.
        """
        return self._backend.audit_log()

    def close(self) -> None:
        """Abort an open round, and close the store or the shards.

        ``x`` and what else is in memory can still be read. A server whose rows are in memory has nothing to close.
        """
        if (opened := self._round_lock.opened) is not None:
            opened.abort()
        self._backend.close()

    def checkpoint(self) -> None:
        """Make every finished round safe, with durability="checkpoint"; otherwise it is already. Between rounds."""
        self._between_rounds()
        self._backend.checkpoint()

    def compact(self) -> None:
        """Free the slots that are not used; between rounds. See ``ClientStore.compact``."""
        self._between_rounds()
        self._backend.compact()

    def verify(self) -> list[str]:
        """Read every row and vector; return a line for each that is damaged."""
        return self._backend.verify()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def device(self) -> str:
        """The device of the model and the sums, such as "cpu" or "cuda:0"."""
        return self._settings.device

    @property
    def clients(self) -> Clients:
        """The registered clients: ``client in``, ``len``, and their ids in the order of their numbers."""
        if self._round_lock.opened is None:
            self._backend.forget_newcomers()  # of a round that was dropped
        return Clients(self._backend.registry)

    @property
    def store(self) -> ReadRows:
        """The clients' rows, to be read: only rounds and changes of clients write them.

        Raises:
            RangeError: the server is in shards; ``row`` reads a row.
        """
        if self._round_lock.opened is None:
            self._backend.forget_newcomers()
        return self._backend.rows()

    @property
    def client_sizes(self) -> npt.NDArray[np.int64] | None:
        """n_k of the registered clients, int64[N], the smallest first; None where they have no sizes."""
        return self._backend.client_sizes()

    @property
    def x(self) -> F32:
        """The model, float32[n]: a read-only view that never changes; a round makes a new one.

        On a device it is a ``DeviceArray``, of which torch and CuPy make tensors by DLPack without a copy. In a server
        with shards it is gathered each time.
        """
        x: F32 = self._backend.vector("x")
        return x

    @property
    def v(self) -> F32:
        """The direction of the last round that had one, float32[n_parameters]: a copy. The papers call it g.

        Zero before the first round, and after ``load`` until the next where the method does not use it.
        """
        v: F32 = self._backend.vector("v")
        return v

    @property
    def round_number(self) -> int:
        """The number of finished rounds, which is the number of the next."""
        return self._backend.round_number

    @property
    def transactions(self) -> int:
        """The number of rounds, changes of clients and options, and warm starts.

        Servers that hold parts of one model compare it; see ``fedcore.server.folder.Transactions``.
        """
        return self._backend.transactions

    def _facts(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "round_number": self.round_number,
            "n": self.layout.n,
            "clients": len(self._backend.registry),
            "lr": self._settings.lr,
            "server_lr": self._settings.server_lr,
            "optimizer": self._settings.optimizer,
            **self._backend.facts(),
        }

    def _in_files(self) -> bool:
        return self._backend.holds_files

    def tensors(self, *, library: Library | None = None, copy: bool = True, sent: bool = False) -> Any:
        """The model by name, as it came: in its library and its dtypes, counters in their own integer types.

        Args:
            library: "numpy" or "torch". Default: that of ``model``. NumPy's tensors have float32 for bfloat16, unless
                ml_dtypes is imported.
            copy: False gives NumPy's parameters and buffers in float32 as read-only views of ``x``.
            sent: the model that clients start from, which is ahead of ``x`` in methods that look ahead.

        Raises:
            UnknownNameError, MissingDependencyError: there is no such library, or it is not installed.
        """
        x = self._backend.vector("next" if sent else "x")
        return self.layout.tensors(x, self._backend.counters(), library, copy=copy)

    def load_into(self, model: Any) -> None:
        """Copy x and the counters into a model, in place.

        Args:
            model: an ``nn.Module``, on any device, or a mapping or sequence of tensors, with the server's names and
                shapes. Its floats may be of other dtypes.

        Raises:
            ArrayError, ShapeError, DtypeError: the model does not fit, and is unchanged; or a tensor is read-only.
        """
        self.layout.load_into(model, self.x, self._backend.counters())

    def row(self, client: ClientId) -> F32:
        """A client's row, float32[n_parameters]; zeros where it was never written.

        Raises:
            UnknownClientError: the client is not registered.
        """
        return self._backend.row(self._backend.registry.check(client))

    def correction(self, client: ClientId) -> npt.NDArray[np.float64]:
        """c_i, float64[n_parameters]: what MimiC adds to the client's next mean gradient; zero elsewhere."""
        if not self.algorithm.keeps_history:
            return zeros(self.layout.n_parameters, np.float64, device=self.device)
        return self._backend.correction(self._backend.registry.check(client))

    def total(self) -> npt.NDArray[np.float64] | None:
        """T, float64[n_parameters]; None where the method keeps no total."""
        return self._backend.total() if self.algorithm.keeps_total else None

    def add_clients(self, clients: ClientId | Iterable[ClientId] | Mapping[ClientId, int]) -> None:
        """Register clients: all of them or, if one is rejected, none. They count from the next round on.

        Args:
            clients: a new id or several; or a mapping from id to n_k, where the other clients have sizes.

        Raises:
            RoundError: a round is open.
            RangeError: one is registered already, or sizes are missing or not expected.
            UnknownClientError: one is no id.

        Cost: one commit; on average it does not depend on the number of clients.
        """
        self._between_rounds()
        ids, sizes = ids_of(clients)
        if ids:
            self._backend.add_clients(ids, sizes)

    def update_clients(self, sizes: Mapping[ClientId, int]) -> None:
        """Change registered clients' numbers of examples: p^k = n_k / n follows them from the next round on.

        The objective shifts as when a client is added; a rate eta_0 / t should restart (Ruan et al. 2021, Sec. 4.2).

        Args:
            sizes: n_k by id, of those that have changed.

        Raises:
            RoundError: a round is open.
            RangeError: the clients have no sizes, or one is no integer in 1..2^53.
            UnknownClientError: a client is not registered.

        Cost: one commit; on average it does not depend on the number of clients.
        """
        self._between_rounds()
        if sizes:
            self._backend.update_clients(dict(sizes))

    def remove_client(self, client: ClientId, *, from_objective: bool = True) -> None:
        """Remove a client: its row is subtracted from every running sum, and its slot is freed.

        Args:
            from_objective: whether the others' shares p^k grow (Ruan et al. 2021, Sec. 4.3: *exclude*; the rate should
                restart then), or stay as they are (*include*).

        Raises:
            RoundError: a round is open.
            UnknownClientError: it is not registered.
            RangeError: clients keep their rows, so that the server cannot subtract them.
        """
        self._between_rounds()
        self._backend.remove_client(client, from_objective)

    def change(self, **options: Unpack[Changes]) -> None:
        """Change rates, limits or rules from the next round on; the report of that round has them as ``changed``.

        Call it before ``broadcast``. With another lr, late updates of the rounds before are rejected.

        Args:
            options: lr, server_lr, limits or aggregation, as for a new server; of a server in shards rates are numbers
                or of ``fedcore.algorithms.rates``.

        Raises:
            RoundError: a round is open.
            UnknownNameError: the option cannot be changed.
            RangeError: as for a new server; or server_lr would begin or end the averaging of models.
        """
        self._between_rounds()
        with uninterrupted():
            self._backend.change(options)

    def warm_start(self, gradients: Mapping[ClientId, Any]) -> None:
        """Start from rows that are not zero: c_i = the client's mean gradient at x_0, over some minibatches.

        c is the mean of all rows; a client that is left out has a row of zero. g_0 = c for variance-reduced methods
        (Cheng et al. 2024, Thms 2-4); without rows, g_0 is the mean of the given gradients. Where clients keep their
        rows, they start from the same.

        Args:
            gradients: float32[n_parameters] by client; in a server in shards also ``Slices``.

        Raises:
            RoundError: a round was finished or is open, or there was a warm start already.
            RangeError: the method cannot start from gradients.
            UnknownClientError, DtypeError, ShapeError, ArrayError: a client or its gradient is wrong.
        """
        self._between_rounds()
        self._backend.warm_start({self._backend.registry.check(client): g for client, g in gradients.items()})

    def broadcast(self, ids: Iterable[ClientId], *, newcomers: Iterable[ClientId] = ()) -> Broadcast:
        """The broadcast to some clients for the next round. Their rows are read ahead from a disk while they train.

        Args:
            newcomers: those of them that are not registered, and may join with the round (``open_round``).

        Raises:
            UnknownClientError: one of them is neither registered nor a newcomer.
        """
        with span("broadcast", self._backend):
            asked, new = asked_of(self._backend.registry, ids, newcomers)
            vectors = self._backend.sent_vectors(asked, new)
            return broadcast_of(self._settings, self.round_number, asked, vectors)

    def open_round(self, *, newcomers: NewClients = ()) -> Round:
        """Open a round; one at a time.

        Args:
            newcomers: clients that are not registered, and may join with the round: each is registered if an update of
                it is accepted. A mapping from id to n_k, where the others have sizes. Until the round is finished the
                shares p^k and the registry include all of them.

        Raises:
            RoundError: a round is open already.
            RangeError, UnknownClientError: a newcomer is registered already, or is no id, or sizes are missing or not
                expected.
        """
        return self._open(self._settings.batch_size, may_hold=False, newcomers=newcomers)

    def round(self, updates: Iterable[Update]) -> Report:
        """Run a round from an iterable of updates, which may be produced while they are read.

        Errors are those of ``Round.add`` and ``Round.finish``; the server is then as it was before.
        """
        # A list's arrays live as long as this call and change only if another thread does it: all in one pass.
        listed = list(updates) if isinstance(updates, list | tuple) else None
        if listed and self._backend.may_be_whole() and (report := self._whole_round(listed)) is not None:
            return report
        batch_size = max(self._settings.batch_size, len(listed or ()))
        opening = partial(self._open, batch_size, may_hold=listed is not None)
        with span("round", self._backend), opening() as opened:
            for some in held_together(updates, batch_size) if listed is None else [listed]:
                opened.add_batch(some)
            return opened.finish()

    def _whole_round(self, updates: list[Update]) -> Report | None:
        """The round in one native call, if that is possible; None where it takes a ``Round``."""
        state, began, done = self._backend, time.perf_counter(), None
        state.require_open_store()
        opened = self._round_lock.open(state.round_number, WholeRound)
        running = begin("round", state)
        try:
            done = whole_round(state, updates, opened, began)
        finally:
            opened.is_open = False
            if running:
                running.end((), counts=done is not None)
        if done is None:
            return None
        report, weighing = done
        warn_if_lowered(report.round, weighing.lowered, None, LOGGER)
        state.waiting.log(report.waiting_for, state.store, LOGGER)
        tell(self.callbacks, report, LOGGER)
        return report

    def _between_rounds(self) -> None:
        """Reject a call while a round is open, and discard what a dropped round left."""
        self._round_lock.require_none(self.round_number)
        self._backend.abandon()

    def _open(
        self, batch_size: int, *, may_hold: bool, newcomers: NewClients = (), kind: type[LocalRound] = LocalRound
    ) -> Round:
        self._backend.require_open_store()
        make = partial(self._backend.new_round, kind, batch_size, may_hold=may_hold, callbacks=self.callbacks)
        opened: Round = self._round_lock.open(self.round_number, make)
        opened.begin(newcomers)
        return opened


class EdgeRound(LocalRound):
    """An open round of an edge; it ends with ``partial_sum``, for the step is the upper server's."""

    def finish(self) -> Report:
        """Abort the round.

        Raises:
            RoundError: always.
        """
        self.abort()
        raise RoundError("round: an edge takes no step; call partial_sum() before the round ends")


class EdgeAggregator:
    """A server between clients and the server: one level of a hierarchy.

    In each round it is given the model that the upper server broadcast, accepts its clients' updates as a ``Server``
    does, and makes one ``PartialSum`` of them: 16 n bytes in place of 4 n a client. The upper server, one with
    ``Compute(accumulator="exact")``, adds it by ``Round.add_partial_sum``, and has the bits of a server that every
    client sends to. Updates are validated here, where they are whole: above, a sum is checked against the norms and
    claims that the edge reports. An edge without accepted updates sends zeros, and its rejections.

    Args:
        model: a model of the upper server's layout; its values do not matter.
        algorithm: the upper server's method; one that only adds h, as FedAvg, FedProx and FedAvgM do.
        clients: the ids of the edge's own clients, which are registered at the upper server too.
        lr, server_lr: the upper server's: they set the units of updates.
        limits, aggregation: as for ``Server``.
        population: the most clients that the upper server will have, if those are more than 2,048: the more there are,
            the shorter an update must be for an exact sum of them all.

    Raises:
        RangeError: the method does more than to add h, or the layout has integer counters.
        FedcoreError: as for ``Server``.

    Cost: 52 n bytes.

    >>> import numpy as np
    >>> from fedcore import Compute, Server
    >>> zeros = np.zeros(2, np.float32)
    >>> server = Server(zeros, "FedAvg", clients=4, lr=0.1, compute=Compute(accumulator="exact"))
    >>> edges = [EdgeAggregator(zeros, "FedAvg", ids, lr=0.1) for ids in ([0, 1], [2, 3])]
    >>> with server.open_round() as round:
    ...     for edge in edges:
    ...         with edge.open_round(server.x, round=server.round_number) as own:
    ...             for client in edge.clients:
    ...                 _ = own.add(client, np.float32([client, 1]), steps=5)
    ...             round.add_partial_sum(own.partial_sum().to_bytes(), "edge", clients=edge.clients)
    >>> server.x
    array([1.5, 1. ], dtype=float32)
    """

    def __init__(
        self,
        model: Any,
        algorithm: Algorithm | str,
        clients: Iterable[ClientId],
        *,
        lr: float | Rate,
        server_lr: float | Rate | None = None,
        limits: Limits = Limits(),  # noqa: B008
        aggregation: Aggregation = None,
        population: int = 0,
    ) -> None:
        population = whole("population", population, 0, 2**53)
        self._server = Server(
            model,
            algorithm,
            list(clients),
            lr=lr,
            server_lr=server_lr,
            limits=limits,
            aggregation=aggregation,
            compute=Compute(accumulator="exact"),
        )
        require_partial_sums(self._server._settings)
        self._state: State = self._server._backend
        self._state.upper_population = population

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The edge's own clients."""
        return tuple(self._server.clients)

    def open_round(self, x: Any, *, round: int) -> Round:
        """Open a round on what the upper server broadcast; it ends with ``Round.partial_sum``.

        Args:
            x: the model as it was sent: float32[n], its bytes, or a model that the layout fits; it is copied.
            round: the round's number.

        Raises:
            RoundError: a round is open.
            FedcoreError: x does not fit the layout, or is not finite.

        Cost: reads and writes 4 n bytes.
        """
        number, server = whole("round", round, 0, 2**53), self._server
        server._between_rounds()
        flat, n = as_vector("x", x, server.layout.n), server.layout.n
        vector = server.layout.flatten(x, empty(n)) if flat is None else copied(in_float32(flat))
        if not kernels.all_finite([vector])[0]:
            raise ArrayError("x: a number is NaN or infinite")
        freeze(vector)
        self._state.snapshot = self._state.snapshot._replace(x=vector, x_prev=vector, round_number=number)
        return server._open(server._settings.batch_size, may_hold=False, kind=EdgeRound)

    def fold(self, x: Any, updates: Iterable[Update], *, round: int) -> PartialSum:
        """Run a round in one call and return the partial sum of some updates; arguments are those of ``open_round``."""
        with self.open_round(x, round=round) as opened:
            for update in updates:
                opened.add_batch([update])
            return opened.partial_sum()


def ids_of(clients: Any) -> tuple[list[ClientId], Sizes | None]:
    """The ids of clients that are added, not checked yet, and n_k by id, where they are given."""
    if isinstance(clients, str | bytes) or not isinstance(clients, Iterable):
        return [clients], None  # type: ignore[list-item]  # the registry checks ids
    return list(clients), dict(clients) if isinstance(clients, Mapping) else None


def first_settings(algorithm: Algorithm | str, layout: Layout, **options: Any) -> Settings:
    """The settings of a new server; arguments and errors are those of ``Server``."""
    method = named(algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(method, Algorithm):
        raise UnknownNameError(f"algorithm={algorithm!r}: give an Algorithm, or the name of one")
    if layout.n_parameters < 1:
        raise ShapeError("model: it has no parameters")
    return Settings.of(method, layout, **options)


def first_state(
    settings: Settings,
    x: F32,
    counters: Counters,
    sizes: Sizes | None,
    rows: ClientStore,
    reducer: Reducer | None = None,
) -> State:
    """The state of a new server over its empty rows, and in their folder, if they have one.

    Args:
        x: float32[n] on the server's device; read-only from now on.
        reducer: the reducer of a shard; None for a server that has no shards.

    Raises:
        RangeError, UnknownClientError, StoreError: as ``Server``.
    """
    algorithm, registry = settings.algorithm, rows.registry
    population = Population.of(sizes, registry, needed=algorithm.needs_shares)
    snapshot = Snapshot.first(
        *(x, counters, settings.layout.n_parameters, algorithm, settings.optimizer, population, settings.device),
        exact=settings.is_exact,
    )
    state = State(settings, snapshot, rows, reducer)
    if rows.medium == "mmap":
        state.keep(snapshot, 0)  # a run that is killed in its first round can be resumed too
    return state


def resumed_state(
    rows: ClientStore,
    saved: Mapping[str, Any],
    given: Mapping[str, Any],
    compute: Compute | None = None,
    reducer: Reducer | None = None,
) -> State:
    """The state of a server as its folder has it.

    Args:
        saved: the folder's own state, which is a server's.
        given: what the caller passes again; see ``given_again``.

    Raises:
        ValueError, LookupError, TypeError: no server has written that; see ``believed``.
        CheckpointError: as ``Settings.from_state``.
    """
    settings, vectors = Settings.from_state(saved["settings"], given, compute), vectors_of(rows)
    if "nonnegative" not in saved["settings"]:  # a folder from before buffers were checked
        kept = never_negative(settings.layout, to_host(vectors["x"]), settings.limits.signed_buffers)
        settings = replace(settings, nonnegative=kept)
    require_plausible(settings, saved, vectors, rows)
    vectors = moved(vectors, settings.device)
    snapshot = Snapshot.of(vectors, saved["numbers"], settings.layout.n_parameters, rows.registry, settings.device)
    return State(settings, snapshot, rows, reducer)


def require_clients(rows: ClientStore, clients: object) -> None:
    """Reject a count of no clients.

    Raises:
        RangeError: it is.
    """
    if len(rows.registry) == 0 and isinstance(clients, int):
        raise RangeError("clients=0: give at least one client, or none and add them later: clients=[]")


def require_finite(x: F32, layout: Layout) -> None:
    """Reject a first model, or a slice of one, that has a NaN or an infinity.

    Raises:
        ArrayError: it has; the message names the tensor.
    """
    if not kernels.all_finite([x])[0]:
        raise ArrayError(f"model, {first_not_finite(x, layout)}: a number is NaN or infinite; make a mask a buffer")


def change_on_loading(
    backend: Any,
    where: object,
    saved: Mapping[str, Any],
    given: Mapping[str, Any],
    aggregation: Aggregation,
    limits: Limits | None,
) -> None:
    """Change the options that ``Server.load`` is given and that differ from the saved ones, with a warning.

    Args:
        backend: of the loaded server.
        saved: the settings as the folder has them.

    Raises:
        CheckpointError: the server was saved with weights, and none are given.
        UnknownNameError, RangeError: as ``Server.change``.
    """
    settings: Settings = backend.settings
    chain = settings.rules if aggregation is None else Chain.of(aggregation)
    if saved.get("own_weights") is True and chain.weights is None:
        raise CheckpointError("aggregation: the server was saved with weights; pass them again: [..., Mean(weights)]")
    if chain.weights is not None:
        backend.settings = settings = settings.changed({"aggregation": settings.rules.with_weights(chain.weights)})
    next_rates = saved.get("next_rates", {})
    round = next_rates.get("round", 0)
    options: dict[str, Any] = {
        name: given[name]
        for name in RATES
        if given[name] is not None and not is_same_rate(name, saved[name], given[name], next_rates.get(name), round)
    }
    if chain != settings.rules:
        options["aggregation"] = chain
    if limits is not None and (
        not isinstance(limits, Limits)
        or replace(limits, signed_buffers=settings.limits.signed_buffers) != settings.limits
    ):
        options["limits"] = limits
    if options:
        backend.change(options)
        listed = ", ".join(f"{name}={value!r}" for name, value in backend.settings.shown(options).items())
        LOGGER.warning("%s: loading changed these options of the saved server: %s", where or "server", listed)


def require_named_rates(changed: Settings, options: Iterable[str]) -> None:
    """Reject a change of a rate to the caller's own code, which shards cannot load after a crash.

    Raises:
        RangeError: it is.
    """
    for name in set(RATES).intersection(options):
        rate = getattr(changed, name)
        described = describe(name, rate)
        if described is not None and described["name"] not in NAMED_RATES.own:
            raise RangeError(f"{name}={rate!r}: of a server in shards a rate is a number, or one of fedcore's")


@contextmanager
def new_rows(
    given: ClientStore | None, storage: Storage, clients: int | Iterable[ClientId] | None, n: int, device: str = CPU
) -> Iterator[ClientStore]:
    """Rows of n elements for a new server, on its device; if the block fails, what was made here is deleted.

    Raises:
        RangeError, ShapeError, UnknownNameError: an argument is not what ``Server`` documents.
        StoreError: the folder cannot be made.
    """
    if given is not None:
        if clients is not None:
            raise RangeError("clients: a ClientStore has its own clients; leave clients= out, or map their ids to n_k")
        if len(given) > 0:
            raise RangeError(f"storage: the ClientStore has {len(given)} rows, whose sum is unknown; use Server.load")
        if given.n != n:
            raise ShapeError(f"storage: the ClientStore has rows of {given.n} elements, and the model {n} parameters")
        yield on_device(given, device, storage.cached_rows)
        return
    if storage.folders is not None:
        raise RangeError("folders: only a server in shards has several; give Compute(shards=...), or leave them out")
    medium = storage.medium or ("ram" if storage.path is None else "mmap")
    if medium == "cuda" and device == CPU:
        raise RangeError('medium="cuda": the server computes on the CPU; give Compute(device="cuda")')
    if storage.keep_previous and medium != "mmap":
        raise RangeError("keep_previous=True: only a folder keeps what was before; give Storage(path=...)")
    if clients is None:
        raise RangeError("clients: give their number or their ids")
    made = ClientStore(
        *(clients, n),
        medium=device if medium == "cuda" else medium,
        codec=storage.codec,  # type: ignore[arg-type]  # the store checks the name
        path=storage.path,
        durability=storage.durability,
        undoable=bool(storage.keep_previous),
    )
    try:
        yield on_device(made, device, storage.cached_rows)
    except BaseException:
        made.close()
        if storage.path is not None:
            remove(Path(storage.path))
        raise


def on_device(store: ClientStore, device: str, cached_rows: int | None) -> ClientStore:
    """A store as a server on that device uses it: itself, or one that copies rows there and back.

    Raises:
        RangeError: its rows lie on another device; or ``cached_rows`` has no use.
    """
    if store.device not in (CPU, device):
        raise RangeError(
            f"storage: the rows of the store lie on {store.device}, and the server on {device}; give "
            f"Compute(device={store.device!r})"
        )
    if store.device == device:
        if cached_rows is not None:
            raise RangeError(f"cached_rows={cached_rows!r}: all rows lie on {device} already; leave it out")
        return store
    return DeviceRows(store, device, cached_rows)


@contextmanager
def saved_rows(
    path: str | os.PathLike[str] | ClientStore, storage: Storage, compute: Compute
) -> Iterator[tuple[ClientStore, dict[str, Any], str]]:
    """The rows and the state of a server, both of one commit, and its device.

    If the block fails, the store is closed, unless it was given.

    Raises:
        StoreError, LockedError, CorruptionError: as ``ClientStore.open``.
        CheckpointError: it is a store without a server.
        RangeError: an option contradicts a store that was given.
    """
    device = compute.device
    if isinstance(path, ClientStore):
        rows, where = _given(path, storage), path.path or "store"
    else:
        where = absolute(path)
        rows, device = _opened(where, storage, device)
    try:
        with believed(where):
            state = server_state(where, rows.state)
            device = _device_of(state) if device is None else device
        yield on_device(rows, device, storage.cached_rows), state, device
    except BaseException:
        if rows is not path:
            rows.close()
        raise


def _given(rows: ClientStore, storage: Storage) -> ClientStore:
    """The store that was given.

    Raises:
        RangeError: it is read-only, or an option contradicts it.
    """
    if rows.readonly:
        raise RangeError("path: the ClientStore is read-only; open it for writing")
    for name, here, asked in (
        ("medium", rows.medium, storage.medium),
        ("durability", rows.durability, None if storage.durability == "round" else storage.durability),
        ("keep_previous", rows.undoable, storage.keep_previous),
    ):
        if asked not in (None, here):
            raise RangeError(f"{name}={asked!r}: the ClientStore was opened with {here!r}")
    return rows


def _opened(path: Path, storage: Storage, device: str | None) -> tuple[ClientStore, str | None]:
    """The store of a folder, and the device as far as it is known."""
    medium, keep_previous = storage.medium, storage.keep_previous
    with believed(path):
        if medium is None or (medium == "cuda" and device is None) or (medium == "mmap" and keep_previous is None):
            before = server_state(path, state_of(path))
            device = _device_of(before) if device is None else device
            if medium is None:
                medium = "ram" if before["medium"] == "cuda" and device == CPU else before["medium"]
            if keep_previous is None and medium == "mmap":
                keep_previous = before.get("undoable") is True
    if medium == "cuda" and device == CPU:
        raise RangeError('medium="cuda": the server computes on the CPU; give Compute(device="cuda")')
    require_files(bool(keep_previous), medium or "mmap", readonly=False)
    with believed(path):
        on = device if medium == "cuda" and device is not None else medium
        rows = ClientStore.open(path, medium=on or "mmap", durability=storage.durability, undoable=bool(keep_previous))
    return rows, device


def _device_of(state: dict[str, Any]) -> str:
    """The device of the server that wrote a state; the first folders have none, for there was only one."""
    return device_named(state.get("device", CPU))
