"""The times of phases, in all and round by round."""

from collections.abc import Iterable
from typing import NamedTuple

from fedcore.tracing.functions import FUNCTIONS
from fedcore.tracing.phases import KERNELS, PHASES
from fedcore.tracing.spans import Span

PHASE_OF = tuple(function.phase for function in FUNCTIONS)
ELSEWHERE = "elsewhere"
"""The row of the time in which no phase ran: the caller's own code, or a wait for clients."""


class PhaseTime(NamedTuple):
    """A phase's share of some time.

    Attributes:
        phase: its name; "elsewhere" is no phase, and has no calls.
        calls: how often it ran.
        seconds: its time, in all threads and processes, without that of the phases within it.
        share: that of all phases' time and the time elsewhere, 0..1; all shares add up to 1.
        bytes: what kernels moved in it; 0 where nobody knows.
    """

    phase: str
    calls: int
    seconds: float
    share: float
    bytes: int

    @property
    def gigabytes_per_second(self) -> float | None:
        """The bytes by the time; None where nobody knows."""
        return self.bytes / self.seconds / 1e9 if self.bytes and self.seconds else None


class RoundTime(NamedTuple):
    """A round of a server or network.

    Attributes:
        server: which one, 0 for the first that the trace saw.
        round: the round's number there.
        seconds: from the beginning of its first span, its broadcast say, to the end of its last one.
        phases: its phases, and the time elsewhere; shares are of these seconds.
    """

    server: int
    round: int
    seconds: float
    phases: tuple[PhaseTime, ...]


class Totals:
    """Calls, times and bytes by phase.

    Attributes:
        counts: [calls, nanoseconds, bytes] by phase.
    """

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}

    def add(self, span: Span) -> None:
        """Count a span; a kernel within a phase is that phase's already."""
        phase = PHASE_OF[span.function]
        if phase != KERNELS or span.own:
            counts = self.counts.setdefault(phase, [0, 0, 0])
            counts[0] += 1
            counts[1] += span.own
            counts[2] += span.bytes

    def merge(self, counts: dict[str, list[int]]) -> None:
        """Add counts."""
        for phase, more in counts.items():
            own = self.counts.setdefault(phase, [0, 0, 0])
            for i in range(3):
                own[i] += more[i]

    def rows(self, wall: float) -> tuple[PhaseTime, ...]:
        """The phases in the order of a round, and the time elsewhere.

        Args:
            wall: seconds by the clock; several threads or processes may have filled it more than once.
        """
        rows = []
        for phase in PHASES:
            if phase in self.counts:
                calls, nanoseconds, bytes = self.counts[phase]
                rows.append(PhaseTime(phase, calls, nanoseconds / 1e9, 0.0, bytes))
        own = sum(row.seconds for row in rows)
        rows.append(PhaseTime(ELSEWHERE, 0, max(0.0, wall - own), 0.0, 0))
        whole = max(wall, own) or 1.0
        return tuple(row._replace(share=row.seconds / whole) for row in rows)


class RoundSpans:
    """The spans of each round, over all processes.

    Args:
        spans: each with the number of its process.

    Attributes:
        ends: the beginning of the first and the end of the last span, by process, server and round.
        servers: a number for each server or network of each process, 0 for the one whose round began first.
    """

    def __init__(self, spans: Iterable[tuple[int, Span]]) -> None:
        self.ends: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._totals: dict[tuple[int, int, int], Totals] = {}
        for process, span in spans:
            if span.round >= 0:
                key = process, span.server, span.round
                start, end = self.ends.get(key, (span.start, span.end))
                self.ends[key] = min(start, span.start), max(end, span.end)
                self._totals.setdefault(key, Totals()).add(span)
        in_order = sorted(self.ends, key=self.ends.__getitem__)
        first = dict.fromkeys((process, server) for process, server, _ in in_order)
        self.servers = {key: number for number, key in enumerate(first)}

    def times(self) -> tuple[RoundTime, ...]:
        """The rounds, one server's after the other's."""
        rounds = []
        for (process, server, round), (start, end) in self.ends.items():
            seconds = (end - start) / 1e9
            phases = self._totals[process, server, round].rows(seconds)
            rounds.append(RoundTime(self.servers[process, server], round, seconds, phases))
        return tuple(sorted(rounds, key=lambda one: one[:2]))
