"""A server in shards: each has a range of the parameters, with its own part of every row, on a disk of its own."""

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack
from uuid import uuid4

import numpy as np

from fedcore import server as plain
from fedcore.algorithms import Algorithm
from fedcore.arguments import absolute
from fedcore.atomic_file import followed
from fedcore.clients import ClientId
from fedcore.cluster.coordinator import Coordinator
from fedcore.cluster.gathered import Gathered
from fedcore.cluster.intent import declare, finish
from fedcore.cluster.manifest import NAME, Manifest, alone_in, folders_of, made_folder, older_copy, prepare
from fedcore.cluster.placement import Here, Placement
from fedcore.cluster.ranges import cut, ranges_of, require_elementwise
from fedcore.cluster.round import Round
from fedcore.cluster.shard import settings_of_shard
from fedcore.cluster.view import ClusterView
from fedcore.errors import FedcoreError, RangeError, RoundError, StoreError
from fedcore.interrupts import uninterrupted
from fedcore.layout import Layout
from fedcore.optimizers import Optimizer
from fedcore.rates import Rate
from fedcore.server.beginning import first_settings, with_buffers_of
from fedcore.server.broadcast import Broadcast, asked_of, broadcast_of
from fedcore.server.changes import changes_of, require_own_rates, warn_of_changes
from fedcore.server.limits import LIMITS, LimitOptions, Limits
from fedcore.server.newcomers import Coming
from fedcore.server.population import Sizes, arriving
from fedcore.server.report import OnReport, RoundReport
from fedcore.server.round_lock import RoundLock
from fedcore.server.settings import Changes, Settings, said_again
from fedcore.server.slices import Slices
from fedcore.server.update import Update, as_vector, held_together
from fedcore.store import Durability
from fedcore.typing import F32

_ON_CPUS = "its shards are on CPUs"
_NOT_HERE = {
    "store": "path= and folders= say where rows lie",
    "device": _ON_CPUS,
    "hot_rows": _ON_CPUS,
    "undoable": _ON_CPUS,
    "audit": "its shards see slices",
    "weights": "give the weight of each update, add(weight=)",
}
"""Arguments of ``fedcore.Server`` that a cluster does not take, and why, or what it takes instead."""


