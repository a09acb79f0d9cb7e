"""A shard: the package's own state and rounds over a range of the parameters, with its part of every row.

Nothing here computes: a shard is a server that asks the others where a decision needs the whole (``Link``).
"""

import logging
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedcore import runtime
from fedcore.aggregation import Counters
from fedcore.clients import ClientId
from fedcore.cluster.deleting import delete_shard
from fedcore.cluster.link import Link
from fedcore.cluster.sent import Said, Sent, SliceReader, updates_of
from fedcore.cluster.strand import Reply, Strand
from fedcore.errors import CheckpointError, LockedError, StoreError
from fedcore.memory import copied, freeze
from fedcore.server.beginning import first_state, require_clients, require_finite, resumed_state
from fedcore.server.changes import change
from fedcore.server.folder_checks import believed, server_state
from fedcore.server.newcomers import Coming
from fedcore.server.population import Sizes
from fedcore.server.report import RoundReport
from fedcore.server.round import LOGGER, Round
from fedcore.server.rounded_model import as_sent
from fedcore.server.settings import Settings
from fedcore.server.state import State
from fedcore.server.transactions import Transactions, go_back, transactions
from fedcore.store import ClientStore, Durability
from fedcore.store.files.atomic_folder import remove, require_copy
from fedcore.store.files.inventory import INDEX, is_own_folder, require_same
from fedcore.store.files.locks import WriterLock
from fedcore.typing import F32


@dataclass(frozen=True)
class Place:
    """A shard's place in its cluster.

    Attributes:
        cluster: the cluster's own name, by which shards of two are told apart.
        shard, shards: which of how many, from 0.
        first: the place of its first parameter.
        has_buffers: whether the model has float buffers, which are the last shard's.
        folder: where its part of the store is, on its own machine; None for memory.
        is_named: whether the caller has named the folder, and not the manifest.
    """

    cluster: str
    shard: int
    shards: int
    first: int
    has_buffers: bool
    folder: str | None
    is_named: bool = False

    def told(self) -> dict[str, Any]:
        """The words of its folder about it."""
        return {"cluster": self.cluster, "shard": self.shard, "shards": self.shards, "first": self.first}

    def require(self, state: Any) -> dict[str, Any]:
        """The state of its folder, which is that of this shard.

        Raises:
            CheckpointError: it is another's.
        """
        folder = self.folder or "store"
        with believed(folder):
            said = server_state(folder, state, shard=True)
            if said["place"] != self.told():
                got = said["place"]
                raise CheckpointError(f"{folder}: expected {self.told()}, as the manifest says, got {got}")
        return said

    def open(self, *, readonly: bool = False, durability: Durability = "round") -> ClientStore:
        """Open its folder, which is that of this shard.

        Raises:
            StoreError: the manifest names a link, or a folder of a user who is neither this one nor its own.
            CheckpointError: it is another shard's.
        """
        assert self.folder is not None
        found = self.require_inside()
        rows = ClientStore.open(self.folder, readonly=readonly, durability=durability, undoable=not readonly)
        try:
            require_same(Path(self.folder), found, os.lstat(self.folder))
            self.require(rows.state)
        except BaseException:
            rows.close()
            raise
        return rows

    def require_inside(self) -> os.stat_result | None:
        """Reject a folder beside the manifest that is a link, or another user's; None if the caller has named it.

        Raises:
            StoreError: it is one.
        """
        if self.folder is None or self.is_named or not os.path.lexists(self.folder):
            return None
        found, home = os.lstat(self.folder), os.stat(os.path.dirname(self.folder))
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), home.st_uid):
            raise StoreError(
                f"{self.folder}: expected a folder of this user's beside the manifest, got a link, or another user's: "
                "pass folders= if it is yours"
            )
        return found


_NAME = re.compile(r"shard-(0|[1-9][0-9]{0,5})(-[0-9a-f]{8})?")


def shard_in(folder: str) -> int | None:
    """The number of a shard in the name that fedcore gives its folder; None for any other name or path."""
    found = _NAME.fullmatch(folder)
    return None if found is None else int(found[1])


class Known(NamedTuple):
    """The coordinator's knowledge of its shards: the numbers of round and transaction, which all of them have alike."""

    round_number: int
    transactions: int


class Finished(NamedTuple):
    """A round's end: its report, who was refused at last, and what is to be logged of it."""

    report: RoundReport
    late: tuple[tuple[ClientId, str], ...]
    records: list[logging.LogRecord]


