"""A trace: what a block of code spends in each phase of its rounds."""

import os
import threading
from collections.abc import Iterable
from time import perf_counter
from types import TracebackType
from typing import Any, ClassVar, Self

from fedcore.arguments import absolute, whole
from fedcore.pickling import Unpicklable
from fedcore.representation import Represented
from fedcore.tracing import chrome
from fedcore.tracing.recording import Recorded, Recording, spans_of
from fedcore.tracing.table import lines, phase_cells, round_cells
from fedcore.tracing.totals import PhaseTime, RoundSpans, RoundTime
from fedcore.tracing.wrapping import WRAPPING

TIMELINE = 1_000_000


class Trace(Represented, Unpicklable):
    """A trace; get it from ``fedcore.trace()``, and use it as a context manager. It can be read at any time.

    ``print(trace)`` shows ``table()``, and so does a notebook.

    Attributes:
        seconds: by the clock, from its beginning to its end, or to now.
        phases: a ``PhaseTime`` for each phase that ran, in the order of a round, and one for the time elsewhere.
        rounds: a ``RoundTime`` for each round, one server's after the other's. Those of the timeline alone.
    """

    _instead: ClassVar[str] = "write it by save(path)"

    def __init__(self, timeline: int) -> None:
        self._recording = Recording(timeline)
        self._lock = threading.RLock()
        self._depth = 0
        self._began = self._before = 0.0

    def __enter__(self) -> Self:
        with self._lock:
            if not self._depth:
                self._began = perf_counter()
                WRAPPING.begin(self._recording)
            self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._depth == 1:
                WRAPPING.end(self._recording)
                self._before = self.seconds
            self._depth -= 1

    @property
    def seconds(self) -> float:
        """The seconds that it was open."""
        return self._before + (perf_counter() - self._began if self._depth else 0.0)

    @property
    def phases(self) -> tuple[PhaseTime, ...]:
        """The time of each phase."""
        return self._recording.counted().rows(self.seconds)

    @property
    def rounds(self) -> tuple[RoundTime, ...]:
        """The time of each round, and of its phases.

        Cost: reads the timeline, a second or two for a million spans.
        """
        return self._rounds().times()

    def table(self, *, by_round: bool = False) -> str:
        """The phases in lines for a terminal: calls, time, share, bytes moved, GB/s.

        Args:
            by_round: a line for each round instead, with its time and that of each phase.
        """
        return lines(round_cells(self.rounds) if by_round else phase_cells(self.phases))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline for chrome://tracing or https://ui.perfetto.dev: JSON in the Trace Event Format.

        Processes, threads, and within them the spans, with server, round, bytes and the function as arguments; each
        server's rounds have a line of their own. Times are in microseconds from the first span on.

        Args:
            path: a file; what is there stays until the new one is whole, also if the process is killed meanwhile.

        Raises:
            ConfigError: the file cannot be written.

        Cost: about 200 bytes and 10 us a span.
        """
        parts = self._recording.parts()
        facts = {"seconds": self.seconds, "spans left out": sum(part.left_out for part in parts)}
        chrome.write(absolute(path), parts, facts)

    def recorded(self) -> Recorded:
        """The recording of this process so far, which another one's open traces can ``absorb``."""
        return self._recording.recorded()

    def __str__(self) -> str:
        return self.table()

    def _facts(self) -> dict[str, Any]:
        calls = {one.phase: one.calls for one in self.phases if one.calls}
        return {"seconds": self.seconds, "rounds": len(self._rounds().ends), "calls": calls}

    def _rows(self) -> Iterable[tuple[str, ...]]:
        return phase_cells(self.phases)

    def _rounds(self) -> RoundSpans:
        return RoundSpans((part.process, span) for part in self._recording.parts() for span in spans_of(part))


def trace(*, timeline: int = TIMELINE) -> Trace:
    """A trace of a block of code: where the time and the bytes of its rounds go.

    Of servers, networks, Flower's strategies, simulations (those in processes of ``run_experiment`` too, when each of
    their trials is over) and bare kernels, in every thread. ``FEDCORE_PROFILE=1 python mine.py`` traces a whole
    program, and ``fedcore run --profile`` an experiment. Phases are, in the order of a round:

    ================  ==================================================================================
    broadcast, open   the model and the clients' offsets are made; a round is opened
    clients, train    ``Server.round`` waits for the next update; the simulator makes it
    send, wait        Flower's model and messages are made; replies are waited for, and pulled
    add, check, read  an update comes in, and is looked at; another thread's turn is waited for
    weigh             weights are taken from what clients say
    fold, exchange    an update is added to the sums, and its row exchanged
    step, optimiser   x, v and the totals are made of the sums
    mix               a network's models are mixed
    diagnose          lengths and diversities are measured
    commit            the round begins to count; *store commit*: its rows are sealed and written
    report, finish    the report is made, and all is tidied up; *abort*
    evaluate, save    the simulator evaluates; a copy is written, or made durable
    aggregate         ``fedcore.aggregate``
    kernels           kernels outside of any phase
    ================  ==================================================================================

    A phase's time is without that of the phases within it: times of one thread add up to no more than the clock's.
    Bytes are what the kernels of a phase read and write, if each array is read and written once. A span counts for the
    traces that were open when it began and are when it ends. Several traces may be open, within each other or in
    different threads: each sees all that happens. One may be entered again, and goes on; within itself it is one. A
    process that is forked meanwhile is not traced.

    Args:
        timeline: how many spans are kept for ``save`` and ``rounds``, the first ones; all others are counted.

    Raises:
        RangeError: ``timeline`` is not an integer >= 0.

    Determinism: nothing is computed otherwise.
    Cost: nothing while none is open, since functions are wrapped only meanwhile. A span of an open one takes 3 to 8
        us, and a round has about 15, and 7 more for each update that comes by itself; the timeline takes 64 bytes a
        span. No array is kept.

    >>> import numpy as np
    >>> import fedcore
    >>> server = fedcore.Server("MIFA", np.zeros(1000, np.float32), clients=2, lr=0.1)
    >>> with fedcore.trace() as trace:
    ...     report = server.round([fedcore.Update(i, server.x + i, steps=1) for i in range(2)])
    >>> [(one.phase, one.calls) for one in trace.phases if one.phase in ("open", "exchange", "store commit")]
    [('open', 1), ('exchange', 1), ('store commit', 1)]
    >>> [(one.server, one.round) for one in trace.rounds]
    [(0, 0)]
    >>> trace.table().splitlines()[0].split()
    ['phase', 'calls', 'time', 'share', 'moved', 'GB/s']
    """
    return Trace(whole("timeline", timeline, 0))
