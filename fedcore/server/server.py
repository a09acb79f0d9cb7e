"""The server: its model, its clients, its broadcasts and its rounds."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Algorithm, named
from fedcore.algorithms.optimizers import Optimizer
from fedcore.algorithms.rates import Rate
from fedcore.arrays import F32, Library, copied, empty, freeze, to_host, zeros
from fedcore.errors import ArrayError, FedcoreError, RangeError, RoundError, ShapeError, UnknownNameError
from fedcore.model import Layout, Model, Safetensors
from fedcore.model.files import write_flat
from fedcore.options import (
    Callback,
    Changes,
    Compute,
    Limits,
    Openings,
    RoundPolicy,
    ServerOptions,
    Settings,
    Storage,
    as_compute,
    checked_objects,
)
from fedcore.profiling import span
from fedcore.rules import Rule
from fedcore.rules.private import SEEDED, Ledger
from fedcore.runtime import Unpicklable, uninterrupted
from fedcore.server import requests
from fedcore.server.aggregation import Counters
from fedcore.server.broadcast import Broadcast, addressed_clients, broadcast_of
from fedcore.server.compatibility import require_compatible
from fedcore.server.folder import JOURNAL, Journal, journal_errors, journal_of
from fedcore.server.opening import (
    Aggregation,
    change_on_loading,
    ids_of,
    is_begun,
    manifest_in,
    new_state,
    require_one_part,
    saved_state,
    warn_if_frozen,
)
from fedcore.server.partial import PartialSum
from fedcore.server.report import Attendance, Report
from fedcore.server.round import Round, RoundLock
from fedcore.server.state import NewClients, State
from fedcore.server.update import Update, as_vector, in_float32, kept_batches, require_finite
from fedcore.server.validation import LOGGER, is_flag, never_negative
from fedcore.store import ClientStore
from fedcore.store.device_store import DeviceStore
from fedcore.store.files.folder import remove
from fedcore.store.reader import ReadRows
from fedcore.store.registry import ClientId, Clients
from fedcore.validation import Represented, absolute, check_integer, listed, require_objects, short_repr


class Server(Represented, Unpicklable):
    """A federated server: the model x, an algorithm, and one row of state per client if the algorithm keeps rows.

    Args:
        model: x_0, float32[n], or anything that ``Layout.of`` accepts, such as an ``nn.Module``. It is copied. A
            ``Model`` describes personal and frozen tensors, and groups of tensors that updates may lack.
        algorithm: one of ``fedcore.algorithms``, or its name.
        clients: their number N (ids 0..N - 1), their ids (int in 0..2**64 - 1, or str), or a mapping from id to n_k,
            the client's number of examples. Methods that weight by the shares p^k = n_k / sum_j n_j need the mapping.
            With the mapping, an update that reports more than n_k examples, or no number, counts with n_k.
            ``add_clients`` and ``open_round`` add clients.
        lr: eta, the rate of the clients' local steps: a number, or a function of the round.
        server_lr: gamma: a number, or a function of the round. Default: the ``eta`` of the optimizer; else the rate
            that the method computes (FedExP); else 1, if the method averages the clients' models (FedAvg); else the
            mean of eta_i K_i over the cohort. A round without clients has no such mean. It uses the last gamma, times
            the change of ``lr`` since.
        optimizer: one of ``fedcore.algorithms.optimizers``, or its name such as "Adam". It turns the method's direction
            into the step.
        aggregation: the rules that reject, cap or scale updates, and a robust rule that combines them in place of the
            mean (``fedcore.rules``): a list such as ``[CapExamples(2), ClipToMedian()]`` or ``[TrimmedMean(2)]``; a
            ``PrivateMean``, which adds noise for differential privacy; or a name: "open" for a federation that anyone
            can join, "median". Default: no rules; every valid update counts unchanged.
        limits: the limits that each update must respect.
        storage: where rows are stored: a ``Storage``, the path of a new folder (``Server.load`` resumes it), or a
            ``ClientStore`` (or a derived class) with rows of ``n_parameters`` elements. Default: in memory.
        compute: the device, the precision of sums, the number of shards.
        policy: when a round may close, and how late an update may be. Default: the caller closes each round, which
            accepts only its own updates.
        callbacks: functions that are called with the ``Report`` of each finished round, in the thread that finished it.
            Their exceptions are logged and do not undo the round. Callbacks may read the server and replace x. They are
            not saved.

    Attributes:
        callbacks: the functions above; they may be replaced between rounds.

    Raises:
        DeviceError: the device or its driver is missing.
        AlgorithmError: the coefficients of a custom method contradict each other.

    A server locks its folder until it is closed by ``close()`` or at the end of ``with Server(...) as server:``.

    Cost: 20 n bytes, or 44 n if the method keeps a total (with exact sums: 52 n and 108 n), and 4 n for each row. MimiC
        needs 4 n more for each of its ``history`` directions. If a rule needs a median, the server keeps copies of up
        to 7 updates until the eighth arrives or the round ends.

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
        optimizer: Optimizer | str | None = None,
        aggregation: Aggregation = None,
        limits: Limits = Limits(),  # noqa: B008  # a frozen value
        storage: Storage | str | os.PathLike[str] | ClientStore | None = None,
        compute: Compute = Compute(),  # noqa: B008
        policy: RoundPolicy = RoundPolicy(),  # noqa: B008
        callbacks: Sequence[Callback] = (),
    ) -> None:
        require_objects(locals())
        layout = Layout.of(model)
        warn_if_frozen(model, layout)
        given = storage if isinstance(storage, ClientStore) else None
        place = Storage().opened(storage) if isinstance(storage, ClientStore) else Storage.of(storage)
        if isinstance(clients, Iterable):
            clients = dict(clients) if isinstance(clients, Mapping) else listed("clients", clients)
        elif clients is None and given is None:
            raise RangeError("clients: missing; pass their number or their ids")
        method = named(algorithm) if isinstance(algorithm, str) else algorithm
        if not isinstance(method, Algorithm):
            raise UnknownNameError(f"algorithm={algorithm!r}: must be an Algorithm or the name of one")
        if layout.n_parameters < 1:
            raise ShapeError("model: it has no parameters")
        if bare := [name for name, own in layout.of_groups.items() if not own.n_parameters]:
            raise ShapeError(f"partial[{bare[0]!r}]: its tensors have no parameters; add some to the group")
        compute = as_compute(compute)
        options = ServerOptions(lr, server_lr, optimizer, aggregation, limits, place, compute, policy)
        settings = Settings.of(method, layout, options)
        parts: tuple[Any, ...] = place, compute, *(["ClientStore"] if given is not None else [])
        require_compatible(settings, *parts)
        backend: Any
        if compute.is_sharded:
            from fedcore.cluster import state as shards  # not at the top: a server in one part needs no cluster

            backend = shards.new_state(model, settings, clients, place, compute)
        else:
            backend = new_state(model, settings, clients, place, given)
        try:
            self._start(backend, parts, callbacks, model)
        except BaseException:
            backend.close()
            if place.path is not None:
                remove(absolute(place.path))
            raise
        self._keep_journal(place, place.path)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy a server in memory, with the open round of an asynchronous one."""
        server = super().__deepcopy__(memo)
        freeze(server._backend.snapshot.x)
        if server._buffer is not None:
            server._round_lock.reopen(server._buffer)
        return server

    def _start(self, backend: Any, place: tuple[Any, ...], callbacks: Sequence[Callback], model: Any = None) -> None:
        self._backend: State = backend
        self._place, self.callbacks = place, tuple(listed("callbacks", callbacks))
        if wrong := [one for one in self.callbacks if not callable(one)]:
            raise RangeError(f"callbacks: must be functions of a Report, got {short_repr(wrong[0])}")
        base = model.tensors if isinstance(model, Model) else model
        self._base = base if isinstance(base, Safetensors) else None
        self._round_lock = RoundLock()
        self._journal: Journal | None = None
        self._journal_at: Path | None = None
        self._buffer: Round | None = None  # which would be aborted without a reference
        self._asked: tuple[int, tuple[ClientId, ...]] | None = None  # the last broadcast: its round and its clients
        self._has_replaced = False
        self._warn_of_few_clients()

    def _warn_of_few_clients(self) -> None:
        """Log that no round can finish if the robust rule needs more updates than there are clients; more may join."""
        clients, rules = len(self._backend.registry.index), self.settings.rules
        if clients and rules.robust is not None and not self.settings.repeats:
            try:
                rules.require_enough(clients)
            except FedcoreError as error:
                LOGGER.warning("%d clients are registered, so no round can finish: %s", clients, error)

    def _keep_journal(self, storage: Storage, folder: str | os.PathLike[str] | None) -> None:
        """Open the journal in the server's folder, if the options or an earlier use ask for it."""
        if folder is None:
            return
        path = self._journal_at = Path(folder) / JOURNAL
        exists = journal_of(path.parent) is not None
        on = (exists or self.settings.journal) if storage.journal is None else bool(storage.journal)
        if on is not self.settings.journal:
            self._backend.keeps_journal(on)
        if exists or storage.journal:  # otherwise it is a copy, which the first round changes, but loading does not
            self._open_journal()

    def _open_journal(self) -> None:
        assert self._journal_at is not None
        self._journal = Journal(self._journal_at, self.settings)
        self._journal.begin(self.round_number)

    @property
    def settings(self) -> Settings:
        """The checked options, frozen."""
        return self._backend.settings

    def _checked(self, options: Mapping[str, Any]) -> Settings:
        """Return the settings with changed options; raise RangeError if they do not combine."""
        changed = self.settings.changed(options)
        require_compatible(changed, *self._place)
        return changed

    @property
    def algorithm(self) -> Algorithm:
        """The federated method, such as FedAvg or MIFA."""
        return self.settings.algorithm

    @property
    def layout(self) -> Layout:
        """The positions of the model's tensors in x."""
        return self.settings.layout

    @property
    def limits(self) -> Limits:
        """The limits that each update must respect."""
        return self.settings.limits

    @property
    def aggregation(self) -> tuple[Rule, ...]:
        """The aggregation rules, in order."""
        return self.settings.rules.rules

    @property
    def policy(self) -> RoundPolicy:
        """When a round may close."""
        return self.settings.policy

    @property
    def privacy(self) -> Ledger:
        """The finished rounds of a server with ``PrivateMean``; ``privacy.epsilon(delta)`` is what they have spent.

        Raises:
            RangeError: the server has no ``PrivateMean``, or its noise is reproducible.
        """
        rule = self.settings.rules.private
        if rule is None or rule.seed is not None:
            raise RangeError("privacy: " + ("the server has no PrivateMean" if rule is None else SEEDED))
        return self._backend.snapshot.ledger

    @property
    def averages_models(self) -> bool:
        """Whether the step is the plain average of the clients' models."""
        return self.settings.averages_models

    @classmethod
    def open(
        cls,
        folder: Storage | str | os.PathLike[str],
        model: Any,
        algorithm: Algorithm | str = "FedAvg",
        clients: int | Iterable[ClientId] | Mapping[ClientId, int] | None = None,
        *,
        create: bool = True,
        **options: Unpack[Openings],
    ) -> "Server":
        """Resume the server of a folder after its last finished round; create it if the folder has none.

        A program that calls it at each start continues after a crash.

        Args:
            folder: the path, or a ``Storage``. One without a path makes a new server in memory.
            model, algorithm: as for a new server. A saved server must have this method, and tensors of these names and
                shapes; it keeps its own values.
            clients: those of a new server. A saved server keeps its own; see ``add_clients``.
            create: False raises an error if the folder has no server.
            options: lr, server_lr, optimizer, aggregation, limits, compute, policy and callbacks, as for a new server
                and for ``load``: those that differ from the saved ones replace them with a warning, except the
                optimizer and the accumulator, which must be the same. What is left out stays as saved.

        Raises:
            CheckpointError: the saved server has another model, method or optimizer.
            FedcoreError: as for ``Server`` and ``load``.

        >>> import numpy as np, tempfile
        >>> folder = tempfile.mkdtemp() + "/state"
        >>> for _ in range(2):
        ...     with Server.open(folder, np.zeros(2, np.float32), "MIFA", clients=3, lr=0.1) as server:
        ...         report = server.round([])
        >>> server.round_number
        2
        """
        storage = Storage.of(folder, "folder")
        if create and not is_begun(storage):
            given: Any = {name: value for name, value in options.items() if value is not None}
            return cls(model, algorithm, clients, storage=storage, **given)
        if (path := storage.path) is None:
            raise RangeError("folder: create=False needs a path")
        return cls.load(path, model=model, algorithm=algorithm, storage=storage, **options)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | ClientStore,
        *,
        model: Any = None,
        algorithm: Algorithm | str | None = None,
        lr: float | Rate | None = None,
        server_lr: float | Rate | None = None,
        optimizer: Optimizer | str | None = None,
        aggregation: Aggregation = None,
        limits: Limits | None = None,
        storage: Storage | None = None,
        compute: Compute | None = None,
        policy: RoundPolicy | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> "Server":
        """Load a server as its last finished round left it; it continues with the same bits.

        Args:
            path: the folder of a server, or a copy that ``save`` wrote; the manifest of a sharded server; or an open
                ``ClientStore``, which the server then closes.
            model: if given, the saved server must have tensors of its names and shapes, and the given optimizer.
            algorithm, optimizer: required if they are the caller's own code.
            lr, server_lr: required if they are the caller's own code. A rate that differs from the saved one replaces
                it, as in ``change``, and logs a warning.
            aggregation, limits, policy: replace the saved ones if they differ, with a warning. A ``Mean`` with
                weights is required again, and so are rules whose module the program has not imported.
            storage: how the rows are opened. ``Storage(medium="mmap")`` resumes in the folder; "ram" and "cuda" leave
                the folder unchanged. Default: as saved, with "ram" in place of "cuda" if the device is a CPU. The
                path, codec and audit cannot change.
            compute: the device and ``batch_size``; the bits stay the same. The accumulator and the number of shards
                cannot change. Default: as saved.
            callbacks: as for a new server.

        Raises:
            DeviceError: the device is missing; choose a different one.
            StoreError: the path has no store, or its format is newer than this version.
            LockedError: another server writes to the folder; ``Storage(medium="ram")`` only reads it.
            CorruptionError: a file is damaged.
            CheckpointError: the store has no server, or an argument is missing or contradicts the saved one.
            RangeError: an argument does not fit the ClientStore, or differs from a saved option that cannot change.
        """
        arguments = {name: value for name, value in locals().items() if name != "cls"}
        require_objects(arguments)
        given, server = checked_objects(arguments), cls.__new__(cls)
        layout = None if model is None else Layout.of(model)
        compute, folder = as_compute(compute or Compute()), None if isinstance(path, ClientStore) else absolute(path)
        manifest = None if folder is None else manifest_in(folder)
        home = path.path if isinstance(path, ClientStore) else folder if manifest is None else manifest.parent
        storage = Storage.of(storage).at(home)
        backend: Any
        if manifest is None:
            require_one_part(path, storage, compute)
            backend, saved = saved_state(path, given, storage, compute)
        else:
            from fedcore.cluster import state as shards

            backend, saved = shards.saved_state(manifest, given, storage, compute)
            compute = replace(compute, executor=backend.coordinator.placement)
        try:
            opened = replace(storage, medium="mmap") if manifest else storage.opened(backend.states[0].store)
            if backend.settings.layout.groups:  # whose stores always keep it
                opened = replace(opened, keep_previous=storage.keep_previous)
            server._start(backend, (opened, compute), callbacks)
            options = given | {"aggregation": aggregation, "limits": limits, "policy": policy}
            change_on_loading(backend, manifest or home, saved, options, server._checked, layout)
            server._keep_journal(storage, home if backend.holds_files else None)
        except BaseException:
            if not isinstance(path, ClientStore):
                backend.close()
            raise
        return server

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a copy of the server: the model, the sums, the rows, the counters and the options.

        A server with a folder does not need it: its folder has every finished round.

        Args:
            path: a new or empty folder, or an older copy, which remains until the new one is complete. A folder in
                which a server was resumed is no longer a copy.

        Raises:
            RoundError: a round is open.
            StoreError: the folder has other content, or the disk is full.

        Cost: reads and writes every row once.
        """
        self._between_rounds()
        with span("save"):
            self._backend.save(path)

    def audit_log(self) -> list[dict[str, Any]]:
        """Return the documents of a server with ``Storage(audit=True)``, oldest first.

        Each round, each change of clients, options or x, each warm start and each undo has one; ``what`` names it. It
        has the digest of its predecessor as ``previous``, and starts from the model with which that one ends
        (``x_before``, ``x_after``). Digests are BLAKE2b-256, of vectors as little-endian float32 in the layout's order,
        and of documents as JSON text.

        Raises:
            CorruptionError: a document was changed or is missing, a signature is not valid, or x is another.
        """
        return self._backend.read(requests.AuditLog())

    def close(self) -> None:
        """Abort an open round, and close the store or the shards. A journal keeps the updates of the round.

        Values in memory, such as ``x``, can still be read. A server with rows in memory has nothing to close.
        """
        if (opened := self._round_lock.opened) is not None:
            opened.abort(keep=True)
        if self._journal is not None:
            self._journal.close()
        self._backend.close()

    def checkpoint(self) -> None:
        """Make every finished round survive a loss of power, for ``durability="checkpoint"``. No round may be open."""
        self._between_rounds()
        self._backend.checkpoint()

    def compact(self, *, erase: bool = False) -> None:
        """Free unused slots; see ``ClientStore.compact``. A round must not be open.

        Args:
            erase: whether the files must no longer contain bytes of removed clients, of earlier rows and vectors, and
                of updates that the journal has dropped. The ids of clients that were removed with
                ``from_objective=False`` go too; their number stays. The ids of updates go as well, so that a late
                update with an id is then rejected.
        """
        self._between_rounds()
        if erase and self._backend.read(requests.NamesRemoved()):
            self._backend.apply(requests.ForgetRemoved())
        self._backend.compact(erase)
        if erase and self._journal is not None:
            self._journal.erase()

    def verify(self) -> list[str]:
        """Read every row and vector; return a line for each damaged one, and for a damaged audit log."""
        found: list[str] = self._backend.verify()
        try:
            self.audit_log()
        except FedcoreError as error:
            found.append(str(error))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def device(self) -> str:
        """The device of the model and the sums, such as "cpu" or "cuda:0"."""
        return self.settings.device

    @property
    def clients(self) -> Clients:
        """The registered clients, with ``in``, ``len`` and iteration in the order of their numbers."""
        if self._round_lock.opened is None:
            self._backend.forget_newcomers()  # discards the newcomers of a dropped round
        return Clients(self._backend.registry.index)

    @property
    def store(self) -> ReadRows:
        """The clients' rows, read-only.

        It raises RangeError with shards, partial updates or rows in a class derived from ``ClientStore``; use ``row``.
        """
        if type(self._backend) is not State or type(self._backend.store) not in (ClientStore, DeviceStore):
            has = "each shard, group of tensors or derived ClientStore has its own rows"
            raise RangeError(f"store: {has}; read a row with row(client)")
        if self._round_lock.opened is None:
            self._backend.forget_newcomers()
        return self._backend.store.read_only()

    @property
    def client_sizes(self) -> npt.NDArray[np.int64] | None:
        """n_k of the registered clients, int64[N], the smallest first; None without sizes."""
        return self._backend.read(requests.ClientSizes())

    @property
    def x(self) -> F32:
        """The model, float32[n]: a read-only array that never changes, since each round makes a new one.

        On a device it is a ``DeviceArray``, which torch and CuPy read through DLPack without a copy. A sharded server
        gathers the vector on each access.
        """
        return self._backend.read(requests.X)

    @property
    def counters(self) -> Counters:
        """The integer counters and constants by name, such as BatchNorm's numbers of batches; not part of x."""
        return self._backend.read(requests.CountersQuery())

    @property
    def v(self) -> F32:
        """A copy of the last step's direction, float32[n_parameters]; the papers call it g.

        It is zero before the first step. If the method does not use it, it is zero after ``load`` until the next step.
        """
        return self._backend.read(requests.Direction())

    @property
    def round_number(self) -> int:
        """The number of finished rounds, which is the index of the next one."""
        return self._backend.round_number

    @property
    def transactions(self) -> int:
        """The number of rounds, changes of clients, options or x, and warm starts. Shards compare it."""
        return self._backend.transactions

    def _facts(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "round_number": self.round_number,
            "n": self.layout.n,
            "clients": len(self._backend.registry),
            "lr": self.settings.lr,
            "server_lr": self.settings.server_lr,
            "optimizer": self.settings.optimizer,
            **self._backend.facts(),
        }

    def _in_files(self) -> bool:
        return self._backend.holds_files

    def sent_checksums(self) -> list[npt.NDArray[Any]]:
        """Return the checksums of the vectors that all clients of the next round get, which a journal stores."""
        return self._backend.read(requests.SentChecksums())

    def tensors(self, *, library: Library | None = None, copy: bool = True, sent: bool = False) -> Any:
        """Return the model by name, in its library and dtypes; counters keep their integer types.

        Args:
            library: "numpy" or "torch". Default: the library of ``model``. Without ml_dtypes, NumPy gets bfloat16
                tensors as float32.
            copy: whether to copy. With False, NumPy's float32 parameters and buffers are read-only views of ``x``.
            sent: return the model from which clients start. Methods that look ahead send a model ahead of ``x``.
        """
        x = self._backend.read(requests.ModelVector("sent" if sent else "x"))
        return self.layout.tensors(x, self.counters, library, copy=copy)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a new folder of safetensors files, in its dtypes and in windows.

        Args:
            path: the folder, which appears when it is complete. ``Safetensors(path)`` reads it. It has the files and
                the index of ``model`` if that was a ``Safetensors``, also those tensors that are personal or frozen,
                unchanged, and the configurations and tokenizers beside them. Otherwise, and after ``load``, it has
                one file, ``model.safetensors``, with the tensors of the server.

        Raises:
            StoreError: the folder exists, or cannot be written.
            CorruptionError: a file of ``model`` was changed, and personal or frozen tensors must be read from it.

        Cost: reads 4 n bytes and writes the model once; 32 MiB of memory.
        """
        write_flat(path, self.layout, to_host(self._backend.read(requests.X)), self.counters, self._base)

    def load_into(self, model: Any, *, strict: bool = True) -> None:
        """Copy x and the counters into a model, in place.

        Args:
            model: an ``nn.Module`` on any device, or a mapping or sequence of tensors, with the server's names and
                shapes. Float dtypes may differ. A model that does not fit is unchanged.
            strict: whether the names must be equal. If False, only tensors with a name in both are copied, such as the
                shared layers of a model with personal layers.
        """
        self.layout.load_into(model, self.x, self.counters, strict=strict)

    def row(self, client: ClientId) -> F32:
        """Return a client's row, float32[n_parameters]; zeros if it was never written."""
        return self._backend.read(requests.Row(client=self._backend.registry.check(client)))

    def correction(self, client: ClientId) -> npt.NDArray[np.float64]:
        """Return c_i, float64[n_parameters], which MimiC adds to the client's next mean gradient; else zeros."""
        if not self.algorithm.keeps_history:
            return zeros(self.layout.n_parameters, np.float64, device=self.device)
        return self._backend.read(requests.Correction(client=self._backend.registry.check(client)))

    def total(self) -> npt.NDArray[np.float64] | None:
        """Return T, float64[n_parameters]; None where the method keeps no total."""
        return self._backend.read(requests.Total()) if self.algorithm.keeps_total else None

    def add_clients(self, clients: ClientId | Iterable[ClientId] | Mapping[ClientId, int]) -> None:
        """Register clients for the next round. If one is invalid, none is registered.

        Args:
            clients: one new id or several. If the other clients have sizes: a mapping from id to n_k.

        Raises:
            RoundError: a round is open.
            RangeError: a client is registered already, or sizes are missing or not expected.

        Cost: one commit, on average independent of the number of clients.
        """
        self._between_rounds()
        ids, sizes = ids_of(clients[()] if isinstance(clients, np.ndarray) else clients)
        if ids:
            self._backend.apply(requests.AddClients(sizes, clients=ids))

    def update_clients(self, sizes: Mapping[ClientId, int]) -> None:
        """Change the numbers of examples n_k of registered clients, and thus the shares p^k = n_k / n of later rounds.

        The objective shifts as when a client is added; a rate eta_0 / t should restart (Ruan et al. 2021, Sec. 4.2).

        Args:
            sizes: the new n_k by id, integers in 1..2^53. The clients must have sizes.

        Raises:
            RoundError: a round is open.

        Cost: one commit, on average independent of the number of clients.
        """
        self._between_rounds()
        if sizes:
            self._backend.apply(requests.UpdateClients(dict(sizes)))

    def remove_client(self, client: ClientId, *, from_objective: bool = True, erase: bool = False) -> None:
        """Remove a client: subtract its row from every running sum, and free its slot.

        Args:
            client: its id; or that of a newcomer of an interrupted round, which only the journal has.
            from_objective: True: the shares p^k of the other clients grow (*exclude*), and the rate should restart.
                False: the shares stay (*include*). See Ruan et al. 2021, Sec. 4.3. A client that comes back gets its
                old place, unless its id was erased.
            erase: whether to erase the client's bytes from the server's files too: its id, its present and earlier
                rows, and its updates in the journal. The earlier state of ``keep_previous`` is dropped. The model, the
                audit log and copies of the folder stay.

        Raises:
            RoundError: a round is open.
            RangeError: the server cannot subtract the row: clients keep their own rows, or T is not the sum of the
                rows.
            StoreError: a reader uses the folder. The client is removed, but some of its bytes are left; end the reader
                and call ``compact(erase=True)``.

        Cost: one commit. With ``erase`` also the cost of ``ClientStore.compact``, which moves at most one row for each
            unused slot and rewrites the index.
        """
        self._between_rounds()
        # A newcomer of an interrupted round is only in the journal.
        dropped = self._journal is not None and client not in self.clients and self._journal.drop(client)
        if not dropped:
            self._backend.apply(requests.RemoveClient(from_objective, clients=[self._backend.registry.check(client)]))
            self._warn_of_few_clients()
        if erase:
            if self._journal is not None:
                self._journal.drop(client)
            self.compact(erase=True)

    def change(self, **options: Unpack[Changes]) -> None:
        """Change rates, limits, rules or the policy from the next round on; its report lists them as ``changed``.

        Call it before ``broadcast``. If lr changes, the server rejects late updates of earlier rounds, except for
        FedAsync. If ``max_staleness`` falls, it drops older models.

        Args:
            options: lr, server_lr, limits, aggregation or policy, as for a new server. With shards, rates must be
                numbers or rates of ``fedcore.algorithms.rates``.

        Raises:
            RoundError: a round is open.
            RangeError: a value is invalid, or server_lr would start or stop the averaging of models.
        """
        self._between_rounds()
        self._checked(options)
        with uninterrupted():
            self._backend.apply(requests.ChangeOptions(options))
        self._warn_of_few_clients()

    def replace_x(self, model: Any) -> None:
        """Replace the model between rounds, for example by a pruned or averaged one, or by one from elsewhere.

        Everything else stays: v, the optimizer's moments, T, the rows, the round number, the privacy that was spent.
        Rows, v and moments are gradients or differences, and are then those of earlier models, as they always are. The
        model that clients get of methods that look ahead (FedACG) is as far ahead of the new x as it was of the old
        one. x_{t-1} of variance-reduced methods stays the model at which g was estimated; before the first step it is
        the new x. Late updates are measured from the models with which their clients started; FedAsync mixes them into
        the new x.

        Call it before ``broadcast``. The next report has ``replaced``. The first replacement is logged.

        Args:
            model: in any form that ``Server`` accepts, with the server's names and shapes and any float dtype; or
                float32[n], in the order of ``layout``, without which the integer counters stay. With partial updates
                (``Model.partial``) it may lack groups, which stay. It is copied.

        Raises:
            RoundError: a round is open, or an asynchronous one has an update; or the server accepts late updates, and
                ``broadcast`` was called for this round.
            RangeError: the method's next step needs earlier models (FedAWE, or FedAvgM with momentum at the clients).
            ShapeError, DtypeError, ArrayError: the model does not fit the layout, or a number is NaN or infinite in
                the tensor's dtype.

        Cost: copies and checks the model, 8 n bytes read and 4 n written, and one commit, which writes 4 n bytes to a
            folder. Shards and devices get the model from this process.

        >>> import numpy as np
        >>> server = Server({"w": np.zeros(2, np.float32)}, "FedAvg", clients=2, lr=0.1)
        >>> server.replace_x({"w": np.float32([1, 2])})
        >>> server.x, server.round([]).replaced
        (array([1., 2.], dtype=float32), True)
        """
        if (reason := self.algorithm.keeps_models) is not None:
            raise RangeError(f"replace_x: not supported by {self.algorithm}: {reason}")
        x, counters = self._flat(model)
        with self._round_lock.pushing:
            is_sent = self._asked is not None and self._asked[0] == self.round_number
            if self.settings.policy.max_staleness and is_sent and not self.algorithm.mixes_models:
                raise RoundError(
                    f"replace_x: broadcast was called for round {self.round_number}, so that an update of this round "
                    "may start from the old x; replace x before broadcast, or after the round"
                )
            opened, newcomers = self._buffer, None
            if opened is not None and opened.is_open and not (opened.clients or opened.rejected):
                newcomers = opened.newcomers
                opened.abort()  # it begins again, from the new x
            self._between_rounds()
            self._backend.apply(requests.ReplaceX(counters, never_negative(self.layout, x), vectors={"x": x}))
            if newcomers is not None:
                self.open_buffer(newcomers=newcomers)
        if not self._has_replaced:
            LOGGER.info("round %d: x was replaced; later replacements are only in the reports", self.round_number)
        self._has_replaced = True

    def _flat(self, model: Any) -> tuple[F32, Counters]:
        """Return a model of the server's layout as a read-only copy, and its counters, which a flat vector lacks."""
        layout, device, counters = self.layout, self.settings.device, dict[str, Any]()
        shape = layout.slices[0].shape if len(layout.slices) == 1 else None
        with np.errstate(over="ignore"):  # an overflow becomes an infinity
            if (vector := as_vector("model", model, layout.n, shape, device=device)) is not None:
                x = copied(in_float32(vector), device=device)
            else:
                counters = layout.read_counters(model)
                if layout.groups:
                    x, of, sent = copied(self.x), layout.of_groups, layout.split(model).items()
                    layout.join({name: of[name].flatten(own, layout.cut(x, name)) for name, own in sent}, x)
                else:
                    x = layout.flatten(model, empty(layout.n, device=device))
        require_finite(x, layout)
        freeze(x)
        return x, counters

    def warm_start(self, gradients: Mapping[ClientId, Any]) -> None:
        """Initialise the rows with c_i, each client's mean gradient at x_0 over some minibatches.

        c is the mean of all rows; clients without a gradient have a zero row. Variance-reduced methods set g_0 = c
        (Cheng et al. 2024, Thms 2-4). Methods without rows set g_0 to the mean of the gradients. Clients that keep
        their own rows must start with the same values.

        Args:
            gradients: float32[n_parameters] by client; with shards also ``Slices``.

        Raises:
            RoundError: a round is open or was finished, or the server had a warm start.
            RangeError: the method cannot start from gradients.
        """
        self._between_rounds()
        require_compatible(self.settings, *self._place, "warm_start")
        vectors = {f"gradients[{client!r}]": gradient for client, gradient in gradients.items()}
        clients = list(map(self._backend.registry.check, gradients))
        self._backend.apply(requests.WarmStart(clients=clients, vectors=vectors))

    def broadcast(self, ids: Iterable[ClientId], *, newcomers: Iterable[ClientId] = ()) -> Broadcast:
        """Return the broadcast to some clients for the next round, and start to read their rows from disk.

        Args:
            newcomers: the clients among ``ids`` that are not registered and may join with the round.
        """
        with span("broadcast", self._backend), self._round_lock.pushing:  # x and its round number must agree
            asked, new = addressed_clients(self._backend.registry, ids, newcomers)
            self._asked = self.round_number, asked
            if isinstance(opened := self._round_lock.opened, Round):
                opened.attendance.ask(asked)
            vectors = self._backend.sent_vectors(asked, new)
            return broadcast_of(self.settings, self.round_number, asked, vectors)

    def open_round(self, *, newcomers: NewClients = (), expected: Iterable[ClientId] | None = None) -> Round:
        """Open a round. Only one round can be open.

        Args:
            expected: the asked clients, registered or newcomers, on which ``Round.may_close`` depends. Default: those
                of the last ``broadcast`` for this round.
            newcomers: clients that are not registered: ids, or a mapping from id to n_k if the other clients have
                sizes. A newcomer is registered if the round accepts an update from it. During the round, the registry
                and the shares p^k include all newcomers.

        Raises:
            RoundError: a round is open already.
            RangeError: a newcomer is registered already, or sizes are missing or not expected.
            UnknownClientError: an expected client is neither registered nor a newcomer.
        """
        newcomers = _listed_clients("newcomers", newcomers)
        if expected is not None:
            expected = addressed_clients(self._backend.registry, expected, newcomers)[0]
        return self._open(self.settings.batch_size, may_hold=False, newcomers=newcomers, expected=expected)

    def open_buffer(self, *, newcomers: NewClients = ()) -> Round:
        """Return the open round of an asynchronous server; open it if none is open. The server keeps it open.

        ``finish()`` closes it with fewer than K updates.

        Args:
            newcomers: as for ``open_round``; without effect if a round is open.

        Raises:
            RangeError: the server is not asynchronous, or as ``open_round``.
        """
        if self.policy.buffer is None:
            raise RangeError("policy: the server is not asynchronous; pass RoundPolicy(buffer=...)")
        with self._round_lock.pushing:
            opened = self._round_lock.opened
            self._buffer = opened if isinstance(opened, Round) else self.open_round(newcomers=newcomers)
            return self._buffer

    def push(self, updates: Iterable[Update], *, newcomers: NewClients = ()) -> list[Report]:
        """Add updates to the open round in the order of arrival; close it at each K-th accepted one and open the next.

        A round also closes when its ``deadline`` is over; ``push([])`` only checks that. After a crash, a server with a
        journal continues the round. Several threads may call it; each call waits for the one before it.

        Args:
            updates: finished updates, such as ``[Update(client, y, steps, round=started)]``; many of them are folded in
                one native pass. A copy of an update with an ``update_id`` has no effect; without an id it counts again.
                An iterator is read to its end first, so no two updates may share a buffer.
            newcomers: as for ``open_round``, for each round that the call opens. Those that are registered by then have
                no effect.

        Returns:
            The reports of the rounds that the updates closed. ``accepted`` is in the order of arrival (with exact sums,
            of the clients' ids), and ``ages`` has the ages. The same updates in this order give the same bits.

        Raises:
            RangeError, UnknownNameError: the server is not asynchronous, or as ``Round.add``; no update was added.
            DivergedError, RangeError: as ``Round.finish``; the rounds that the call closed before stay closed. A note
                of the error says how many updates were read. The report lists updates of clients that are not
                registered, or no longer, as rejected.

        Cost: that of ``Round.add_batch``, and of a step for each closed round.

        >>> import numpy as np
        >>> policy = RoundPolicy(buffer=2, max_staleness=4, discount=0.5)
        >>> server = Server(np.zeros(1, np.float32), "FedAvg", clients=3, lr=0.1, policy=policy)
        >>> server.push([Update(0, np.float32([2]), 1, round=0)])
        []
        >>> [report] = server.push([Update(1, np.float32([4]), 1, round=0)])
        >>> report.closed, report.accepted, server.x
        ('buffer', (0, 1), array([3.], dtype=float32))
        >>> [report] = server.push([Update(client, np.float32([4]), 1, round=client) for client in (0, 1)])
        >>> report.ages, report.factors.round(3), server.x.round(3)
        (array([1, 0]), array([0.707, 1.   ]), array([4.914], dtype=float32))
        """
        given, reports, start = listed("updates", updates), [], 0
        newcomers = _listed_clients("newcomers", newcomers)
        with self._round_lock.pushing:
            self.open_buffer(newcomers=self._unregistered(newcomers)).require_valid(given)
            try:
                while True:
                    opened = self.open_buffer(newcomers=self._unregistered(newcomers))
                    is_due = opened.may_close() is not None and bool(opened.clients)
                    if is_due:
                        reports.append(opened.finish())
                    if start >= len(given):
                        return reports
                    if not is_due:
                        start += opened.fill(given, start)
            except Exception as error:
                error.add_note(f"push: updates read: {start} of {len(given)}; rounds closed: {len(reports)}")
                raise

    def _unregistered(self, newcomers: NewClients) -> NewClients:
        known = self.clients
        left = [client for client in newcomers if client not in known]
        return {client: newcomers[client] for client in left} if isinstance(newcomers, Mapping) else left

    def round(self, updates: Iterable[Update]) -> Report:
        """Run a round from an iterable of updates, which may be produced while they are read.

        Errors are those of ``Round.add`` and ``Round.finish``; they leave the server unchanged. Small models of tensors
        or 16-bit floats in a list are copied before the fold: 4 n bytes for each.
        """
        # A list keeps its arrays until this call returns, and other threads must not change them: one pass folds all.
        is_iterable = hasattr(updates, "__iter__") or hasattr(updates, "__getitem__")
        lazy = is_iterable and not isinstance(updates, list | tuple | str | bytes)
        given = None if lazy else listed("updates", updates)
        batch_size = self.settings.batch_size if given is None else len(given) + 1
        with span("round", self._backend), self._open(batch_size, may_hold=given is not None) as opened:
            for some in kept_batches(updates, batch_size) if given is None else [given]:
                opened.add_batch(some)
            return opened.finish()

    def _attendance(self, expected: Iterable[ClientId] | None = None) -> Attendance:
        if expected is None and self._asked is not None and self._asked[0] == self.round_number:
            return Attendance(self._backend.settings.policy, self._asked[1])
        return Attendance(self._backend.settings.policy, expected, is_final=expected is not None)

    def require_partial_sums(self, *, has_noise: bool = False) -> None:
        """Raise RangeError if rounds cannot add partial sums, or with ``has_noise`` masked sums of ``PrivateMean``.

        Call it when a server for edges is made. Otherwise ``Round.add_partial_sum`` raises the error, after training.
        """
        require_compatible(self.settings, *self._place, "masked sums" if has_noise else "edges")

    def _between_rounds(self) -> None:
        """Raise if a round is open, and discard the remains of a dropped round."""
        self._round_lock.require_none(self.round_number)
        self._backend.abandon()

    def _open(
        self,
        batch_size: int,
        *,
        may_hold: bool,
        newcomers: NewClients = (),
        expected: Iterable[ClientId] | None = None,
        kind: type[Round] = Round,
    ) -> Round:
        options: dict[str, Any] = {"attendance": self._attendance(expected), "callbacks": self.callbacks}
        make = partial(kind, self._backend, batch_size=batch_size, may_hold=may_hold, **options)
        opened = self._round_lock.open(self._backend.round_number, make)
        try:
            self._start_round(opened, newcomers)
        except BaseException:
            opened.abort(keep=True)
            raise
        return opened

    def _start_round(self, opened: Round, given: NewClients) -> None:
        """Start an opened round, with the updates of an interrupted one if the server has a journal."""
        if self._journal is not None and not self.settings.journal:  # switched off: the round does not continue
            self._journal.close()
            remove(self._journal.path)
            self._journal = None
        elif self._journal is None and self._journal_at is not None and self.settings.journal:
            self._open_journal()
        if (journal := self._journal) is None:
            opened.start(given)
            return
        number = self.round_number
        journal.begin(number, self.sent_checksums())
        newcomers = journal.newcomers(number, given, self._backend.registry)
        with nullcontext() if newcomers is given or given else journal_errors(journal.path):
            opened.start(newcomers)
        opened.resume(journal)


