"""How a finished round changes what a server knows: all at once, in memory and in the store."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Cohort, check_step
from fedcore.aligned import Recycled
from fedcore.errors import ArrayError, CorruptionError, DivergedError, RangeError, RoundError, StoreError
from fedcore.float_mode import ieee
from fedcore.server.buffers import Buffers, grown
from fedcore.server.claimed import ClaimedLately
from fedcore.server.corrections import corrections, mean_square
from fedcore.server.exchanging import exchange
from fedcore.server.folding import fold_history
from fedcore.server.gamma import farthest_gamma, step_length
from fedcore.server.limits import MEDIANS
from fedcore.server.newcomers import Coming, Newcomers
from fedcore.server.outcome import Outcome
from fedcore.server.population import Population, Sizes, checked_sizes
from fedcore.server.rounding import rounding_keys
from fedcore.server.settings import Settings
from fedcore.server.snapshot import Snapshot
from fedcore.server.sums import Sums, longest_update
from fedcore.server.tally import Tally
from fedcore.server.uninterrupted import uninterrupted
from fedcore.server.waiting import Waiting
from fedcore.store import ClientId, ClientStore, History

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


class State:
    """The snapshot of now, the rows, and the sums of the open round."""

    def __init__(self, settings: Settings, snapshot: Snapshot, store: ClientStore) -> None:
        p = settings.layout.n_parameters
        self.now = snapshot
        self.store = store
        self.sums = Sums(settings.algorithm, settings.layout, settings.accumulate)
        self.settings = settings
        self.newcomers = Newcomers(store)
        self._shared: F32 | None = None
        self._zeros: F32 | None = None
        self._vectors = Recycled(settings.layout.n)
        self._spare_v = np.empty(p, np.float32)
        self._spare_total = None if snapshot.total is None else np.empty(p, np.float64)
        self.waiting = Waiting()
        self.claimed = ClaimedLately()
        self.buffers = Buffers(settings.layout, settings.nonnegative)
        self._buffer_v = np.empty(settings.layout.n - p, np.float32)

    def begin(self, newcomers: Coming) -> None:
        """Begin a round, in which those who are new may come.

        Raises:
            RangeError, UnknownClientError: a newcomer is registered already, or is no id, or its size is not what was
                due; there is no round then.
        """
        self.abandon()
        algorithm = self.settings.algorithm
        known = None
        if algorithm.needs_plain_steps and (shared := self.shared_offset()) is not None:
            known = -shared / np.float32(algorithm.direction.a)
        longest = longest_update(farthest_gamma(self.settings, self.now), squared=self.settings.optimizer is not None)
        self.sums.clear(self.store, self.now.history, known, self.now.round_number, longest)
        self.shared_offset()  # c as it was sent: of those who were there before the newcomers
        ids, sizes = list(newcomers), newcomers if isinstance(newcomers, Mapping) else None
        self.newcomers.admit(ids, checked_sizes(ids, sizes, sized=self._is_sized(sizes is not None)), self.now)

    @property
    def population(self) -> Population:
        """That of the open round: with those who may come."""
        return self.newcomers.population or self.now.population

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
        """Whether clients that arrive have sizes."""
        # Where nobody is there, whoever comes first says it.
        told = told and not len(self.store.registry)
        return told or self.settings.algorithm.needs_shares or self.now.population.is_sized

    def shared_offset(self) -> F32 | None:
        """from_mean c + from_momentum g, float32[n_parameters] and read-only; None for zero. Made once a round."""
        direction, now = self.settings.algorithm.direction, self.now
        if self._shared is None and (direction.from_mean or direction.from_momentum):
            wide: F64 = direction.from_momentum * now.momentum.astype(np.float64)
            if now.total is not None:
                wide += (direction.from_mean / max(1, len(self.store.registry))) * now.total
            self._shared = wide.astype(np.float32)
            self._shared.flags.writeable = False
        return self._shared

    @ieee
    def offset(self, client: ClientId, out: Any, *, is_new: bool = False) -> Any:
        """A client's offset; see ``Broadcast.offset``. Who is new has a row of zeros."""
        shared, from_row = self.shared_offset(), self.settings.algorithm.direction.from_row
        row = self.store.read(client) if from_row and self.settings.algorithm.keeps_rows and not is_new else None
        if shared is None and row is None:
            return self._no_offset(out)
        if row is None and out is None:
            return shared
        terms = [(vector, c) for vector, c in ((shared, 1.0), (row, from_row)) if vector is not None]
        return kernels.direction_offset([vector for vector, _ in terms], [c for _, c in terms], out)

    def _no_offset(self, out: Any) -> Any:
        """Zeros, float32[n_parameters] and read-only: of the system's own page of zeros, and made once for all."""
        if out is not None:
            out[:] = 0
            return out
        if self._zeros is None:
            self._zeros = np.zeros(self.settings.layout.n_parameters, np.float32)
            self._zeros.flags.writeable = False
        return self._zeros

    @ieee
    def correction(self, client: ClientId) -> F64:
        """c_i = v[t_i] - r_i, float64[n_parameters]; zero for a client without a row."""
        row, v = self.store.row(client), self.now.history.get(self.store.round_of(client))
        if row is None:
            return np.zeros(self.settings.layout.n_parameters)
        correction = -self.store.read(client).astype(np.float64)
        return correction if v is None else correction + v

    def cohort(self, tally: Tally, population: Population) -> Cohort:
        """The cohort in the papers' symbols."""
        rows, algorithm = len(self.store), self.settings.algorithm
        if algorithm.keeps_rows:
            rows += sum(self.store.row(client) is None for client in tally.clients)
        N = len(self.store.registry)
        return Cohort(
            S=len(tally.clients),
            weighed=tally.weighed,
            # c = T / N is what was sent, before anybody came with the round
            N=max(1, self.newcomers.before) if algorithm.direction.from_mean else N,
            devices=N + len(population.included),
            W=self.sums.weight * self.newcomers.share_of_total,
            rows=rows,
        )

    def commit(self, tally: Tally, norms: Mapping[str, npt.NDArray[np.floating[Any]]]) -> Outcome:
        """Take the round's step with the cohort's sums, and make everything that the round changed count.

        Args:
            tally: the cohort.
            norms: of the replies heard lately, those of the round among them.

        Raises:
            DivergedError: x would become infinite or NaN; nothing was changed.
            StoreError: the store could not keep the round; nothing was changed.
        """
        algorithm, now = self.settings.algorithm, self.now
        population, number = self.newcomers.settle(tally.clients, now), now.round_number
        cohort = self.cohort(tally, population)
        steps = self.claimed.of("steps", MEDIANS, now.norms)
        gamma, most_steps = step_length(self.settings, now, tally, steps)
        norms = {**norms, "steps": steps.packed} if len(steps) else norms
        moves = cohort.N > 0 and algorithm.moves(cohort)
        late = self.settings.late_rounds
        # x of every round, whether it moved or not: a client may have started from it.
        past = {t: x for t, x in {**now.past, number: now.x}.items() if t > number - late} if late else {}
        changes: dict[str, Any] = {"round_number": number + 1, "past": past, "norms": norms, "population": population}
        outcome = Outcome(most_steps=most_steps)
        if cohort.W > 0 or moves:
            outcome = self._step(cohort, gamma if moves else 0.0, tally, changes, outcome)
            changes["gamma"] = gamma  # also of a round in which x waits: one without clients may come next, and step
            if moves:
                counters = grown(now.counters, tally.counters)
                x_prev = now.x if algorithm.direction.b else changes["x"]  # not kept for those who never send it
                changes |= {"x_prev": x_prev, "counters": counters}
            if algorithm.keeps_history and tally.clients:
                before = [self.store.round_of(client) for client in tally.clients]
                history = now.history.after(number, changes["momentum"], len(tally.clients), before)
                changes["history"] = self._bounded(history, changes["total"], number, tally.clients)
        self._become(replace(now, **changes), number)
        self.newcomers.forget()  # those that are left are no newcomers
        if moves or not algorithm.keeps_rows or not algorithm.moves(replace(cohort, rows=cohort.N)):
            return outcome
        return replace(outcome, awaited=cohort.N - cohort.rows)

    def _bounded(self, history: History, total: F64 | None, round: int, heard: Sequence[ClientId]) -> History:
        """The history, with as many rounds as may be kept; the total follows the rows that others are folded into."""
        surplus = history.surplus(self.settings.history_rounds)
        if surplus:
            assert total is not None
            staged, at_once = frozenset(heard), self.settings.fold
            fold_history(self.store, history, surplus, total, round=round, staged=staged, at_once=at_once)
        return history.folded(surplus)

    def _become(self, after: Snapshot, round: int) -> None:
        """Let the store keep the rows of the round and the snapshot, and then believe it.

        What the store has accepted is believed whatever comes after it.
        """
        before, commits = self.now, self.store.commits
        spare_v = before.momentum
        if after.momentum is not before.momentum and self.settings.algorithm.keeps_history:
            spare_v = np.empty_like(spare_v)  # the other stays v[t]; now, since after the commit nothing may fail
        try:
            self.keep(after, round)
            self._adopt(before, after, spare_v)
        except BaseException:
            if self.store.commits != commits:
                self._adopt(before, after, spare_v)
            raise
        if self.store.medium == "mmap":
            with suppress(StoreError, MemoryError):  # else it stays in memory, where it is as good
                self.now = after.on_disk(self.store)

    def _adopt(self, before: Snapshot, after: Snapshot, spare_v: F32) -> None:
        """Believe a snapshot. Twice is as once."""
        spare_v = self._spare_v if after.momentum is before.momentum else spare_v
        spare_total = self._spare_total if after.total is before.total else before.total
        # In one statement, within which no exception can come from outside.
        self.now, self._spare_v, self._spare_total, self._shared = after, spare_v, spare_total, None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Changes to the store that count together at the block's end, by ``_become``, or not at all."""
        commits = self.store.commits
        with uninterrupted():
            try:
                yield
            except BaseException:
                if self.store.commits == commits:
                    self.store.rollback()
                raise

    def keep(self, after: Snapshot, round: int) -> None:
        """Commit the staged rows and who came or went, and on a disk the snapshot with them."""
        if self.store.medium == "mmap":
            self.store.commit(round, after.vectors(self.settings.algorithm), self.to_state(after))
        elif self.settings.algorithm.keeps_rows or self.store.is_ahead:
            self.store.commit(round)

    def to_state(self, snapshot: Snapshot) -> dict[str, Any]:
        """What is no array, as JSON can hold it."""
        return {
            "what": "a fedcore server",
            "medium": self.store.medium,
            "clients": len(self.store.registry),
            "settings": self.settings.to_state(snapshot.round_number),
            "numbers": snapshot.numbers(),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """See ``Server.save``."""
        self.store.save(path, vectors=self.now.vectors(self.settings.algorithm), state=self.to_state(self.now))

    def _step(self, cohort: Cohort, gamma: float, tally: Tally, changes: dict[str, Any], outcome: Outcome) -> Outcome:
        """Put the x, v, T and moments that the sums lead to into the changes of the snapshot."""
        now, p = self.now, self.settings.layout.n_parameters
        step = check_step(self.settings.algorithm, self.settings.algorithm.step(cohort))
        share = self.newcomers.share_of_total
        step = replace(step, from_sum=step.from_sum * share, keep_sum=step.keep_sum * share)
        x = self._vectors.take()  # never in place: a client may still train on the x of this round
        v_square, x_square = kernels.server_step(
            self.sums.parameters,
            now.total,
            now.x[:p],
            from_sum=step.from_sum,
            from_total=step.from_total,
            from_momentum=step.from_momentum,
            keep_sum=step.keep_sum,
            keep_control=step.keep_control,
            keep_v=step.keep_v,
            gamma=gamma,
            momentum=now.momentum if step.from_momentum else None,
            control=self.sums.controls,
            v=self._spare_v,
            total_out=self._spare_total,
            x_out=x[:p],
        )
        moments = now.moments
        if self.settings.optimizer is not None and gamma:
            u, moments = self.settings.optimizer.turn(self._spare_v, now.moments)
            np.subtract(now.x[:p], np.float32(gamma) * u, out=x[:p])
            x_square = float(kernels.squared_norms([x[:p]])[0])
        if p < len(x):
            x_square += self._average_buffers(x)
            self.buffers.clip(x)
        if not np.isfinite(x_square):
            raise DivergedError(
                f"round {now.round_number}: the step gamma = {gamma:g} along v, |v| = {v_square**0.5:g}, would make "
                f"x infinite or NaN; x stays, lower the rates{tally.longest()}"
            )
        x.flags.writeable = False
        corrected = corrections(self, tally, self._spare_v)
        square = mean_square(self, cohort, step, v_square)
        square = corrected.mean_square if square is None else square
        x = x if gamma else now.x
        changes |= {"x": x, "momentum": self._spare_v, "total": self._spare_total, "moments": moments}
        return replace(outcome, gamma=gamma, mean_square=square, correction_norm=corrected.norm)

    def _average_buffers(self, x: F32) -> float:
        """The cohort's mean of the float buffers into the tail of x; returns its squared norm."""
        p = self.settings.layout.n_parameters
        _, square = kernels.server_step(
            self.sums.buffers,
            None,
            self.now.x[p:],
            from_sum=1 / self.sums.buffer_weight if self.sums.buffer_weight > 0 else 0.0,
            gamma=1.0,
            v=self._buffer_v,
            total_out=None,
            x_out=x[p:],
        )
        return square

    @ieee
    def arrive(self, clients: list[ClientId], examples: Sizes | None) -> None:
        """See ``Server.arrive_all``."""
        now = self.now
        sizes = checked_sizes(clients, examples, sized=self._is_sized(examples is not None))
        with self._changing():
            numbers = self.store.add_all(clients)
            ids = [self.store.registry.id_of(number) for number in numbers]
            population = now.population.with_clients(numbers, ids, sizes, now.round_number)
            self._become(replace(now, population=population), now.round_number)

    @ieee
    def depart(self, client: ClientId, from_objective: bool) -> None:
        """See ``Server.depart``."""
        if self.settings.algorithm.placement == "client":
            raise RangeError(f"client: expected a row on the server, but {client!r} keeps its own: leave it registered")
        client, now = self.store.registry.check(client), self.now
        number = self.store.registry.number(client)
        population = now.population.without_client(number, client, from_objective=from_objective)
        after = replace(now, population=population, history=now.history.without([self.store.round_of(client)]))
        if now.total is not None and self.store.round_of(client) is not None:
            after = replace(after, total=self._total_without(client, now.total))
        with self._changing():
            self.store.forget(client)
            self._become(after, now.round_number)

    def _total_without(self, client: ClientId, total: F64) -> F64:
        """T without a client's part: the sum of all rows, or MimiC's of all corrections v[t_i] - r_i."""
        part = self.correction if self.settings.algorithm.keeps_history else self.store.read
        try:
            return total - part(client)
        except CorruptionError:  # nobody knows what it was: the others are added up anew
            rest = np.zeros_like(total)
            for other in self.store.registry:
                with suppress(CorruptionError):  # a part that can be read no more is in no sum either
                    rest += 0 if other == client else part(other)
            return rest

    @ieee
    def warm_start(self, gradients: Mapping[ClientId, Any]) -> None:
        """See ``Server.warm_start``."""
        algorithm, now, k = self.settings.algorithm, self.now, len(gradients)
        if now.round_number or now.momentum.any() or (now.total is not None and now.total.any()):
            raise RoundError("warm_start: expected a server before its first round, and before another warm start")
        if not algorithm.takes_warm_start:
            raise RangeError("warm_start: expected a method that can start from gradients: SCAFFOLD, MIFA or a -VR")
        clients, ys, none, minus, ones = list(gradients), list(gradients.values()), [None] * k, -np.ones(k), np.ones(k)
        mean = np.zeros(self.settings.layout.n_parameters)
        squares = kernels.accumulate(mean, none, ys, minus, ones / k, out=mean)
        if not np.isfinite(squares).all():
            bad = clients[int(np.flatnonzero(~np.isfinite(squares))[0])]
            raise ArrayError(f"gradients[{bad!r}]: expected finite numbers, got a NaN or an infinity")
        after = now
        with self._changing():
            if now.total is not None:
                total = now.total.copy()
                if algorithm.keeps_rows:
                    new = [self.store.stage(client) for client in clients]
                    keys = rounding_keys(self.store, "a warm start", now.round_number, clients)
                    exchange(total, none, ys, minus, ones, none, none, new, out=total, keys=keys)
                else:
                    kernels.accumulate(total, none, ys, minus, ones, out=total)
                after, mean = replace(after, total=total), total / len(self.store.registry)
            if algorithm.direction.b:
                after = replace(after, momentum=mean.astype(np.float32))
            self._become(after, now.round_number)
