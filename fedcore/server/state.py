"""The changes of a server's state by a finished round: all at once, in memory and in the store."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from fedcore import devices, kernels
from fedcore.aggregation import (
    Aggregator,
    Alone,
    Opened,
    Replies,
    Result,
    Sum,
    Whole,
    combined_square,
    longest_term,
    longest_update,
)
from fedcore.algorithms import Cohort, check_step
from fedcore.clients import ClientId
from fedcore.clients.registry import canonical
from fedcore.errors import RangeError, StoreError
from fedcore.float_mode import ieee
from fedcore.interrupts import uninterrupted
from fedcore.kernels import ExactSum, Linear
from fedcore.memory import Recycled, empty, freeze, zeros
from fedcore.server.asked_square import AskedSquare
from fedcore.server.audit import digest_of_text
from fedcore.server.awaited_clients import AwaitedClients
from fedcore.server.buffers import Buffers, grown
from fedcore.server.claim_window import ClaimWindows
from fedcore.server.download import Download
from fedcore.server.gamma import believed_steps, claimless_gamma, farthest_gamma, step_length
from fedcore.server.history import History, fold_history
from fedcore.server.model_step import ModelStep
from fedcore.server.newcomers import Coming, Newcomers
from fedcore.server.population import Population, Sizes, checked_sizes
from fedcore.server.prepared_step import PreparedStep
from fedcore.server.running_total import without_client
from fedcore.server.settings import Settings
from fedcore.server.snapshot import Snapshot
from fedcore.server.upload import Upload
from fedcore.server.warm_start import WarmStart, require_start
from fedcore.store import ClientStore
from fedcore.typing import F32, F64, Floats


class State:
    """The snapshot that counts, the rows, and how a round changes both: it is prepared, looked at, and accepted."""

    def __init__(self, settings: Settings, snapshot: Snapshot, store: ClientStore, whole: Whole | None = None) -> None:
        n, p, device = settings.layout.n, settings.layout.n_parameters, settings.device
        self.whole: Whole = Alone(has_buffers=n > p) if whole is None else whole
        self.snapshot = snapshot
        self.store = store
        self._aggregator: Aggregator = Sum(settings.algorithm, settings.layout, settings.accumulate, device=device)
        self.settings = settings
        self.newcomers = Newcomers(store, weighs_shares=settings.algorithm.needs_shares)
        self.upper_population = 0  # where an edge's sums go
        self._shared: F32 | None = None
        self._zeros: F32 | None = None
        self._offsets = Recycled(p, device=device)
        self.lent = Recycled(n, most=settings.fold, device=device)  # to clients' replies: ``Round.buffer``
        self.upload = None if device == devices.CPU else Upload(device, {n, p}, settings.fold)
        self._download = None if device == devices.CPU else Download(device, 8 * n)
        self.waiting = AwaitedClients()
        self.claimed = ClaimWindows()
        self.buffers = Buffers(settings.layout, settings.nonnegative, device)
        self._model = ModelStep(settings, self.buffers, self.whole)

    def begin(self, newcomers: Coming) -> Aggregator:
        """Begin a round, in which those who are new may come; returns what folds its replies.

        Raises:
            RangeError, UnknownClientError: a newcomer is registered already, or is no id, or its size is not what was
                due; there is no round then.
        """
        self.store.require_files()
        self.abandon()
        now, offset = self.snapshot, self.shared_offset()  # c as it was sent: of those who were there before newcomers
        longest = longest_update(farthest_gamma(self.settings, now), squared=self.settings.takes_squares)
        term = longest_term(max(len(self.store.registry), self.upper_population))
        self._aggregator.begin(Opened(now.round_number, self.store, now.history.get, offset, longest, term, self.whole))
        sizes = None
        if ids := list(newcomers):
            given = newcomers if isinstance(newcomers, Mapping) else None
            sizes = checked_sizes(ids, given, sized=self._is_sized(given is not None))
        self.newcomers.admit(ids, sizes, now)
        return self._aggregator

    @property
    def population(self) -> Population:
        """The population of the open round: with those who may come."""
        return self.newcomers.population or self.snapshot.population

    def abandon(self) -> None:
        """Forget what a round has left that was never finished: the rows that it staged, and who would have come."""
        self.newcomers.forget()
        self.store.discard()

    def close(self) -> None:
        """Forget what was never finished, and close the store."""
        try:
            self.abandon()
        finally:
            self.store.close()

    def _is_sized(self, told: bool) -> bool:
        """Tell whether clients that arrive have sizes."""
        # Where nobody is there, whoever comes first says it.
        told = told and not len(self.store.registry)
        return told or self.settings.algorithm.needs_shares or self.snapshot.population.is_sized

    def shared_offset(self) -> F32 | None:
        """from_mean c + from_momentum g, float32[n_parameters] and read-only; None for zero. Made once a round."""
        direction, now = self.settings.algorithm.direction, self.snapshot
        if self._shared is None and (direction.from_mean or direction.from_momentum):
            per_row = direction.from_mean / max(1, len(self.store.registry))
            terms = [(now.momentum, direction.from_momentum), (now.total, per_row)]
            self._shared = self._combined(terms, self._offsets.take())
            freeze(self._shared)
        return self._shared

    @ieee
    def offset(self, client: ClientId, out: Any, *, is_new: bool = False) -> Any:
        """A client's offset; see ``Broadcast.offset``. Who is new has a row of zeros."""
        self.store.require_files()
        shared, from_row = self.shared_offset(), self.settings.algorithm.direction.from_row
        row = self.store.read(client) if from_row and self.settings.algorithm.keeps_rows and not is_new else None
        if shared is None and row is None:
            return self._no_offset(out)
        if row is None and out is None:
            return shared
        return self._combined([(shared, 1.0), (row, from_row)], out)

    def _combined(self, terms: Sequence[tuple[Floats | None, float]], out: Any) -> Any:
        """The linear combination of vectors and their coefficients, without those that are None."""
        given = [(vector, c) for vector, c in terms if vector is not None]
        out = empty(self.settings.layout.n_parameters, device=self.settings.device) if out is None else out
        return kernels.combine([vector for vector, _ in given], [c for _, c in given], out)

    def _no_offset(self, out: Any) -> Any:
        """Zeros, float32[n_parameters] and read-only: of the system's own page of zeros, and made once for all."""
        if self._zeros is None:
            self._zeros = zeros(self.settings.layout.n_parameters, device=self.settings.device)
            freeze(self._zeros)
        return self._zeros if out is None else kernels.combine([self._zeros], [0.0], out)

    @ieee
    def correction(self, client: ClientId) -> F64:
        """c_i = v[t_i] - r_i, float64[n_parameters]; zero for a client without a row."""
        self.store.require_files()
        p, device = self.settings.layout.n_parameters, self.settings.device
        if (round := self.store.round_of(client)) is None:
            return zeros(p, np.float64, device=device)
        terms, out = (
            [(self.store.read(client), -1.0), (self.snapshot.history.get(round), 1.0)],
            empty(p, np.float64, device=device),
        )
        correction: F64 = self._combined(terms, out)
        return correction

    def cohort(
        self,
        heard: Replies,
        population: Population,
        result: Result,
        believed: tuple[F64, F64, int | None],
        measure: AskedSquare,
        rounds: list[int | None],
    ) -> Cohort:
        """The cohort in the papers' symbols."""
        steps, eta_steps, most_steps = believed
        rows, algorithm = len(self.store), self.settings.algorithm
        if algorithm.keeps_rows:
            rows += rounds.count(None)
        N = len(self.store.registry)
        return Cohort(
            S=len(heard),
            weighed=int(np.count_nonzero(heard.weights)),
            # c = T / N is what was sent, before anybody came with the round
            N=max(1, self.newcomers.before) if algorithm.direction.from_mean else N,
            devices=N + len(population.included),
            W=result.W * self.newcomers.share_of_total,
            rows=rows,
            claims=heard.claims if most_steps is None else replace(heard.claims, steps=steps),
            weights=heard.weights,
            squares=heard.squares,
            eta_steps=eta_steps,
            measure=measure,
        )

    def prepare(self, result: Result, heard: Replies, norms: Mapping[str, Floats]) -> PreparedStep:
        """The round's step with the cohort's sums; nothing that counts has changed yet.

        Args:
            heard: the cohort.
            norms: of the replies heard lately, those of the round among them.

        Raises:
            DivergedError: x would become infinite or NaN.
        """
        algorithm, now = self.settings.algorithm, self.snapshot
        population, number = self.newcomers.settle(heard.clients, now), now.round_number
        steps = self.claimed.of("steps", self.settings.limits.steps_ratio, now.norms)
        believed = believed_steps(self.settings, self.snapshot, heard, steps)
        asked = AskedSquare(lambda: combined_square(self.whole, [result.A], [1.0]))
        rounds = self.store.rounds_of(heard.clients) if algorithm.keeps_rows else []
        cohort = self.cohort(heard, population, result, believed, asked, rounds)
        norms = {**norms, "steps": steps.packed} if len(steps) else norms
        moves = cohort.N > 0 and asked.answer(algorithm.moves, cohort)
        changes: dict[str, Any] = {"round_number": number + 1, "norms": norms, "population": population}
        if late := self.settings.late_rounds:
            # x of every round, whether it moved or not: a client may have started from it.
            past = {**now.past, number: now.sent}
            starts = {**now.starts, **dict(zip(heard.clients, heard.starts.tolist(), strict=True))}
            changes["past"] = {t: x for t, x in past.items() if t > number - late}
            changes["starts"] = {client: t for client, t in starts.items() if t > number - late}
        waits = not moves and algorithm.keeps_rows and asked.answer(algorithm.moves, replace(cohort, rows=cohort.N))
        awaited = cohort.N - cohort.rows if waits else 0
        step, v_square, gamma = None, 0.0, 0.0
        if (
            cohort.W > 0 or moves or (len(heard) and algorithm.keeps_rows)
        ):  # rows that changed are in T whatever they weigh
            step = check_step(algorithm, asked.answer(algorithm.step, cohort))
            if (share := self.newcomers.share_of_total) != 1:
                step = replace(step, v=step.v._replace(A=step.v.A * share), T=step.T._replace(A=step.T.A * share))
            # Kept also of a round in which x waits: one without clients may come next, and step.
            changes["gamma"] = step_length(self.settings, now, cohort, step.gamma)
            gamma = changes["gamma"] if moves else 0.0
            vectors, v_square = self._model.take(now, result, step, gamma, heard)
            changes |= vectors
            if moves:
                counters = grown(now.counters, heard.counters)
                x_prev = now.sent if algorithm.direction.b else changes["x"]  # not kept for those who never send it
                changes |= {"x_prev": x_prev, "counters": counters}
            if algorithm.keeps_history and len(heard):
                history = now.history.after(number, changes["momentum"], len(heard), rounds)
                total = changes["total"] if changes["exact_total"] is None else changes["exact_total"]
                changes["history"] = self._bounded(history, total, number, heard.clients)
                if changes["exact_total"] is not None and len(changes["history"]) < len(history):
                    kernels.read_exact(changes["exact_total"], changes["total"])
        after = now._replace(changed={}, **changes)
        return PreparedStep(now, result, cohort, after, step, v_square, gamma, awaited, believed[-1], rounds)

    def step_by_mean(self, ys: list[Any], scales: F64, weights: F64) -> tuple[Snapshot, F64, float] | None:
        """The snapshot after a round of FedAvg, |h_i|^2, and that of their mean, as ``prepare`` makes them.

        None, and nothing has changed, where a reply may have to be refused, or x would diverge.
        """
        now, model, gamma = self.snapshot, self._model, claimless_gamma(self.settings, self.snapshot)
        assert isinstance(self._aggregator, Sum)
        assert gamma is not None
        folded = self._aggregator.fold_at_once(now.x, ys, scales, weights)
        if folded is None:
            return None
        A, W, squares = folded
        x, v_of = model.vectors.take(), Linear(1 / W)
        v_square, x_square = kernels.server_step(
            A, None, now.x, v_of=v_of, gamma=gamma, v=model.spare_v, total_out=None, x_out=x
        )
        if not math.isfinite(x_square):
            return None
        freeze(x)
        after = now._replace(
            x=x, x_prev=x, momentum=model.spare_v, round_number=now.round_number + 1, gamma=gamma, changed={}
        )
        return after, squares, v_square / (1 / W * W) ** 2

    def accept(self, after: Snapshot, document: str | None = None) -> None:
        """Make everything that the round changed count, and keep its document.

        Raises:
            StoreError: the store could not keep the round; nothing was changed.
        """
        after = after if document is None else after._replace(audited=digest_of_text(document))
        self._become(after, self.snapshot.round_number, document)
        self.newcomers.forget()  # those that are left are no newcomers

    def _bounded(
        self, history: History, total: F64 | ExactSum | None, round: int, heard: Sequence[ClientId]
    ) -> History:
        """The history, with as many rounds as may be kept; the total follows the rows that others are folded into."""
        surplus = history.surplus(self.settings.history_rounds) if self.settings.algorithm.folds_history else []
        if surplus:
            assert total is not None
            staged, at_once = frozenset(heard), self.settings.fold
            fold_history(
                self.store, history, surplus, total, round=round, staged=staged, at_once=at_once, whole=self.whole
            )
        return history.folded(surplus)

    def _become(self, after: Snapshot, round: int, document: str | None = None) -> None:
        """Let the store keep the rows of the round and the snapshot, and then believe it.

        What the store has accepted is believed whatever comes after it.
        """
        before, commits = self.snapshot, self.store.commits
        after = after._replace(transactions=before.transactions + 1)
        spare_v = before.momentum
        if after.momentum is not before.momentum and self.settings.algorithm.keeps_history:
            spare_v = (
                self._model.directions.take()
            )  # the other stays v[t]; now, since after the commit nothing may fail
        self.whole.ready()
        try:
            self.keep(after, round, document)
            self._adopt(before, after, spare_v)
        except BaseException:
            if self.store.commits != commits:
                self._adopt(before, after, spare_v)
            raise
        if self.store.medium == "mmap":
            with suppress(StoreError, MemoryError):  # else it stays in memory, where it is as good
                self.snapshot = after.on_disk(self.store)

    def _adopt(self, before: Snapshot, after: Snapshot, spare_v: F32) -> None:
        """Believe a snapshot. Twice is as once."""
        model = self._model
        spare_v = model.spare_v if after.momentum is before.momentum else spare_v
        spare_total = model.spare_total if after.total is before.total else before.total
        spare_exact = model.spare_exact if after.exact_total is before.exact_total else before.exact_total
        spares = spare_v, spare_total, spare_exact
        # In one statement, within which no exception can come from outside.
        self.snapshot, self._shared, (model.spare_v, model.spare_total, model.spare_exact) = after, None, spares

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Changes to the store that count together at the block's end, by ``_become``, or not at all."""
        commits, settings = self.store.commits, self.settings
        with uninterrupted():
            try:
                yield
            except BaseException:
                if self.store.commits == commits:
                    self.settings = settings
                    self.store.rollback()
                raise

    def keep(self, after: Snapshot, round: int, document: str | None = None) -> None:
        """Commit the staged rows and who came or went, and on a disk the snapshot with them."""
        if self.store.medium == "mmap":
            self.store.commit(round, self._vectors(after), self.to_state(after), document=document)
        elif self.settings.algorithm.keeps_rows or self.store.is_ahead or document is not None:
            self.store.commit(round, document=document)

    def _vectors(self, snapshot: Snapshot) -> dict[str, Any]:
        """The snapshot's vectors as the store takes them: in host memory, or where it has them already."""
        vectors = snapshot.vectors(self.settings.algorithm)
        if self._download is None:
            return vectors
        # v[t] never changes: one that is in the store need not be brought, nor written, again.
        known = [name for name in vectors if name.startswith("v/") and name in self.store.vector_names()]
        return self._download.brought(vectors | {name: self.store.vector(name) for name in known})

    def to_state(self, snapshot: Snapshot) -> dict[str, Any]:
        """The fields that are no arrays, as JSON can hold them."""
        return {
            "what": "a fedcore server",
            "medium": self.store.medium,
            "undoable": self.store.undoable,
            "device": self.settings.device,
            "clients": len(self.store.registry),
            "settings": self.settings.to_state(snapshot.round_number),
            "numbers": snapshot.numbers(),
        } | ({} if self.whole.place is None else {"place": self.whole.place})

    def save(self, path: str | os.PathLike[str]) -> None:
        """See ``Server.save``."""
        self.store.save(path, vectors=self._vectors(self.snapshot), state=self.to_state(self.snapshot))

    @ieee
    def arrive(self, clients: list[ClientId], client_sizes: Sizes | None) -> None:
        """See ``Server.arrive``."""
        now = self.snapshot
        sizes = checked_sizes(clients, client_sizes, sized=self._is_sized(client_sizes is not None))
        with self._changing():
            ids = list(map(canonical, clients))
            numbers = self.store.add_all(ids)
            self.repopulate(now.population.with_clients(numbers, ids, sizes, now.round_number))

    def change(self, settings: Settings, after: Snapshot) -> None:
        """Let other settings count from the next round on, and a snapshot that names what changed."""
        with self._changing():
            self.settings = settings
            self._become(after, after.round_number)

    def repopulate(self, population: Population) -> None:
        """Let another population count from the next round on."""
        with self._changing():
            self._become(self.snapshot._replace(population=population), self.snapshot.round_number)

    @ieee
    def depart(self, client: ClientId, from_objective: bool) -> None:
        """See ``Server.depart``."""
        if self.settings.algorithm.rows_at_clients:
            raise RangeError(
                f"client: expected one whose row is on the server, got {client!r}, which keeps its own: leave it "
                "registered"
            )
        client, now = self.store.registry.check(client), self.snapshot
        number = self.store.registry.number(client)
        population = now.population.without_client(number, client, from_objective=from_objective)
        after = now._replace(population=population, history=now.history.without([self.store.round_of(client)]))
        if now.total is not None and self.store.round_of(client) is not None:
            if not self.settings.algorithm.total_sums_rows:
                raise RangeError(
                    f"client: expected a method whose T is the sum of its rows, of which {client!r} can be taken out, "
                    f"got {self.settings.algorithm}: leave it registered"
                )
            kept = self.settings.algorithm.keeps_history
            part = self.correction if kept else self.store.read
            changed = without_client(now, client, self.store, part, corrections=kept)
            after = after._replace(total=changed.total, exact_total=changed.exact_total)
        with self._changing():
            self.store.forget(client)
            self._become(after, now.round_number)

    @ieee
    def warm_start(self, gradients: Mapping[ClientId, Any]) -> None:
        """See ``Server.warm_start``."""
        now = self.snapshot
        require_start(self.settings, now, self.whole)
        given = WarmStart(self.settings, self.store, self.whole, self._model.directions, gradients, self.upload)
        with self._changing():
            self._become(given.after(now), now.round_number)