def _listed_clients(name: str, given: NewClients) -> NewClients:
    """Return clients, or their sizes by id, in a form that can be read several times."""
    return given if isinstance(given, Mapping) else listed(name, given)


class EdgeRound(Round):
    """An open round of an edge. It ends with ``partial_sum``, since the upper server takes the step."""

    takes_weights = False

    def finish(self) -> Report:
        """Abort the round and raise RoundError."""
        self.abort()
        raise RoundError("round: an edge takes no step; call partial_sum() before the round ends")


class EdgeAggregator:
    """A server between clients and an upper server: one level of a hierarchy.

    In each round the edge starts from the upper server's model, accepts updates as a ``Server`` does, and returns one
    ``PartialSum``: 16 n bytes in place of 4 n per client. The upper server needs ``Compute(accumulator="exact")``. It
    adds the sum by ``Round.add_partial_sum``, with the bits of a server that receives every update.

    The edge validates each update. The upper server checks a sum only against the norms and claims that the edge
    reports. An edge without accepted updates sends zeros and its rejections.

    Args:
        model: a model of the upper server's layout, with its ``partial`` groups. Its values do not matter, except that
            float buffers such as variances must be as in the upper server's first model: positive ones must stay >= 0.
        algorithm: the upper server's method. It must only add h, as FedAvg, FedProx and FedAvgM do; with partial
            updates, clients must not keep rows.
        clients: the ids of the edge's own clients, which the upper server must have registered. If it has their sizes,
            a mapping from id to n_k.
        lr, server_lr: as for the upper server; they set the units of updates.
        limits, aggregation: as for ``Server``.
        population: the greatest number of clients of the upper server, if above 2,048. The greatest norm of an update
            in an exact sum falls with this number.

    Raises:
        RangeError: the method does not only add h (``fedcore.combines``).
        FedcoreError: as for ``Server``.

    Cost: 52 n bytes.

    >>> import numpy as np
    >>> from fedcore import Compute, Server
    >>> zeros = np.zeros(2, np.float32)
    >>> server = Server(zeros, "FedAvg", clients=4, lr=0.1, compute=Compute(accumulator="exact"))
    >>> edges = [EdgeAggregator(zeros, "FedAvg", ids, lr=0.1) for ids in ([0, 1], [2, 3])]
    >>> with server.open_round() as round:
    ...     for edge in edges:
    ...         with edge.open_round(server.broadcast(edge.clients).x, round=server.round_number) as own:
    ...             for client in edge.clients:
    ...                 _ = own.add(client, np.float32([client, 1]), steps=5)
    ...             _ = round.add_partial_sum(own.partial_sum().to_bytes(), "edge", clients=edge.clients)
    >>> server.x
    array([1.5, 1. ], dtype=float32)
    """

    def __init__(
        self,
        model: Any,
        algorithm: Algorithm | str,
        clients: Iterable[ClientId] | Mapping[ClientId, int],
        *,
        lr: float | Rate,
        server_lr: float | Rate | None = None,
        limits: Limits = Limits(),  # noqa: B008
        aggregation: Aggregation = None,
        population: int = 0,
    ) -> None:
        population = check_integer("population", population, 0, 2**53)
        options: dict[str, Any] = {"server_lr": server_lr, "limits": limits, "aggregation": aggregation}
        ids = _listed_clients("clients", clients)
        self._server = Server(model, algorithm, ids, lr=lr, compute=Compute(accumulator="exact"), **options)
        self._server.require_partial_sums()
        self._state: State = self._server._backend
        self._counters = dict(self._server.counters)
        self._before = -1, self._state.snapshot.norms
        for state in self._state.states:
            state.upper_population = population

    def _count_from(self, counters: Counters | None) -> None:
        """Set the upper server's counters. Unknown ones, and flags, get another axis, so that a sum has them all."""
        pieces = self._server.layout.constants if counters else self._server.layout.outside
        unknown = {piece.name for piece in pieces if piece.kind == "counter" or is_flag(piece)}
        now = {name: one[np.newaxis] if name in unknown else one for name, one in (counters or self._counters).items()}
        for state in self._state.states:
            state.snapshot = state.snapshot._replace(counters=now)

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The edge's own clients."""
        return tuple(self._server.clients)

    def open_round(self, x: Any, *, round: int) -> Round:
        """Open a round on the broadcast of the upper server; it ends with ``Round.partial_sum``.

        Args:
            x: the received ``Broadcast.x``: float32[n], its bytes, or a model that fits the layout. It is copied.
                Only a model has the upper server's integer counters. Without them, differences do not change counters.
            round: the round's number.

        Raises:
            RoundError: a round is open.

        Cost: reads and writes 4 n bytes.
        """
        number, server = check_integer("round", round, 0, 2**53), self._server
        server._between_rounds()
        flat, n = as_vector("x", x, server.layout.n), server.layout.n
        vector = server.layout.flatten(x, empty(n)) if flat is None else copied(in_float32(flat))
        if not kernels.all_finite([vector])[0]:
            raise ArrayError("x: a number is NaN or infinite")
        freeze(vector)
        self._count_from(server.layout.read_counters(x) if flat is None else None)
        # The upper server has dropped a round that is opened again: rules forget its updates.
        self._before = self._before if number == self._before[0] else (number, self._state.snapshot.norms)
        self._state.snapshot = self._state.snapshot._replace(norms=self._before[1])
        self._state.start_from(vector, number)
        return server._open(server.settings.batch_size, may_hold=False, kind=EdgeRound)

    def fold(self, x: Any, updates: Iterable[Update], *, round: int) -> PartialSum:
        """Run a round in one call, and return its partial sum. The arguments are those of ``open_round``."""
        with self.open_round(x, round=round) as opened:
            for update in updates:
                opened.add_batch([update])
            return opened.partial_sum()
