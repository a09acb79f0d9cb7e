"""Sums, counts and histograms of clients' values: rounds whose result is their totals, the same in any order."""

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from fedcore.arrays import F64, ieee
from fedcore.errors import ArrayError, CheckpointError, DtypeError, FedcoreError, RangeError, RoundError
from fedcore.model import Layout
from fedcore.model.policy import INTEGERS
from fedcore.options import Callback, Storage, as_option
from fedcore.rules.private import SEEDED, Ledger, PrivateMean
from fedcore.runtime import Unpicklable, uninterrupted
from fedcore.server import OpenRound, Reply, Report, RoundLock, one_call
from fedcore.server.folder import checkpoint_errors, read_audit
from fedcore.server.report import TOTALS, Document, document_of, public_key
from fedcore.server.update import digest_of_text
from fedcore.store.client_store import ClientStore, create
from fedcore.store.files.inventory import INDEX
from fedcore.store.registry import ClientId, Clients, Registry
from fedcore.store.slots import RowFormat
from fedcore.validation import Represented, absolute, check_integer, check_number, is_number, rejection_reason, shorten

BITS, FINEST, LISTED = 62, 1000, 2**20
"""The sum of all clients' integers is at most 2^62, so that it cannot overflow. 2^-1000 is the least unit of floats. An
audit document lists at most 2^20 totals."""
LARGEST, LARGEST_COUNT = 1e280, 2**53 - 1
"""The greatest bounds: the sum of 2^62 such floats is finite, and a float64 holds such a count."""