class Shard:
    """See above. Every call runs in the shard's strand, one at a time."""

    def __init__(self, place: Place, threads: int | None = None) -> None:
        if threads is not None:
            runtime.set_threads(threads)
        self._place, self._strand = place, Strand(f"fedcore shard {place.shard}")
        self._link = Link(self._strand, first=place.first, has_buffers=place.has_buffers, place=place.told())
        self._rows: ClientStore | None = None
        self._state: State
        self._round: Round | None = None
        self._told = 0

    def begin(self, name: str, *arguments: Any) -> None:
        """Begin a call of one of the methods below; ``wait`` says how far it has come."""
        self._strand.begin(lambda: getattr(self, name)(*arguments))

    def answer(self, value: Any) -> None:
        """Answer what the call has asked."""
        self._strand.answer(value)

    def wait(self, seconds: float | None = None) -> Reply | None:
        """Wait until the call asks, or is over; return None if that takes longer than so many seconds."""
        return self._strand.wait(seconds)

    def end(self, seconds: float | None = None) -> bool:
        """Close the store once no call runs, and end the strand; return whether that is done within so many seconds."""
        return self._strand.end(self.close, seconds)

    def make(
        self,
        clients: Any,
        client_sizes: Sizes | None,
        codec: Any,
        durability: Durability,
        own: bool,
        settings: Settings,
        x: F32,
        counters: Counters,
    ) -> None:
        """Make the shard of a new server.

        Args:
            own: whether x is memory that nobody else has.
            settings: with the layout of this range.
            x: float32, the first model's elements.
        """
        self._place.require_inside()
        p, folder = settings.layout.n_parameters, self._place.folder
        x = x if own else copied(x)
        require_finite(x, settings.layout)
        freeze(x)
        if folder is None:
            self._rows = ClientStore(clients, p, codec=codec)
        else:
            self._rows = ClientStore(
                clients, p, medium="mmap", codec=codec, path=folder, durability=durability, undoable=True
            )
        try:
            require_clients(self._rows, clients)
            self._state = first_state(settings, x, counters, client_sizes, self._rows, self._link)
        except BaseException:
            self.unmake()
            raise

    def unmake(self) -> None:
        """Delete what ``make`` made: another shard could not be made."""
        if self._rows is not None:
            self.close()
            if self._place.folder is not None:
                remove(Path(self._place.folder))

    def look(self, durability: Durability, seconds: float) -> Transactions:
        """Open the folder, which locks it, and say which transactions it holds.

        Args:
            seconds: to wait for its lock: a process that is being killed may still be in its commit.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                self._rows = self._place.open(durability=durability)
                return transactions(self._rows)
            except LockedError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def go_on(self, to: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Go on from a transaction, the last or the one before; returns the settings as the folder has them."""
        assert self._rows is not None
        go_back(self._rows, to)
        folder = self._place.folder
        assert folder is not None
        said = self._place.require(self._rows.state)
        with believed(folder):
            self._state = resumed_state(self._rows, said, given, whole=self._link)
        settings: dict[str, Any] = said["settings"]
        return settings

    def known(self) -> Known:
        """The numbers that all shards have alike."""
        now = self._state.snapshot
        return Known(now.round_number, now.transactions)

    def begin_round(self, newcomers: Coming) -> None:
        """Open a round; what was left of one is forgotten."""
        self.abort()
        self._records: list[logging.LogRecord] = []
        logger = logging.Logger(LOGGER.name)
        logger.setLevel(logging.INFO)
        logger.handle = self._records.append  # type: ignore[assignment, method-assign]  # the coordinator's process logs it
        self._round = Round(
            self._state.settings, self._state, fold=1, may_hold=False, logger=logger, reader=SliceReader
        )
        self._told = 0
        self._round.begin(newcomers)

    def add(self, said: Sequence[Said], *vectors: Any) -> tuple[list[tuple[ClientId, str]], int]:
        """Fold the slices of some updates in; returns who has been refused since the call before, and their bytes."""
        assert self._round is not None
        before = self._round.received
        self._round.add_together(updates_of(said, vectors, self._place.shard))
        refused, told = self._round.refused, self._told
        self._told = len(refused)
        return list(refused[told:]), self._round.received - before

    def finish(self) -> Finished:
        """Finish the round."""
        assert self._round is not None
        opened, self._round = self._round, None
        report = opened.finish()
        return Finished(report, report.refused[self._told :], self._records)

    def abort(self) -> None:
        """Leave the round, if one is open."""
        if self._round is not None:
            self._round.abort()
            self._round = None

    def arrive(self, clients: list[ClientId], client_sizes: Sizes | None) -> None:
        """See ``Server.arrive``."""
        self._state.abandon()
        self._state.arrive(clients, client_sizes)

    def resize(self, client_sizes: Mapping[ClientId, int]) -> None:
        """See ``Server.resize``."""
        self._state.abandon()
        self._state.repopulate(self._state.population.with_sizes(self._state.store.registry, client_sizes))

    def change(self, options: Mapping[str, Any]) -> None:
        """See ``Server.change``."""
        self._state.abandon()
        change(self._state, options)

    def depart(self, client: ClientId, from_objective: bool) -> None:
        """See ``Server.depart``."""
        self._state.abandon()
        self._state.depart(client, from_objective)

    def warm_start(self, clients: list[ClientId], digests: Sequence[str | None], *gradients: Any) -> None:
        """See ``Server.warm_start``; the digests are of the gradients' slices."""
        self._state.abandon()
        for client, digest, gradient in zip(clients, digests, gradients, strict=True):
            Sent(gradient, digest=digest).require(f"gradients[{client!r}]", gradient)
        self._state.warm_start(dict(zip(clients, gradients, strict=True)))

    def prefetch(self, clients: Sequence[ClientId]) -> None:
        """Read rows ahead that a round is about to need."""
        if self._state.settings.algorithm.keeps_rows:
            self._state.store.prefetch(clients)

    def vector(self, what: Literal["x", "sent", "x_prev", "v"]) -> F32:
        """The shard's slice of a vector; ``sent`` and ``x_prev`` as clients are sent them."""
        now, layout = self._state.snapshot, self._state.settings.layout
        if what == "x":
            return now.x
        if what == "v":
            return copied(now.momentum)
        return as_sent(layout, now.sent if what == "sent" else now.x_prev)

    def offset(self, client: ClientId, is_new: bool) -> F32:
        """The shard's slice of a client's offset."""
        offset: F32 = self._state.offset(client, None, is_new=is_new)
        return offset

    def row(self, client: ClientId) -> F32:
        """The shard's slice of a client's row, as it is read."""
        row: F32 = self._state.store.read(client)
        return row

    def correction(self, client: ClientId) -> Any:
        """The shard's slice of a client's correction."""
        return self._state.correction(client)

    def total(self) -> Any:
        """The shard's slice of T, float64; None where the method keeps none."""
        total = self._state.snapshot.total
        return None if total is None else copied(total)

    def round_of(self, client: ClientId) -> int | None:
        """The round that wrote a client's row."""
        return self._state.store.round_of(client)

    def counters(self) -> Counters:
        """The integer counters, which the first shard keeps."""
        return self._state.snapshot.counters

    def client_sizes(self) -> Any:
        """n_k of the registered clients, the smallest first."""
        return self._state.snapshot.population.listed()

    def registry(self) -> tuple[int, list[tuple[int, ClientId | None]]]:
        """The registered clients, as ``Registry.restore`` takes them."""
        return self._state.store.registry.explicit()

    def numbers(self, clients: Sequence[object]) -> list[int | None]:
        """The number of each client in the registry; None where it is not registered."""
        registry = self._state.store.registry
        return [registry.number(client) if client in registry else None for client in clients]

    def save(self, path: str) -> None:
        """Write a copy of the shard's part."""
        self._state.save(path)

    def require_unused(self, paths: list[str]) -> None:
        """Reject this shard's part of an older copy if a process writes to it, or a server went on in it.

        Raises:
            StoreError, LockedError: it is one.
        """
        for path in map(Path, self._own(paths)):
            if os.path.lexists(path) and is_own_folder(path) and (path / INDEX).exists():
                WriterLock(path, shared=True).close()
                require_copy(path, of_shard=True)

    def forget_copy(self, cluster: str, paths: list[str]) -> bool:
        """Delete this shard's part of an older copy of that cluster; tells whether it is gone."""
        gone = [delete_shard(cluster, path, shard_in(os.path.basename(path))) for path in self._own(paths)]
        return all(gone)

    def _own(self, paths: list[str]) -> list[str]:
        """The part of a copy's folders that is this shard's; the copy may be of more shards, or of fewer."""
        return paths[self._place.shard :: self._place.shards]

    def verify(self) -> list[str]:
        """The damage found here: see ``ClientStore.verify``."""
        return self._state.store.verify()

    def checkpoint(self) -> None:
        """See ``Server.checkpoint``."""
        self._state.store.checkpoint()

    def compact(self) -> None:
        """See ``Server.compact``."""
        self._state.store.compact()

    def close(self) -> None:
        """Give up a round that is open, and close the store."""
        with suppress(StoreError):
            self.abort()
        if self._rows is not None:
            self._rows.close()  # or it stays open, for who closes it again
            self._rows = None


def settings_of_shard(settings: Settings, layout: Any) -> Settings:
    """The server's settings, with a shard's layout."""
    names = set(layout.names)
    return replace(settings, layout=layout, nonnegative=tuple(name for name in settings.nonnegative if name in names))


def joined(slices: Sequence[Any]) -> Any:
    """The whole of a vector, read-only."""
    whole = np.concatenate([np.asarray(one) for one in slices])
    whole.flags.writeable = False
    return whole
