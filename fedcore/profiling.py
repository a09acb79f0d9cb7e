"""Profiling: where the time and the bytes of rounds go, by phase."""

import atexit
import json
import os
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from time import perf_counter_ns
from typing import Any, NamedTuple, Self
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np

from fedcore.arguments import absolute, whole
from fedcore.arrays import I64
from fedcore.atomic_file import replacing
from fedcore.errors import ConfigError, FedcoreError

__all__ = ["PhaseTime", "Profile", "Recorded", "RoundTime", "absorb", "begin", "profile", "room", "span", "timed"]
# The names of spans, in the order of a round; the docstring of ``profile`` explains them.
_OF_ROUND = "round broadcast clients train encode wait decode read validate fold step diagnose commit publish gather"
PHASES = (*_OF_ROUND.split(), "evaluate", "save", "aggregate")
# In a Chrome trace the thread of a first server's rounds is larger than the number of any real thread.
_ROUNDS, _COLUMNS, _ZERO = 10_000_000, 8, np.zeros((len(PHASES), 3), np.int64)


class PhaseTime(NamedTuple):
    """The share of a phase in some time.

    Attributes:
        phase: its name; "elsewhere" is no phase, and has no calls.
        calls: how often it ran.
        seconds: its time, in all threads and processes, without that of the phases within it.
        share: that of all phases' time and the time elsewhere, 0..1; all shares add up to 1.
        bytes: read and written by kernels in it; 0 if unknown.
    """

    phase: str
    calls: int
    seconds: float
    share: float
    bytes: int

    @property
    def gigabytes_per_second(self) -> float | None:
        """The bytes by the time; None if unknown."""
        return self.bytes / self.seconds / 1e9 if self.bytes and self.seconds else None


class RoundTime(NamedTuple):
    """A round of a server or network.

    Attributes:
        server: 0 for the server whose round began first, then 1, and so on.
        round: the round's number there.
        seconds: from the beginning of its first span to the end of its last one.
        phases: its phases, and the time elsewhere; shares are of these seconds.
    """

    server: int
    round: int
    seconds: float
    phases: tuple[PhaseTime, ...]


class Recorded(NamedTuple):
    """The recording of one process, as it is sent to another.

    Attributes:
        counts: calls, nanoseconds and bytes of each phase, int64[len(PHASES), 3].
        numbers: the spans of the timeline, each as the numbers of its phase, server and round (or -1), the system's
            number of its thread, its start and end by the monotonic clock in nanoseconds, its time without that of
            spans within it, and its bytes.
        threads: names by number.
    """

    process: int
    counts: I64
    numbers: "array[int]"
    threads: dict[int, str]

    def spans(self) -> Iterator[tuple[int, ...]]:
        """The spans of the timeline."""
        return zip(*[iter(self.numbers)] * _COLUMNS, strict=True)


class _Thread(threading.local):
    """The running spans of a thread, and the last round that it worked on."""

    def __init__(self) -> None:
        self.running: list[ReferenceType[_Running]] = []
        self.last, self.number = (-1, -1), threading.get_native_id()
        _thread_names[self.number] = threading.current_thread().name


# The span of a program that records nothing: built-in methods, which accept any arguments and return at once.
_OFF: Any = type("_Off", (), {"__enter__": "".isupper, "__exit__": "".format})()
_profiles: "tuple[Profile, ...]" = ()  # those that are open; a new tuple whenever one begins or ends
_lock = threading.RLock()
_servers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_server_numbers = count()
_thread_names: dict[int, str] = {}
_thread = _Thread()  # a new one when a first profile is opened


