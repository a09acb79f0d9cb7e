"""A round in one call, of replies that are what nearly all are: without what a ``Round`` keeps for replies to come."""

import math
import time
from contextlib import nullcontext

import numpy as np

from fedcore.aggregation import Aggregator, Alone, Lengths, Replies, Result
from fedcore.errors import RoundError
from fedcore.float_mode import ieee
from fedcore.interrupts import uninterrupted
from fedcore.native import core
from fedcore.server.diagnostics import Diagnosis, staleness
from fedcore.server.made_report import diversity_of, report_of
from fedcore.server.report import RoundReport
from fedcore.server.settings import Settings
from fedcore.server.snapshot import Snapshot
from fedcore.server.state import State
from fedcore.server.update import Update
from fedcore.server.update_reader import Columns, UpdateReader, usual
from fedcore.server.weighing import Weighing


class WholeRound:
    """A round in one call, as the server's other calls see it meanwhile.

    Attributes:
        is_open: whether it can still be given up.
    """

    __slots__ = ("__weakref__", "is_open")

    def __init__(self) -> None:
        self.is_open = True

    def abort(self) -> None:
        """Give it up, unless it counts already."""
        self.is_open = False


class _NotPlainError(Exception):
    """A reply is refused, or has to wait: a ``Round`` knows how."""


def may_be_whole(settings: Settings, state: State) -> bool:
    """Tell whether this server's rounds may be in one call: in memory, and without limits by other replies."""
    limits = settings.limits
    by_others = limits.measures or limits.steps_ratio is not None or limits.examples_ratio is not None
    in_memory = state.store.medium == "ram" and state.upload is None and type(state.whole) is Alone
    return in_memory and not (by_others or settings.is_exact or state.snapshot.norms)


@ieee
def whole_round(
    state: State, settings: Settings, updates: list[Update], opened: WholeRound, began: float
) -> tuple[RoundReport, Weighing] | None:
    """The round's report and what it weighed by; or None, with the server as it was, where it takes a ``Round``.

    Args:
        opened: what may be aborted meanwhile.
        began: when the round did, by ``time.perf_counter``.

    Raises:
        RoundError: it was aborted.
        DivergedError: x would become infinite or NaN.
    """
    weighing = Weighing(settings, state)
    try:
        aggregator, reader = state.begin(()), UpdateReader(settings, state)
        if settings.steps_by_mean and not state.population.is_sized:
            report = step_by_mean(state, settings, reader.read_columns(updates), opened, began)
            return None if report is None else (report, weighing)
        replies = reader.read_all(updates)
        if replies is None:
            return None
        if settings.algorithm.weighs_claims:
            if not state.population.is_sized and len(set(replies.sources.tolist())) > 1:
                return None  # some with examples, and some without
            weighing.count_known_examples(replies)
        weighing.weigh(replies)
        sent = replies.vectors[0].nbytes * len(replies)
        fold(state, aggregator, replies)
        return finish(state, settings, aggregator.result(), replies, opened, sent, began), weighing
    except _NotPlainError:
        return None
    finally:
        if opened.is_open:
            state.abandon()
        weighing.close()


def step_by_mean(
    state: State, settings: Settings, columns: Columns | None, opened: WholeRound, began: float
) -> RoundReport | None:
    """A round that steps along the mean of the updates and changes nothing but x; None as for ``whole_round``."""
    if columns is None:
        return None
    clients, ys, steps, examples, distances = columns
    ones, _, _, factors, _ = usual(len(ys))
    weights = examples if settings.algorithm.weighs_claims else ones
    if not core.column_range(weights)[0] > 0:  # as a NaN is not, which stands for none
        if not np.isnan(weights).all():
            return None
        weights = ones
    stepped = state.step_by_mean(ys, ones if settings.averages_models else 1 / distances, weights)
    if stepped is None:
        return None
    after, squares, mean_square = stepped
    norms, before = np.sqrt(squares), state.snapshot
    report = RoundReport(
        round=before.round_number,
        heard=tuple(clients),
        steps=int(core.column_sum(0.0, steps, None)),
        norms=norms / distances if settings.averages_models else norms,
        weights=weights,
        factors=factors,
        diversity=diversity_of(weights, squares, mean_square),
        gamma=after.gamma,
        seconds=time.perf_counter() - began,
        bytes=ys[0].nbytes * len(ys),
        changed=dict(before.changed) or None,
    )
    accept(state, after, opened)
    return report


def fold(state: State, aggregator: Aggregator, replies: Replies) -> None:
    """Fold replies of which none is refused; a trace asks the state whose round it is."""

    def judge(lengths: Lengths) -> None:
        columns = [column for column in lengths if column is not None]
        if not all(core.column_range(column)[1] < math.inf for column in columns):  # as a NaN is not
            raise _NotPlainError

    replies.count(aggregator.fold(replies, judge))


def finish(
    state: State, settings: Settings, result: Result, heard: Replies, opened: WholeRound, sent: int, began: float
) -> RoundReport:
    """Take the step and let it count."""
    prepared, offset = state.prepare(result, heard, {}), state.shared_offset()
    found = Diagnosis(settings, state.store, prepared, heard, offset, state.whole).measure()
    # A store's rows are many steps; without them the round counts by one assignment.
    with uninterrupted() if settings.algorithm.keeps_rows else nullcontext():
        accept(state, prepared.after, opened)
    return report_of(settings, prepared, heard, found, staleness(prepared), (), time.perf_counter() - began, sent)


def accept(state: State, after: Snapshot, opened: WholeRound) -> None:
    """Let the step count."""
    if not opened.is_open:
        raise RoundError("round: expected to finish it, got abort() meanwhile")
    state.accept(after)
    opened.is_open = False