@dataclass(frozen=True)
class TotalsForm:
    """The names, shapes, dtypes and bounds of totals, and the form of the integers that clients mask.

    A ``SecureServer`` sends it to the clients in place of an ``Encoding``. Each number v is masked as round(v / unit):
    the unit is 1 for integers, and for floats the finest power of two with which the sum of all clients at the bounds
    stays below 2^62.

    Attributes:
        layout: the names, shapes and dtypes.
        bounds: the least and the greatest number of a client, by name.
        clients: the greatest number of clients in a sum.
        round: the round of the totals. A sum of another round does not count.
        noise, min_clients, model, max_norm, exponent: what a ``SecureClient`` checks of an ``Encoding``. A client that
            requires noise, or limits norms, refuses these sums.
    """

    layout: Layout
    bounds: Mapping[str, tuple[float, float]]
    clients: int
    round: int = 0

    noise, min_clients, model, max_norm, exponent = 0.0, 0, "none", math.inf, 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", check_integer("clients", self.clients, 1, 1 << BITS))
        object.__setattr__(self, "round", check_integer("round", self.round, 0))
        most = min(LARGEST_COUNT, (1 << BITS) // self.clients)
        usual = {name: (0, most) if is_count else (-LARGEST, LARGEST) for name, is_count, *_ in self.pieces}
        if wrong := [piece for piece in self.layout.outside if piece.dtype not in INTEGERS]:
            raise DtypeError(f"{wrong[0].name}: expected integers or finite floats, got {wrong[0].dtype}")
        bounds = {**usual, **self.bounds}
        are_pairs = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in bounds.values())
        if not are_pairs or bounds.keys() != usual.keys() or not 0 < len(usual) == len(self.pieces):
            raise ArrayError(f"values, bounds: need different names, and pairs for some of them, got {list(bounds)}")
        for name, (low, high) in bounds.items():
            largest = float(usual[name][1])
            low = check_number(f"bounds[{name!r}]", low, f"[-{largest!r}, {largest!r}]")
            bounds[name] = low, check_number(f"bounds[{name!r}]", high, f"({low!r}, {largest!r}]")
        object.__setattr__(self, "bounds", bounds)

    @cached_property
    def pieces(self) -> list[tuple[str, bool, tuple[int, ...], int]]:
        """For each total its name, whether it is of integers, its shape and its size, in the order of the numbers."""
        kinds = (False, self.layout.slices), (True, self.layout.outside)
        return [(one.name, is_count, one.shape, math.prod(one.shape)) for is_count, pieces in kinds for one in pieces]

    @cached_property
    def words(self) -> int:
        """The number of integers that a client masks."""
        return sum(size for *_, size in self.pieces)

    @cached_property
    def _columns(self) -> F64:
        """For each number of a client, float64[4, words]: its bounds, its unit, and the index of its total."""
        rows = []
        for i, (name, is_count, *_) in enumerate(self.pieces):
            low, high = self.bounds[name]
            exponent = min(FINEST, BITS - math.frexp(self.clients * max(-low, high))[1])
            rows.append((low, high, 1.0 if is_count else 2.0**-exponent, i))
        return np.repeat(np.array(rows, np.float64), [size for *_, size in self.pieces], axis=0).T

    def to_state(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {"layout": self.layout.to_state(), "bounds": self.bounds, "clients": self.clients, "round": self.round}

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Self:
        """Return the form of a message or a document; raise ArrayError if it is malformed."""
        try:
            return cls(**{**state, "layout": Layout.from_state(state["layout"])})
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ArrayError(shorten(f"encoding: malformed: {error}")) from None

    def check(self, values: Any) -> F64:
        """Return a client's numbers as a new vector, float64[words]; raise if they do not fit the form."""
        own = self.layout.flatten_all(as_arrays(values))
        low, high, _, index = self._columns
        if (wrong := np.flatnonzero(~((own >= low) & (own <= high)))).size:
            name, (least, most) = list(self.bounds.items())[int(index[wrong[0]])]
            raise RangeError(f"{name}: each number must be finite and in [{least:g}, {most:g}]")
        return own

    @ieee
    def encode(self, values: Any) -> npt.NDArray[np.uint64]:
        """Return a client's integers, uint64[words], for ``SecureClient.answer``.

        Args:
            values: as for ``TotalsRound.add``.

        Raises:
            ArrayError, DtypeError, ShapeError, RangeError: the values do not fit the form. The client must not send
                them. The message has the bounds and not the number, since a framework may send it to the server.

        Determinism: each float is rounded once, to the nearest even multiple of the unit.
        """
        return np.asarray(np.rint(self.check(values) / self._columns[2]), np.int64).view(np.uint64)

    def partial_sum(
        self,
        totals: "Totals",
        total: npt.NDArray[np.int64],
        clients: Sequence[ClientId],
        rejected: tuple[tuple[ClientId, str], ...] = (),
    ) -> "PartialTotals":
        """Return the sum of encoded values, int64[words], for ``TotalsRound.add_partial_sum``; see ``SecureServer``.

        Raises:
            RangeError: the total cannot be a sum of valid values, or the totals need another form now.
        """
        if totals.encoding() != self:
            raise RangeError("encoding: it belongs to other totals or another round; open the sum for the next round")
        unit, upper = self._columns[2], total >> 32 << 32
        least, most = (len(clients) * np.rint(bound / unit).astype(np.int64) for bound in self._columns[:2])
        if ((total < least) | (total > most)).any():
            raise RangeError("sum: out of bounds; masks hide which client: to find it, sum half of the clients at once")
        return PartialTotals(self, tuple(clients), (upper * unit, (total - upper) * unit), rejected)

    def total(self, parts: Sequence[F64], rule: PrivateMean | None, ledger: Ledger) -> tuple[dict[str, Any], Ledger]:
        """Return the sum of vectors, float64[words], by name, and the ledger after the round; see ``Totals``.

        Integers are exact, and floats are rounded once. With noise, all are floats.
        """
        if rule is None:
            return self._named(self._add(parts, self.layout.n), np.int64), ledger
        bound = np.maximum(-self._columns[0], self._columns[1])
        rows = [part / bound for part in parts]
        factors = np.array([rule.clip / max(rule.clip, math.sqrt(math.fsum(row * row))) for row in rows])
        total = np.array(self._add([row * factor for row, factor in zip(rows, factors, strict=True)], self.words))
        ledger = rule.add_noise(total, factors, ledger, self.round)
        return self._named(total * bound, np.float64), ledger

    def _add(self, parts: Sequence[F64], floats: int) -> list[float]:
        """Return the sum of vectors whose first elements are floats, and the others integers."""
        columns = zip(np.zeros(self.words), *map(np.ndarray.tolist, parts), strict=True)
        return [math.fsum(one) if i < floats else sum(map(int, one)) for i, one in enumerate(columns)]

    def _named(self, total: Any, dtype: Any) -> dict[str, Any]:
        """Return a sum by name; ``dtype`` is that of the totals of integers."""
        named, rest = dict[str, Any](), np.array(total, object)
        for name, is_count, shape, size in self.pieces:
            own, rest = np.split(rest, [size])
            named[name] = own.astype(dtype if is_count else np.float64).reshape(shape)[()]
        return named


def as_arrays(x: Any) -> Any:
    """Return values with Python's numbers as arrays."""
    return {k: np.asarray(v) if is_number(v) else v for k, v in x.items()} if isinstance(x, Mapping) else x


class PartialTotals(NamedTuple):
    """A masked sum of several clients' values, from ``SecureServer.partial_sum``."""

    form: TotalsForm
    clients: tuple[ClientId, ...]
    parts: tuple[F64, ...]
    """float64[words] each, whose sum is that of the clients."""
    rejected: tuple[tuple[ClientId, str], ...]


@dataclass(frozen=True, repr=False)
class TotalsReport(Report):
    """The outcome of a round of totals: a ``Report`` without the fields of models.

    Attributes:
        totals: the totals of the accepted clients by name: int64 or float64 arrays, and NumPy's numbers for totals
            without dimensions. With ``private``, all are float64.
        seconds: the time of ``finish``, without that of the commit to a folder.
        audited: with ``path``, the digest of the round's audit document.
    """

    totals: Mapping[str, Any] = field(default_factory=dict)


class TotalsRound(OpenRound):
    """A round of totals, from ``Totals.open_round``; a context manager.

    The end of the block finishes the round if it is still open. An exception in the block, or ``abort()``, drops it.
    Several threads may add values; each call waits for the call before it.

    Attributes:
        report: the TotalsReport of a finished round, else None.
        is_open: whether values can still be added.
    """

    report: TotalsReport | None

    def __init__(self, totals: "Totals") -> None:
        super().__init__(totals.round_number, totals.callbacks, logging.getLogger("fedcore.totals"))
        self._totals, self._form = totals, replace(totals.form, round=totals.round_number)
        self._accepted: dict[ClientId, F64 | None] = {}  # a masked sum of several clients has two vectors

    def _counts(self) -> dict[str, int]:
        return {"accepted": len(self._accepted), "rejected": len(self._rejected)}

    @ieee
    @one_call
    def add(self, client: ClientId, values: Any, *, round: int | None = None) -> Reply:
        """Add a client's values.

        The round rejects values with other names, shapes, dtypes or numbers, and further values of an accepted client.
        The report lists them, and the round continues. A rejected client may send new values.

        Args:
            values: the client's own sums by name, as for ``Totals``: NumPy, torch or JAX arrays, or numbers. Any float
                dtype fits a float; the dtype of an integer must be that of ``Totals``. They are copied.
            round: the round for which the client computed them. Default: this one.

        Returns:
            A ``Reply``: true if the values count, else false with the reason.

        Raises:
            RoundError: the round is closed.
            UnknownClientError: the client is not registered.

        Cost: keeps 8 bytes for each number until the end of the round.
        """
        self._require_open()
        client = self._totals.clients.check(client)
        try:
            check_integer("round", self._number if round is None else round, self._number, self._number)
            return self._take([client], [self._form.check(values)])
        except Exception as error:  # values of a foreign class may raise anything
            return self._reject(client, error)

    @one_call
    def add_partial_sum(self, partial: PartialTotals, sender: ClientId) -> Reply:
        """Add a masked sum, from ``SecureServer.partial_sum(totals)``.

        The sum is accepted as a whole. It is rejected, and listed in the report with the sender, if it belongs to other
        totals or another round, or if a client is not registered or already part of the round.

        Raises:
            RoundError: the round is closed.
        """
        self._require_open()
        try:
            if not isinstance(partial, PartialTotals) or partial.form != self._totals.encoding():
                raise RangeError("sum: it belongs to other totals or another round")
            return self._take(partial.clients, partial.parts, partial.rejected)
        except FedcoreError as error:
            return self._reject(sender, error)

    def _take(self, clients: Sequence[ClientId], parts: Sequence[F64], rejected: Sequence[Any] = ()) -> Reply:
        if twice := [client for client in clients if self._totals.clients.check(client) in self._accepted]:
            raise RangeError(f"values: the round already has those of client {twice[0]!r}; only the first count")
        self._accepted |= zip_longest(clients, parts)  # one step, so that an interrupt leaves all of it or nothing
        self._rejected += rejected
        self._bytes += sum(part.nbytes for part in parts)
        return Reply("accepted")

    def _reject(self, sender: ClientId, error: Exception) -> Reply:
        self._rejected.append((sender, rejection_reason(error)), is_known=sender in self._totals.clients)
        return Reply("rejected", rejection_reason(error))

    def finish(self) -> TotalsReport:
        """Add up the accepted values, and close the round. With ``path``, its audit document is durable then.

        Log a warning to "fedcore.totals" if all values were rejected.

        Raises:
            RoundError: the round is closed, or has fewer accepted clients than ``min_clients``; then it stays open.
            StoreError: the folder could not be written, for example since the disk is full. The round stays open.

        Cost: about .3 us for each number of each client; with ``path`` also a durable commit of the document.
        """
        report = self._finish()
        self._announce(report)
        return report

    @ieee
    @one_call
    def _finish(self) -> TotalsReport:
        self._require_open()
        if (count := len(self._accepted)) < (least := self._totals.min_clients):
            raise RoundError(f"min_clients={least}: the round has {count} accepted clients; add others, or abort it")
        began, rule = time.perf_counter(), self._totals.private
        parts = [part for part in self._accepted.values() if part is not None]
        totals, ledger = self._form.total(parts, rule, self._totals._ledger)
        with uninterrupted():
            more: dict[str, Any] = {"totals": totals, "privacy": rule and rule.shown(ledger), "bytes": self._bytes}
            facts = self._number, tuple(self._accepted), tuple(self._rejected)
            return self._totals._commit(self, TotalsReport(*facts, **more, seconds=time.perf_counter() - began), ledger)


class Totals(Represented, Unpicklable, AbstractContextManager["Totals"]):
    """Totals of clients' values, such as sums, counts and histograms, in rounds like those of a ``Server``.

    Integers are added exactly. A float is the exact sum of the clients' float64 numbers, rounded once: its error is at
    most half a unit in the last place. No total depends on the order of arrival.

    Masked sums (``fedcore.secure``) first round each client's float to a multiple of a unit, which is at most N B 2^-61
    or 2^-1000, for N registered clients and the greatest bound B. This adds an error of at most half a unit for each
    client. Integers are exact.

    Args:
        values: an example of a client's values by name: arrays, or numbers for totals without dimensions. Only names,
            shapes and dtypes matter. The totals of integers are int64, those of floats float64.
        clients: a count, which registers the ids 0 .. N - 1, or the ids.
        bounds: by name, the least and the greatest number that a client may send; values outside are rejected. Default:
            0 and the lesser of 2^53 - 1 and 2^62 / N for integers, -1e280 and 1e280 for floats. Integers may have no
            wider bounds than -this and this.
        min_clients: the smallest number of accepted clients of a round.
        private: adds Gaussian noise; all totals then need ``bounds``. Each number of a client is divided by its
            greatest bound B. If the vector of all numbers is then longer than ``clip``, it is scaled down to it. The
            sum gets noise of the deviation ``noise`` x ``clip``, and is multiplied by B. ``expected`` has no effect.
            Default: no noise.
        callbacks: functions that are called with the report of each finished round.
        path: a folder for the audit documents; see ``audit_log``. ``finish`` returns once the round's document is
            durable; a crash leaves the round whole or absent. Totals with the same ``values``, ``bounds``, ``clients``
            and ``path`` continue after its last round, with its ledger; the other arguments may differ. One process at
            a time can open it. Default: everything is in memory.
        audit_key: with ``path``, an Ed25519 private key, 32 bytes, that signs each document; it is not stored.

    Attributes:
        form: the names, shapes, dtypes and bounds, as ``TotalsForm``.
        clients: the registered clients.
        round_number: the number of finished rounds, which is the index of the next round.
        min_clients, private, callbacks: as given.

    Raises:
        RangeError, DtypeError, ArrayError: an argument is not valid, or options do not combine.
        CheckpointError: the folder has totals with other values, bounds or clients, or something else, or its log is
            signed by another key.
        CorruptionError: the folder is damaged, or a document was changed.
        LockedError: another ``Totals`` has the folder open.
        StoreError: the folder cannot be created or opened.

    Cost: opening a folder reads and checks all its documents.

    >>> totals = Totals({"count": 0, "sum": 0.0, "histogram": np.zeros(3, int)}, clients=["a", "b"])
    >>> with totals.open_round() as round:
    ...     for site, x in {"a": [0.1, 0.7], "b": [0.2]}.items():
    ...         bins, _ = np.histogram(x, 3, (0, 1))
    ...         reply = round.add(site, {"count": len(x), "sum": float(sum(x)), "histogram": bins})
    >>> {name: total.tolist() for name, total in round.report.totals.items()}
    {'sum': 1.0, 'count': 3, 'histogram': [2, 0, 1]}
    """

    def __init__(
        self,
        values: Any,
        clients: int | Iterable[ClientId],
        *,
        bounds: Mapping[str, tuple[float, float]] | None = None,
        min_clients: int = 0,
        private: PrivateMean | None = None,
        callbacks: Sequence[Callback] = (),
        path: str | os.PathLike[str] | None = None,
        audit_key: bytes | None = None,
    ) -> None:
        self.clients, self._lock = Clients((registry := Registry(clients)).index), RoundLock()
        self.form = TotalsForm(Layout.of(as_arrays(values)), bounds or {}, len(self.clients))
        self.min_clients = check_integer("min_clients", min_clients, 0, len(self.clients))
        self.callbacks, self.round_number, self._ledger = tuple(callbacks), 0, Ledger()
        self.private = private = None if private is None else as_option(PrivateMean, "private", private)
        self._unbounded = self.form.bounds.keys() - (bounds or {}).keys()
        if private is not None and (self._unbounded or private.quantile is not None):
            raise RangeError("private: noise needs bounds of all totals, and a fixed clip; add bounds, and no quantile")
        if private is not None and private.seed is not None and path is not None:
            raise RangeError(f"seed: {SEEDED}; leave path or seed out")
        if audit_key is not None and path is None:
            raise RangeError("audit_key: signs the documents of a folder; pass path too, or leave it out")
        self._key = Storage(audit_key=audit_key).audit_key
        self._store = None if path is None else self._opened(absolute(path), registry)

    _instead = "pass its arguments"

    @property
    def privacy(self) -> Ledger:
        """The ledger of the rounds with noise; ``privacy.epsilon(delta)`` is what they have spent.

        Without ``path`` it is in memory: keep ``privacy.to_state()``, and set ``privacy`` to it after a restart. With
        ``path`` the folder keeps it, and it cannot be set.

        Raises:
            RangeError: the noise is reproducible; or the new value is no ledger, or the totals have a folder.
        """
        if self.private is not None and self.private.seed is not None:
            raise RangeError(f"privacy: {SEEDED}")
        return self._ledger

    @privacy.setter
    def privacy(self, ledger: Ledger | dict[str, Any]) -> None:
        if self._store is not None:
            raise RangeError("privacy: the folder keeps the ledger of its rounds; set it only without path")
        try:
            self._ledger = ledger if isinstance(ledger, Ledger) else Ledger(**ledger)
        except (TypeError, ValueError) as error:
            raise RangeError(f"privacy: must be a Ledger, or its to_state(): {error}") from None

    def _facts(self) -> dict[str, Any]:
        return {"totals": list(self.form.bounds), "clients": len(self.clients), "round_number": self.round_number}

    def _opened(self, path: Path, registry: Registry) -> ClientStore:
        """Open the folder, or create it, and continue after its last round."""
        signer = None if self._key is None else public_key(self._key)
        if not os.path.lexists(path / INDEX):
            first = {"what": TOTALS, "form": self.form.to_state(), "numbers": {"round_number": 0, "audited": None}}
            create(path, RowFormat("f32", 1), registry, {}, first, str)
        with ExitStack() as failed, checkpoint_errors(path):
            failed.callback((store := ClientStore.open(path)).close)
            if (state := store.state or {}).get("what") != TOTALS:
                raise CheckpointError(f"{path}: has no Totals; give a new or empty folder")
            a, b = self.form, TotalsForm.read(state["form"])
            others = (known := store.registry) != registry and (len(known) != len(registry) or {*known} != {*registry})
            differ = sorted(a.pieces) != sorted(b.pieces), a.bounds != b.bounds, others
            for name in compress(("values", "bounds", "clients"), differ):
                raise CheckpointError(f"{name}: {path} has totals with others; pass the same, or a different folder")
            for self.round_number, (_, document) in enumerate(read_audit(path), 1):
                if (by := document.get("signer")) not in (None, signer):
                    raise CheckpointError(f"audit_key: the audit log is signed by {by}; pass its audit_key again")
                self._ledger = Ledger.from_state(document["privacy"])
            failed.pop_all()
        return store

    def _commit(self, round: TotalsRound, report: TotalsReport, ledger: Ledger) -> TotalsReport:
        """Make a round durable, and then current. After an error before that, nothing has changed."""
        store, number, commits = self._store, report.round, getattr(self._store, "commits", 0)
        try:
            if store is not None:
                text = self._document(report, ledger, **store.state)
                report = replace(report, audited=digest_of_text(text))
                numbers = {"round_number": number + 1, "audited": report.audited}
                store.commit(number, state=store.state | {"numbers": numbers}, documents=[(number, text)])
        finally:
            if store is None or store.commits != commits:
                self._ledger, self.round_number, round.report, round.is_open = ledger, number + 1, report, False
        return report

    def _document(self, report: TotalsReport, ledger: Ledger, what: str, form: Any, numbers: Any) -> str:
        """Return the audit document of a round; ``what``, ``form`` and ``numbers`` are the folder's state before it."""
        totals = {name: total.tolist() for name, total in report.totals.items()}
        digest, x = (digest_of_text(json.dumps(one, sort_keys=True)) for one in (totals, form))
        facts = {"what": what, "options": form | {"min_clients": self.min_clients, "private": report.privacy}}
        facts |= {"privacy": ledger.to_state(), "totals": totals if self.form.words <= LISTED else None}
        facts["updates"], facts["digest"] = [{"client": client} for client in report.accepted], digest
        facts["rejected"] = [{"client": client, "reason": reason} for client, reason in report.rejected]
        return document_of(facts, round=report.round, previous=numbers["audited"], x=(x, x), key=self._key)

    def audit_log(self) -> list[Document]:
        """Return the audit documents of the folder, oldest first; an empty list without ``path``.

        Each document has the clients of a round (``updates``), the rejections, the ``totals``, their ``digest``, which
        is BLAKE2b-256 of their JSON with sorted names, the ledger after the round (``privacy``), the ``options``, and
        the digest of the document before it (``previous``). ``x_before`` and ``x_after`` are digests of the form.
        Totals of more than 2^20 numbers are None.

        Raises:
            CorruptionError: a document was changed, or is missing.

        Cost: reads all documents.
        """
        return [] if self._store is None else [one for _, one in read_audit(absolute(self._store.path or ""))]

    def close(self) -> None:
        """Close the folder, so that other ``Totals`` can open it. The end of a ``with`` block closes it too."""
        if self._store is not None:
            self._store.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def encoding(self) -> TotalsForm:
        """Return the form of the next round's masked integers, for ``SecureServer``.

        Raises:
            RangeError: the totals have noise, or a float has no bounds.
        """
        if self.private is not None:
            raise RangeError("private: noise under masks is not implemented for totals; leave private out")
        if missing := self._unbounded.intersection(self.form.layout.names):
            raise RangeError(f"bounds: masked sums need those of floats, which set the unit; add {min(missing)!r}")
        return replace(self.form, round=self.round_number)

    def open_round(self) -> TotalsRound:
        """Open a round; raise RoundError if a round is open, or if the budget of ``private`` is spent."""
        if self.private is not None:
            self.private.require_budget(self._ledger)
        return self._lock.open(self.round_number, lambda: TotalsRound(self))