class _Running:
    """A span that is recorded. Only the frame of its ``with`` holds it: an exception in the midst of it frees it."""

    def __init__(self, phase: str, owner: Any, arrays: Sequence[Any]) -> None:
        self.phase, self.profiles, running = PHASES.index(phase), _profiles, _thread.running
        self.inner, self.bytes = 0, sum(map(_bytes_of, arrays))
        while running and running[-1]() is None:
            running.pop()
        self.depth, self.caller = len(running), running[-1]() if running else None
        self.place: tuple[int, int] = self.caller.place if self.caller else _thread.last
        round_number = getattr(getattr(owner, "snapshot", owner), "round_number", None)
        if round_number is not None:  # a server within its own round stays in it, though it may know the next one
            own = _servers.setdefault(owner, next(_server_numbers)), int(round_number)
            self.place = _thread.last = self.place if self.caller and own[0] == self.place[0] else own

    def __enter__(self) -> Self:
        _thread.running.append(ref(self))
        self.start = perf_counter_ns()
        return self

    def end(self, arrays: Sequence[Any], *, counts: bool = True) -> None:
        self.bytes = sum(map(_bytes_of, arrays))
        self.__exit__(None if counts else StopIteration)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        end, caller = perf_counter_ns(), self.caller
        del _thread.running[self.depth :]
        is_part = kind is StopIteration or (caller and caller.phase == self.phase)  # no item; or a part of its caller
        if caller:
            caller.inner += self.inner if is_part else end - self.start
            caller.bytes += self.bytes if is_part else 0
        done = self.phase, *self.place, _thread.number, self.start, end, end - self.start - self.inner, self.bytes
        for one in () if is_part else [one for one in self.profiles if one in _profiles]:
            one._take(done)


def span(phase: str, owner: Any = None, arrays: Sequence[Any] = ()) -> Any:
    """A context manager around work of a phase. While nothing is recorded it costs about 0.1 us.

    Args:
        phase: one of ``PHASES``.
        owner: an object that knows its server's round (a ``State``); else the round is that of the span around it, or
            the last one of the thread.
        arrays: read or written by the work: one that is read and written comes twice.
    """
    return _Running(phase, owner, arrays) if _profiles else _OFF


def begin(phase: str, owner: Any = None) -> _Running | None:
    """The beginning of a span, for its ``end``, where ``with`` would cost too much; None while nothing is recorded."""
    return _Running(phase, owner, ()).__enter__() if _profiles else None


def _next(phase: str, items: Iterator[Any]) -> Any:
    with span(phase):
        return next(items)


def timed(phase: str, items: Iterator[Any]) -> Iterator[Any]:
    """The items of an iterator, each in a span of its own while it is made."""
    return iter(lambda: _next(phase, items), None) if _profiles else items


def _bytes_of(value: Any) -> int:
    """The bytes of an array, or of a list's or tuple's: one that comes twice in it, as the x of all clients, is one.

    >>> x, y = np.float32([1, 2]), np.float32([3, 4])
    >>> _bytes_of([x[:], x[:], y]), _bytes_of(None)
    (16, 0)
    """
    with suppress(Exception):  # None, a number, or an array of another library
        if isinstance(value, list | tuple):
            known = {one.ctypes.data if isinstance(one, np.ndarray) else id(one): _bytes_of(one) for one in value}
            return sum(known.values())
        return int(value.nbytes)
    return 0


def _phases(counts: I64, wall: float) -> tuple[PhaseTime, ...]:
    """The phases in their order, and the time elsewhere; several threads may have filled ``wall`` more than once."""
    longest = max(wall, own := float(counts[:, 1].sum()) / 1e9) or 1.0
    some = zip(PHASES, counts.tolist(), strict=True)
    rows = [PhaseTime(phase, calls, t / 1e9, t / 1e9 / longest, moved) for phase, (calls, t, moved) in some if calls]
    return (*rows, PhaseTime("elsewhere", 0, rest := max(0.0, wall - own), rest / longest, 0))


def _rounds_of(parts: Sequence[Recorded]) -> tuple[dict[tuple[int, ...], list[Any]], dict[tuple[int, ...], int]]:
    """By process, server and round the first start, the last end and the counts; and numbers of the servers."""
    rounds: dict[tuple[int, ...], list[Any]] = {}
    for part in parts:
        for phase, server, round, _, start, end, own, moved in part.spans():
            if round >= 0:
                found = rounds.setdefault((part.process, server, round), [start, end, _ZERO.copy()])
                found[:2] = min(start, found[0]), max(end, found[1])
                found[2][phase] += 1, own, moved
    servers = dict.fromkeys(key[:2] for key in sorted(rounds, key=lambda key: rounds[key][0]))
    return rounds, {server: number for number, server in enumerate(servers)}