class Server(ClusterView):
    """A ``fedcore.Server`` cut by ranges of parameters into shards, with the same rounds and the same bits.

    Args:
        algorithm, x0, clients, lr: as for ``fedcore.Server``, as ``options`` are.
        shards: how many: at most one for 16,384 parameters.
        path: the folder of the manifest, ``cluster.json``, and of the shards' own folders, ``shard-0`` and so on; new
            or empty. None keeps everything in memory, and then nothing survives the loss of a shard.
        folders: the shards' folders where they lie elsewhere, on a disk each: new, or empty.
        codec, durability: of the rows: see ``ClientStore``.
        placement: where the shards run; None for threads of this process.
        on_report: as for ``fedcore.Server``; it is called here, and not at the shards.
        options: others of ``fedcore.Server``'s arguments, but ``store``, ``device``, ``hot_rows``, ``undoable``,
            ``audit`` and ``weights``.

    A round, an arrival, a departure and a warm start happened when the last shard's transaction is durable. After a
    crash of anyone, ``load`` has the shards that are ahead take theirs back.

    Raises:
        RangeError: an argument is refused: an optimizer that does more than step element by element; more shards than
            blocks of parameters.
        FedcoreError: whatever ``fedcore.Server`` raises.

    Cost: that of ``fedcore.Server``, divided among the shards; each is sent 8 or 9 messages for a round, by the
        method, and three more for every further ``fold`` updates. A broadcast is one more, one where rows are read
        ahead, one where the method sends x_prev, and one for each offset.

    >>> server = Server("FedAvg", np.zeros(40_000, np.float32), clients=2, lr=0.1, shards=2)
    >>> with server.open_round() as round:
    ...     _ = round.add(0, np.ones(40_000, np.float32), steps=5)
    >>> server.x[-1], server.ranges[0]
    (np.float32(1.0), Range(start=0, stop=16384, end=16384))
    >>> server.close()
    """

    def __init__(
        self,
        algorithm: Algorithm | str,
        x0: Any,
        clients: int | Iterable[ClientId],
        *,
        lr: float | Rate,
        shards: int = 2,
        path: str | os.PathLike[str] | None = None,
        folders: Sequence[str | os.PathLike[str]] | None = None,
        codec: str = "f32",
        durability: Durability = "round",
        placement: Placement | None = None,
        on_report: OnReport | None = None,
        **options: Any,
    ) -> None:
        self.on_report = on_report
        layout = Layout.of(x0)
        sizes, signed, said = _options(options)
        settings = first_settings(algorithm, layout, lr=lr, device="cpu", **said)
        require_elementwise(settings.optimizer)
        ranges = ranges_of(layout, shards)
        x, own = _flat(x0, layout)
        settings = with_buffers_of(settings, x, signed)
        home = None if path is None else absolute(path)
        if home is None and folders is not None:
            raise RangeError("folders: expected none without path=, the folder of the manifest, got some")
        named = None if home is None else folders_of([f"shard-{k}" for k in range(len(ranges))], folders)
        manifest = Manifest(uuid4().hex, layout, ranges, named)
        if home is not None:
            prepare(home)
        listed = clients if isinstance(clients, int) else list(clients)
        given = said_again(settings.algorithm, settings.lr, settings.server_lr, settings.optimizer)
        self._settings, self._manifest, self._home = settings, manifest, home
        where, still = (
            Here() if placement is None else placement,
            partial(manifest.require_still, (home or Path()) / NAME),
        )
        self._coordinator = Coordinator(where, manifest.places(home, folders), durability, given, still)
        self._round_lock = RoundLock()
        counters = layout.read_counters(x0)
        each = [
            (
                settings_of_shard(settings, cut(layout, span, counters=k == 0)),
                x[span.start : span.stop],
                counters if k == 0 else {},
            )
            for k, span in enumerate(ranges)
        ]
        self._coordinator.make(listed, sizes, codec, durability, own, each=each)
        try:
            if home is not None:
                manifest.write(home / NAME)
            self._read_registry()
        except BaseException:
            self._coordinator.drop()
            raise

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        folders: Sequence[str | os.PathLike[str]] | None = None,
        durability: Durability = "round",
        placement: Placement | None = None,
        algorithm: Algorithm | None = None,
        lr: float | Rate | None = None,
        server_lr: float | Rate | None = None,
        optimizer: Optimizer | None = None,
        on_report: OnReport | None = None,
        **limits: Unpack[LimitOptions],
    ) -> "Server":
        """The server of a manifest as its last finished round left it; its rounds go on as if nothing had happened.

        Args:
            path: the manifest, or its folder: what ``save`` wrote, or a server's own.
            folders: the shards' folders, one for each, where they do not lie beside the manifest.
            durability, placement, on_report: as for a new one.
            algorithm, lr, server_lr, optimizer, limits: as for ``fedcore.Server.load``.

        Raises:
            StoreError, CheckpointError, CorruptionError: as ``fedcore.Server.load``; or a shard lies elsewhere, and
                ``folders`` does not name it; or the shards do not belong to
                each other, or are further apart than one transaction; or they were cut anew meanwhile.
            RangeError: the optimizer is none for a cluster.
            LockedError: another process has a shard, for longer than 10 seconds.
        """
        given = said_again(algorithm, lr, server_lr, optimizer)
        file = absolute(path)
        file = file / NAME if file.is_dir() else file
        manifest = Manifest.read(file)
        server = cls.__new__(cls)
        server.on_report = on_report
        places = manifest.places(file.parent, folders)
        still = partial(manifest.require_still, file)
        coordinator = Coordinator(Here() if placement is None else placement, places, durability, given, still)
        coordinator.open()
        try:
            assert coordinator.settings is not None
            told = coordinator.settings | {"layout": manifest.layout.to_state()}
            server._settings = Settings.from_state(told, given)
            require_elementwise(server._settings.optimizer)
            server._manifest, server._home = manifest, file.parent
            server._coordinator, server._round_lock = coordinator, RoundLock()
            server._read_registry()
            if options := changes_of(server._settings, told, given, limits):
                server.change(**options)
                warn_of_changes(file, server._settings.shown(options))
        except BaseException:
            coordinator.drop()
            raise
        return server

    def broadcast(self, ids: Iterable[ClientId], *, newcomers: Iterable[ClientId] = ()) -> Broadcast:
        """The broadcast to those clients for the next round: see ``fedcore.Server.broadcast``.

        Its ``slices`` are the shards' own, and go to workers on Ray without coming here; x, x_prev and an offset are
        put together when they are asked for.
        """
        asked, new = asked_of(self._registry, ids, newcomers)
        number, fetch = self.round_number, self._coordinator.fetch
        if self.algorithm.keeps_rows:
            self._coordinator.call("prefetch", [client for client in asked if client not in new])

        def offset(client: ClientId) -> list[Any]:
            if self.round_number != number:
                raise RoundError(f"offset: expected the round of the broadcast, {number}, got {self.round_number}")
            return fetch("offset", client, client in new and client not in self._registry)

        x_prev = fetch("vector", "x_prev") if self.algorithm.direction.b else None
        vectors = Gathered(self._coordinator, self.ranges, fetch("vector", "sent"), x_prev, offset)
        return broadcast_of(self._settings, number, asked, vectors)

    def open_round(self, *, newcomers: Coming = ()) -> Round:
        """Start a round; there is one at a time: see ``fedcore.Server.open_round``."""
        return self._open(self._settings.fold, may_hold=False, newcomers=newcomers)

    def round(self, updates: Iterable[Update]) -> RoundReport:
        """A whole round from an iterable of updates: see ``fedcore.Server.round``."""
        listed = list(updates) if isinstance(updates, list | tuple) else None
        fold = max(self._settings.fold, len(listed or ()))
        with self._open(fold, may_hold=listed is not None) as opened:
            for some in held_together(updates, fold) if listed is None else [listed]:
                for update in some:
                    opened.add_update(update)
            return opened.finish()

    def arrive(self, clients: ClientId | Iterable[ClientId], *, client_sizes: int | Sizes | None = None) -> None:
        """A client comes, or many do: see ``fedcore.Server.arrive``."""
        self._between_rounds()
        listed, sizes = arriving(clients, client_sizes)
        if listed:
            try:
                self._coordinator.change("arrive", listed, sizes)
            finally:
                self._learn_clients(listed)

    def resize(self, client_sizes: Mapping[ClientId, int]) -> None:
        """Let registered clients hold other numbers of examples: see ``fedcore.Server.resize``."""
        self._between_rounds()
        if client_sizes:
            self._coordinator.change("resize", dict(client_sizes))

    def depart(self, client: ClientId, *, from_objective: bool = True) -> None:
        """A client goes: see ``fedcore.Server.depart``."""
        self._between_rounds()
        try:
            self._coordinator.change("depart", client, from_objective)
        finally:
            self._learn_clients([client])

    def change(self, **options: Unpack[Changes]) -> None:
        """Change rates and limits from the next round on: see ``fedcore.Server.change``.

        A rate is a number or one of ``fedcore.rates``.
        """
        self._between_rounds()
        changed, due = self._settings.changed(options), self.transactions + 1
        require_own_rates(changed, options)
        with uninterrupted():
            try:
                self._coordinator.change("change", dict(options))
            finally:
                if self.transactions == due:
                    self._settings = changed

    def warm_start(self, gradients: Mapping[ClientId, Any]) -> None:
        """Start from rows that are not zero: see ``fedcore.Server.warm_start``; a gradient may come as ``Slices``."""
        self._between_rounds()
        named = {self._registry.check(client): g for client, g in gradients.items()}
        parts = [self._slices_of(f"gradients[{client!r}]", g) for client, g in named.items()]
        digests = [g.digests if isinstance(g, Slices) else None for g in named.values()]
        each = [
            ([None if own is None else own[k] for own in digests], *(own[k] for own in parts))
            for k in range(len(self.ranges))
        ]
        self._coordinator.change("warm_start", list(named), each=each)

    def _slices_of(self, name: str, gradient: Any) -> Sequence[Any]:
        """A gradient's slices, on their way to the shards."""
        if isinstance(gradient, Slices):
            gradient.require(name, len(self.ranges))
            return gradient.parts
        whole, put = as_vector(name, gradient, self.layout.n_parameters), self._coordinator.placement.put
        return [put(whole[span.start : span.end]) for span in self.ranges]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a named copy of everything: a part of each shard, on its own machine, and a manifest, written last.

        Args:
            path: a folder: new, empty, or of an older copy, which stays until the new one is whole.

        Raises:
            RoundError: a round is open.
            StoreError: the folder is something else than this user's copy, a run's own say; or a disk is full.
            LockedError: a server goes on in the copy that is there.

        Killed, it leaves the older copy, and the next save there deletes what it had made, as the file
        ``cluster.json.intent`` says.
        """
        self._between_rounds()
        home = absolute(path)
        place = followed(home)
        if self._home is not None and place == Path(os.path.realpath(self._home)):
            raise StoreError(f"{home}: expected another folder than the server's own, got that: every round is there")
        made_folder(home)
        with alone_in(home):
            finish(home, self._forget)
            before = older_copy(home)
            if before is not None:
                self._coordinator.call("require_unused", [place.folder for place in before.places(home)])
            mark = uuid4().hex[:8]
            folders = tuple(f"shard-{k}-{mark}" for k in range(len(self.ranges)))
            copy = replace(self._manifest, folders=folders, is_copy=True)
            declare(home, made=copy, going=before)
            try:
                self._coordinator.call("save", each=[(place.folder,) for place in copy.places(home)])
                copy.write(home / NAME)
            except FedcoreError:
                with suppress(FedcoreError):  # then the next save does it
                    finish(home, self._forget, goes=False)
                raise
            finish(home, self._forget)

    def _forget(self, cluster: str, folders: Sequence[str]) -> bool:
        """Delete parts of a copy, each by the shard that wrote it; tell whether all are gone."""
        return all(self._coordinator.call("forget_copy", cluster, list(folders)))

    def checkpoint(self) -> None:
        """Make every finished round safe, where durability="checkpoint"; elsewhere it is already. Between rounds."""
        self._between_rounds()
        self._coordinator.call("checkpoint")

    def compact(self) -> None:
        """Give back slots that nobody needs; between rounds. See ``ClientStore.compact``."""
        self._between_rounds()
        self._coordinator.call("compact")

    def close(self) -> None:
        """Give up a round that is open, and close the shards; nothing can be read afterwards."""
        if (opened := self._round_lock.opened) is not None:
            opened.abort()
        self._coordinator.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _between_rounds(self) -> None:
        self._round_lock.require_none(self.round_number)

    def _open(self, fold: int, *, may_hold: bool, newcomers: Coming = ()) -> Round:
        coming = dict(newcomers) if isinstance(newcomers, Mapping) else list(newcomers)

        def over() -> None:
            if coming:
                self._learn_clients(coming)

        def make() -> Round:
            self._coordinator.call("begin_round", coming)
            if coming:
                self._learn_clients(coming)
            whom = self._coordinator, self._settings, self.ranges, self._registry
            return Round(*whom, fold=fold, may_hold=may_hold, over=over, on_report=self.on_report)

        return self._round_lock.open(self.round_number, make)


def _options(options: Mapping[str, Any]) -> tuple[Sizes | None, Sequence[str], dict[str, Any]]:
    """The client's sizes, the patterns of signed buffers, and the settings, as ``fedcore.Server`` has them by default.

    Raises:
        RangeError: a cluster has no such argument.
        TypeError: nor does ``fedcore.Server``.
    """
    known = inspect.signature(plain.Server).parameters
    defaults = {name: one.default for name, one in known.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}
    for name in options:
        if name in _NOT_HERE:
            instead = _NOT_HERE[name]
            raise RangeError(f"{name}: expected none for a cluster, got {options[name]!r}: {instead}; leave it out")
        if name not in defaults:
            raise TypeError(f"Server() got an unexpected keyword argument {name!r}")
    others = (*_NOT_HERE, "lr", "on_report")
    said = {name: options.get(name, default) for name, default in defaults.items() if name not in others}
    said["limits"] = Limits().changed({name: said.pop(name) for name in LIMITS})
    return said.pop("client_sizes"), said.pop("signed_buffers"), said


def _flat(x0: Any, layout: Layout) -> tuple[F32, bool]:
    """The first model as one vector, and whether that is memory of its own."""
    if isinstance(x0, np.ndarray) and x0.dtype == np.float32 and x0.ndim == 1 and x0.flags.c_contiguous:
        return x0, False
    return layout.flatten(x0), True
