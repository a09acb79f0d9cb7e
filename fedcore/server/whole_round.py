"""A round in one call, of replies that are what nearly all are: without what a ``Round`` keeps for replies to come."""

import math
import time
from contextlib import nullcontext

from fedcore.aggregation import Aggregator, Alone, Lengths, Replies, Result
from fedcore.errors import RoundError
from fedcore.float_mode import ieee
from fedcore.interrupts import uninterrupted
from fedcore.native import core
from fedcore.server.diagnostics import Diagnosis, staleness
from fedcore.server.made_report import report_of
from fedcore.server.report import RoundReport
from fedcore.server.settings import Settings
from fedcore.server.state import State
from fedcore.server.update import Update
from fedcore.server.update_reader import UpdateReader
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
        aggregator = state.begin(())
        replies = UpdateReader(settings, state).read_all(updates)
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
    stale = staleness(settings, state.store, prepared.before.round_number, heard)
    # A store's rows are many steps; without them the round counts by one assignment.
    with uninterrupted() if settings.algorithm.keeps_rows else nullcontext():
        if not opened.is_open:
            raise RoundError("round: expected to finish it, got abort() meanwhile")
        state.accept(prepared)
        opened.is_open = False
    return report_of(settings, prepared, heard, found, stale, (), time.perf_counter() - began, sent)