class Profile:
    """A profile; get it from ``fedcore.profile()``, and use it as a context manager. It can be read at any time.

    ``print(profile)`` shows ``table()``.

    Attributes:
        timeline: the spans that it keeps at most.
    """

    def __init__(self, timeline: int) -> None:
        self.timeline, self._depth, self._began, self._before = timeline, 0, 0, 0
        # New spans wait here: a list takes them without a lock, for which the handler of a signal could not wait.
        self._waiting: list[tuple[int, ...]] = []
        self._numbers: array[int] = array("q")
        self._counts, self._others = _ZERO.copy(), list[Recorded]()

    def __enter__(self) -> Self:
        global _profiles, _thread
        with _lock:
            if not self._depth:
                _thread = _thread if _profiles else _Thread()
                self._began, _profiles = perf_counter_ns(), (*_profiles, self)
            self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        global _profiles
        with _lock:
            self._depth -= 1
            if not self._depth:
                self._before += perf_counter_ns() - self._began
                _profiles = tuple(other for other in _profiles if other is not self)

    @property
    def seconds(self) -> float:
        """The seconds that it was open, up to now."""
        return (self._before + (perf_counter_ns() - self._began if self._depth else 0)) / 1e9

    @property
    def phases(self) -> tuple[PhaseTime, ...]:
        """A ``PhaseTime`` for each phase that ran, in the order of a round, and one for the time elsewhere."""
        return _phases(sum((part.counts for part in self._parts()), _ZERO), self.seconds)

    @property
    def rounds(self) -> tuple[RoundTime, ...]:
        """A ``RoundTime`` for each round of the timeline, one server's after the other's.

        Cost: reads the timeline, a second or two for a million spans.
        """
        rounds, servers = _rounds_of(self._parts())
        times = []
        for (process, server, round), (start, end, counts) in rounds.items():
            seconds = (end - start) / 1e9
            times.append(RoundTime(servers[process, server], round, seconds, _phases(counts, seconds)))
        return tuple(sorted(times))

    def table(self, *, by_round: bool = False) -> str:
        """The phases in lines for a terminal: calls, time, share, bytes moved, GB/s.

        Args:
            by_round: a line for each round instead, with its time and that of each phase.
        """
        rows = _round_cells(self.rounds) if by_round else _phase_cells(self.phases)
        first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join((row[0].ljust(first), *map(str.rjust, row[1:], widths))).rstrip() for row in rows)

    __repr__ = __str__ = table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline for chrome://tracing or https://ui.perfetto.dev: JSON in the Trace Event Format.

        Processes, threads, and within them the spans, with server, round and bytes as arguments; each server's rounds
        have a line of their own. Times are in microseconds from the first span on.

        Args:
            path: a file; an older one stays until the new one is complete, also if the process is killed meanwhile.

        Raises:
            ConfigError: the file cannot be written.

        Cost: about 200 bytes and 10 us a span.
        """
        parts, path = self._parts(), absolute(path)
        calls, kept = sum(one.calls for one in self.phases), sum(len(part.numbers) for part in parts) // _COLUMNS
        facts = {"seconds": self.seconds, "spans left out": calls - kept}
        try:
            with replacing(path) as file:
                file.write('{"traceEvents": [')
                file.writelines(f"{',' * (i > 0)}\n{json.dumps(event)}" for i, event in enumerate(_events(parts)))
                file.write(f'\n], "displayTimeUnit": "ms", "otherData": {json.dumps(facts)}}}\n')
        except OSError as error:
            raise ConfigError(f"path: cannot write to {path}: {error}") from error

    def recorded(self) -> Recorded:
        """The recording of this process so far, which the open profiles of another can ``absorb``."""
        with _lock:
            self._count()
            return Recorded(os.getpid(), self._counts.copy(), self._numbers[:], dict(_thread_names))

    def _take(self, span: tuple[int, ...]) -> None:
        """Take a span of any thread, in the middle of anything."""
        self._waiting.append(span)
        if len(self._waiting) >= 1000:  # they are counted together
            with _lock:
                self._count()

    def _count(self) -> None:
        room = self._room()
        with suppress(IndexError):
            while True:
                span = self._waiting.pop(0)
                self._counts[span[0]] += 1, *span[-2:]
                self._numbers.extend(span[: room * _COLUMNS])
                room -= room > 0

    def _room(self) -> int:
        """The number of spans for which the timeline has room."""
        kept = sum((len(part.numbers) for part in self._others), len(self._numbers))
        return max(0, self.timeline - kept // _COLUMNS)

    def _parts(self) -> list[Recorded]:
        """The recording of each process, this one first; a process that sent more than once comes again."""
        return [self.recorded(), *self._others]


def profile(*, timeline: int = 1_000_000) -> Profile:
    """A profile of a block of code: where the time and the bytes of its rounds go.

    Of servers, networks, adapters and simulations (those in processes of ``run_experiment`` too, when each of their
    trials is over), in every thread. ``FEDCORE_PROFILE=1 python mine.py`` profiles a whole program, and
    ``fedcore run --profile`` an experiment. Phases are, in the order of a round:

    ================  ==================================================================================
    round             all of a round outside of the other phases: opening, checks, the report
    broadcast         the model and the clients' offsets are made
    clients, train    ``Server.round`` waits for the next update; the simulator trains a client
    encode, wait      an adapter writes the model and its messages; it waits for replies
    decode, read      an adapter reads a reply; the server reads an update
    validate          updates are weighed, and held against the limits
    fold              updates are added to the sums, and rows exchanged
    step              x, v and the totals are made of the sums; the models of a network are mixed
    diagnose          lengths and diversities are measured
    commit, publish   rows and state are sealed and begin to count; the folder's files are made durable
    gather            the shards of a cluster are called, and waited for
    evaluate, save    the simulator evaluates; a copy is written, or made durable
    aggregate         ``fedcore.aggregate``
    ================  ==================================================================================

    A phase's time is without that of the phases within it: times of one thread add up to no more than the clock's. On a
    GPU it is the time until the work is queued. Bytes are those of the arrays that the kernels of a phase read and
    write, each once. A span counts for the profiles that were open when it began and still are when it ends. Several
    profiles may be open, within each other or in different threads: each sees all that happens. One may be entered
    again, and goes on; within itself it is one. A process that is forked meanwhile is not profiled.

    Args:
        timeline: how many spans are kept for ``save`` and ``rounds``, the first ones; all others are counted.

    Raises:
        RangeError: ``timeline`` is not an integer >= 0.

    Determinism: the results are the same bits.
    Cost: while none is open, about 0.1 us for each of a round's 3 to 10 spans. A span of an open one takes 3 to 8 us;
        the timeline takes 64 bytes a span. No array is kept.

    >>> import numpy as np
    >>> import fedcore
    >>> server = fedcore.Server(np.zeros(1000, np.float32), "MIFA", clients=2, lr=0.1)
    >>> with fedcore.profile() as profile:
    ...     report = server.round([fedcore.Update(i, server.x + i, steps=1) for i in range(2)])
    >>> [(one.phase, one.calls) for one in profile.phases if one.phase in ("round", "fold", "commit")]
    [('round', 1), ('fold', 1), ('commit', 1)]
    >>> [(one.server, one.round) for one in profile.rounds]
    [(0, 0)]
    >>> profile.table().splitlines()[0].split()
    ['phase', 'calls', 'time', 'share', 'moved', 'GB/s']
    """
    return Profile(whole("timeline", timeline, 0))


def room() -> int | None:
    """The number of spans for which the timeline of an open profile has room; None if none is open."""
    return max((one._room() for one in _profiles), default=None)


def absorb(recorded: Recorded) -> None:
    """Add the recording of another process to the open profiles."""
    for one in _profiles:
        one._others.append(recorded)


def profile_program() -> None:
    """Profile this process if the environment asks for it; ``import fedcore`` calls it.

    ``FEDCORE_PROFILE=1`` writes the table to stderr when the program ends, ``FEDCORE_PROFILE=trace.json`` also the
    file. A program in which nothing ran writes nothing, nor does one that is killed. A process that multiprocessing has
    started has no report of its own; those of the simulator are part of the program's.

    Raises:
        ConfigError: the variable is neither 1 (or 0, or empty) nor a path that ends with .json.
    """
    from multiprocessing import current_process, parent_process

    asked = os.environ.get("FEDCORE_PROFILE", "")
    if asked not in ("", "0", "1") and not asked.endswith(".json"):
        raise ConfigError(f"FEDCORE_PROFILE: expected 1, or the path of a .json file to write, got {asked!r}")
    # A process that multiprocessing spawns knows its parent only after its imports.
    is_part = parent_process() is not None or getattr(current_process(), "_inheriting", False)
    if asked not in ("", "0") and not is_part:
        path = None if asked == "1" else absolute(asked)
        atexit.register(_report, Profile(1_000_000 if path else 0).__enter__(), path, os.getpid())


def _report(profile: Profile, path: os.PathLike[str] | None, process: int) -> None:
    """Show and write the profile at the end of its process, if anything ran; a fork of it has none."""
    profile.__exit__()
    if os.getpid() == process and profile.phases[1:]:  # more than the time elsewhere
        lines = [profile.table()]
        try:
            if path is not None:
                profile.save(path)
                lines.append(f"wrote {path}")
        except FedcoreError as error:
            lines.append(f"error: FEDCORE_PROFILE: {error}")
        with suppress(OSError, ValueError, AttributeError):  # there may be no stderr any more
            print(*lines, sep="\n", file=sys.stderr)


def _phase_cells(phases: Sequence[PhaseTime]) -> list[tuple[str, ...]]:
    """The cells of the table of phases, its headings first and the sum last."""
    rows: list[tuple[str, ...]] = [("phase", "calls", "time", "share", "moved", "GB/s")]
    total = PhaseTime("in all", 0, sum(one.seconds for one in phases), 1.0, sum(one.bytes for one in phases))
    for one in (*phases, total):
        calls, rate = str(one.calls or ""), one.gigabytes_per_second
        share, speed = f"{100 * one.share:.1f} %", "" if rate is None else f"{rate:.1f}"
        rows.append((one.phase, calls, _in_unit(one.seconds, _TIMES), share, _in_unit(one.bytes, _SIZES), speed))
    return rows


def _round_cells(rounds: Sequence[RoundTime]) -> list[tuple[str, ...]]:
    """The cells of the table of rounds, its headings first: each round's time, and that of each of its phases."""
    names = [*sorted({one.phase for each in rounds for one in each.phases if one.calls}, key=PHASES.index), "elsewhere"]
    rows: list[tuple[str, ...]] = [("server", "round", "time", *names)]
    for each in rounds:
        own = {one.phase: _in_unit(one.seconds, _TIMES) for one in each.phases}
        cells = (own.get(name, "") for name in names)
        rows.append((str(each.server), str(each.round), _in_unit(each.seconds, _TIMES), *cells))
    return rows if any(each.server for each in rounds) else [row[1:] for row in rows]


_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def _in_unit(number: float, units: Sequence[tuple[str, float]]) -> str:
    """A number in the first unit that it reaches, with three digits or more; nothing of nothing.

    >>> _in_unit(0.00001234, _TIMES), _in_unit(0.5, _TIMES), _in_unit(61.23, _TIMES), _in_unit(1_430_000_000, _SIZES)
    ('12.3 us', '500 ms', '61.2 s', '1.43 GB')
    """
    unit, scale = next((one for one in units if number >= one[1]), units[-1])
    return f"{number / scale:{'.0f' if number > 999 * scale else '.3g'}} {unit}" if number else ""


def _events(parts: Sequence[Recorded]) -> Iterator[dict[str, Any]]:
    """The names of processes and threads, each round as an event, and the spans."""
    rounds, servers = _rounds_of(parts)
    zero = min((span[4] for part in parts for span in part.spans()), default=0)

    def event(cat: str, name: str, process: int, thread: int, args: Any, start: int = zero, end: int = zero) -> Any:
        of = {"ph": "X" if cat else "M", "cat": cat, "name": name, "pid": process, "tid": thread, "args": args}
        return of | {"ts": (start - zero) / 1e3, "dur": (end - start) / 1e3}  # in microseconds

    for part in parts:
        yield event("", "process_name", part.process, 0, {"name": f"fedcore, process {part.process}"})
        for thread, name in part.threads.items():
            yield event("", "thread_name", part.process, thread, {"name": name})
    for (process, _), number in servers.items():
        yield event("", "thread_name", process, _ROUNDS + number, {"name": f"rounds of server {number}"})
    for (process, server, round), (start, end, _) in rounds.items():
        args = {"server": servers[process, server], "round": round}
        yield event("round", f"round {round}", process, _ROUNDS + args["server"], args, start, end)
    for part in parts:
        for phase, server, round, thread, start, end, _, moved in part.spans():
            args = {"server": servers[part.process, server], "round": round} if round >= 0 else {}
            args |= {"bytes": moved} if moved else {}
            yield event("phase", PHASES[phase], part.process, thread, args, start, end)


def _after_fork() -> None:
    """Record nothing in a process that was forked within a profile, and free a lock that another thread may hold."""
    global _profiles, _lock, _thread
    _profiles, _lock, _thread = (), threading.RLock(), _Thread()


os.register_at_fork(after_in_child=_after_fork)
