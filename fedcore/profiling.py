"""Profiling: time and memory traffic of rounds by phase."""

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

from fedcore.arrays import I64
from fedcore.errors import ConfigError, FedcoreError
from fedcore.files import replacing
from fedcore.validation import absolute, check_integer

__all__ = ["PhaseTime", "Profile", "Recorded", "RoundTime", "absorb", "begin", "profile", "room", "span", "timed"]
# The phases in the order of a round; the docstring of ``profile`` explains them.
_OF_ROUND = (
    "round broadcast clients train encode wait decode read validate fold noise step diagnose commit publish gather"
)
PHASES = (*_OF_ROUND.split(), "evaluate", "save", "aggregate")
# A Chrome trace shows the rounds of each server as a thread; these thread numbers start here, above real ones.
_ROUNDS, _COLUMNS, _ZERO = 10_000_000, 8, np.zeros((len(PHASES), 3), np.int64)


class PhaseTime(NamedTuple):
    """The time of a phase.

    Attributes:
        phase: the name, or "elsewhere" for time outside all phases.
        calls: the number of calls; 0 for "elsewhere".
        seconds: the time in all threads and processes, without nested phases.
        share: the share of the total time, 0..1; all shares add up to 1.
        bytes: the bytes that the phase's kernels read and write; 0 if unknown.
    """

    phase: str
    calls: int
    seconds: float
    share: float
    bytes: int

    @property
    def gigabytes_per_second(self) -> float | None:
        """The bandwidth, or None if unknown."""
        return self.bytes / self.seconds / 1e9 if self.bytes and self.seconds else None


class RoundTime(NamedTuple):
    """The time of a round of a server or network.

    Attributes:
        server: the index of the server, in the order in which the servers' first rounds began.
        round: the number of the round.
        seconds: the time from the start of the first span to the end of the last span.
        phases: the round's phases and the time elsewhere, with their shares of ``seconds``.
    """

    server: int
    round: int
    seconds: float
    phases: tuple[PhaseTime, ...]


class Recorded(NamedTuple):
    """The recording of a process, which a different process can ``absorb``.

    Attributes:
        process: the process id.
        counts: calls, nanoseconds and bytes of each phase, int64[len(PHASES), 3].
        numbers: eight integers per span of the timeline: phase, server (or -1), round (or -1), native thread id, start,
            end, time without nested spans, and bytes. Times are in nanoseconds of the monotonic clock.
        threads: thread names by native thread id.
    """

    process: int
    counts: I64
    numbers: "array[int]"
    threads: dict[int, str]

    def spans(self) -> Iterator[tuple[int, ...]]:
        """Return the spans of the timeline."""
        return zip(*[iter(self.numbers)] * _COLUMNS, strict=True)


class _Thread(threading.local):
    """The open spans of a thread, and the last round in which the thread worked."""

    def __init__(self) -> None:
        self.running: list[ReferenceType[_Running]] = []
        self.last, self.number = (-1, -1), threading.get_native_id()
        _thread_names[self.number] = threading.current_thread().name


# The span if no profile is open. Its methods are built-in methods, which are fast and accept these arguments.
_OFF: Any = type("_Off", (), {"__enter__": "".isupper, "__exit__": "".format})()
_profiles: "tuple[Profile, ...]" = ()  # the open profiles; replaced whenever a profile begins or ends
_lock = threading.RLock()
_servers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_server_numbers = count()
_thread_names: dict[int, str] = {}
_thread = _Thread()  # replaced when a profile is opened and no other is open


class _Running:
    """A recorded span. Only the frame of its ``with`` statement refers to the span, so that an exception frees it."""

    def __init__(self, phase: str, owner: Any, arrays: Sequence[Any]) -> None:
        self.phase, self.profiles, running = PHASES.index(phase), _profiles, _thread.running
        self.inner, self.bytes = 0, sum(map(_bytes_of, arrays))
        while running and running[-1]() is None:
            running.pop()
        self.depth, self.caller = len(running), running[-1]() if running else None
        self.place: tuple[int, int] = self.caller.place if self.caller else _thread.last
        round_number = getattr(getattr(owner, "snapshot", owner), "round_number", None)
        if round_number is not None:  # a server keeps the number of its open round
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
        # A span counts as part of its caller if it has the same phase, or if it is the end of an iterator.
        is_part = kind is StopIteration or (caller and caller.phase == self.phase)
        if caller:
            caller.inner += self.inner if is_part else end - self.start
            caller.bytes += self.bytes if is_part else 0
        done = self.phase, *self.place, _thread.number, self.start, end, end - self.start - self.inner, self.bytes
        for one in () if is_part else [one for one in self.profiles if one in _profiles]:
            one.take(done)


def span(phase: str, owner: Any = None, arrays: Sequence[Any] = ()) -> Any:
    """Return a context manager that records the block as a span of a phase.

    Args:
        phase: one of ``PHASES``.
        owner: an object with the server's ``round_number`` (a ``State``). Default: the round of the enclosing span, or
            the thread's last round.
        arrays: the arrays that the block reads or writes; list an array twice if both.

    Cost: about 0.1 us if no profile is open.
    """
    return _Running(phase, owner, arrays) if _profiles else _OFF


def begin(phase: str, owner: Any = None) -> _Running | None:
    """Begin and return a span; the caller must call its ``end``. Faster than ``with``. None if no profile is open."""
    return _Running(phase, owner, ()).__enter__() if _profiles else None


def _next(phase: str, items: Iterator[Any]) -> Any:
    with span(phase):
        return next(items)


def timed(phase: str, items: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator over the items that records each ``next`` as a span."""
    return iter(lambda: _next(phase, items), None) if _profiles else items


def _bytes_of(value: Any) -> int:
    """Return the bytes of an array, or of the distinct arrays of a list or tuple.

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
    """Return the phases in order, and the time elsewhere. The phases of several threads may add up to over ``wall``."""
    longest = max(wall, own := float(counts[:, 1].sum()) / 1e9) or 1.0
    some = zip(PHASES, counts.tolist(), strict=True)
    rows = [PhaseTime(phase, calls, t / 1e9, t / 1e9 / longest, moved) for phase, (calls, t, moved) in some if calls]
    return (*rows, PhaseTime("elsewhere", 0, rest := max(0.0, wall - own), rest / longest, 0))


def _rounds_of(parts: Sequence[Recorded]) -> tuple[dict[tuple[int, ...], list[Any]], dict[tuple[int, ...], int]]:
    """Return start, end and counts by process, server and round, and the servers' indices."""
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
    """A profile from ``fedcore.profile()``: a context manager that can be read at any time.

    ``print(profile)`` prints ``table()``.

    Attributes:
        timeline: the maximum number of spans that the profile keeps.
    """

    def __init__(self, timeline: int) -> None:
        self.timeline, self._depth, self._began, self._before = timeline, 0, 0, 0
        # A list, since ``append`` needs no lock; a signal handler could not wait for a lock.
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
        """The total time for which the profile was open so far."""
        return (self._before + (perf_counter_ns() - self._began if self._depth else 0)) / 1e9

    @property
    def phases(self) -> tuple[PhaseTime, ...]:
        """The time of each phase that ran, in the order of a round, and the time elsewhere."""
        return _phases(sum((part.counts for part in self._parts()), _ZERO), self.seconds)

    @property
    def rounds(self) -> tuple[RoundTime, ...]:
        """The times of the timeline's rounds, sorted by server and round.

        Cost: reads the timeline, 1 to 2 seconds for a million spans.
        """
        rounds, servers = _rounds_of(self._parts())
        times = []
        for (process, server, round), (start, end, counts) in rounds.items():
            seconds = (end - start) / 1e9
            times.append(RoundTime(servers[process, server], round, seconds, _phases(counts, seconds)))
        return tuple(sorted(times))

    def table(self, *, by_round: bool = False) -> str:
        """Return a text table of the calls, time, share, bytes and GB/s of each phase.

        Args:
            by_round: whether to return one line per round instead, with the times of the round and its phases.
        """
        rows = _round_cells(self.rounds) if by_round else _phase_cells(self.phases)
        first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join((row[0].ljust(first), *map(str.rjust, row[1:], widths))).rstrip() for row in rows)

    __repr__ = __str__ = table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as JSON in the Trace Event Format, for chrome://tracing or https://ui.perfetto.dev.

        The file contains the processes, threads and spans; a span's arguments are server, round and bytes. A separate
        row shows each server's rounds. Times are in microseconds since the first span.

        Args:
            path: the file, which is replaced atomically. The method raises ConfigError if the file cannot be written.

        Cost: about 200 bytes and 10 us per span.
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
        """Return this process's recording so far, which a different process can ``absorb``."""
        with _lock:
            self._count()
            return Recorded(os.getpid(), self._counts.copy(), self._numbers[:], dict(_thread_names))

    def take(self, span: tuple[int, ...]) -> None:
        """Add a span of any thread; a signal handler may call this method at any time."""
        self._waiting.append(span)
        if len(self._waiting) >= 1000:  # spans are counted in batches
            with _lock:
                self._count()

    def absorb(self, recorded: Recorded) -> None:
        """Add the recording of a different process."""
        self._others.append(recorded)

    def _count(self) -> None:
        room = self.room()
        with suppress(IndexError):
            while True:
                span = self._waiting.pop(0)
                self._counts[span[0]] += 1, *span[-2:]
                self._numbers.extend(span[: room * _COLUMNS])
                room -= room > 0

    def room(self) -> int:
        """Return the number of spans that still fit into the timeline."""
        kept = sum((len(part.numbers) for part in self._others), len(self._numbers))
        return max(0, self.timeline - kept // _COLUMNS)

    def _parts(self) -> list[Recorded]:
        """Return all recordings, this process's first; other processes may have several."""
        return [self.recorded(), *self._others]


def profile(*, timeline: int = 1_000_000) -> Profile:
    """Return a profile, a context manager that measures the time and memory traffic of rounds by phase.

    The profile covers servers, networks, adapters and simulations in all threads. It also covers the trials of
    ``run_experiment`` in other processes once the trials end. ``FEDCORE_PROFILE=1 python mine.py`` profiles a whole
    program, and ``fedcore run --profile`` profiles an experiment. The phases, in the order of a round:

    ================  ==================================================================================
    round             the rest of a round: opening, checks, the report
    broadcast         computes the model and the clients' offsets
    clients, train    ``Server.round`` waits for the next update; the simulator trains a client
    encode, wait      an adapter encodes the model and its messages; it waits for replies
    decode, read      an adapter decodes a reply; the server reads an update
    validate          weights updates and checks them against the limits
    fold              adds updates to the sums and exchanges rows
    noise             adds the noise of ``PrivateMean`` to the sum
    step              computes x, v and the totals; a network mixes its models
    diagnose          computes norms and diversities
    commit, publish   commits rows and state; makes the folder's files durable
    gather            calls the shards of a cluster
    evaluate, save    the simulator evaluates the model; writes a checkpoint
    aggregate         ``fedcore.aggregate``
    ================  ==================================================================================

    - The time of a phase excludes nested phases, so the times of a thread add up to at most the elapsed time.
    - On a GPU, the time ends when the work is queued.
    - ``bytes`` counts each array that a kernel of the phase reads or writes once.
    - A profile records the spans during which it is open from start to end.
    - Several profiles may be open at once, nested or in different threads. Each records all spans.
    - A profile may be entered again, and then continues. Entering an open profile again has no effect.
    - Processes that are forked while the profile is open are not profiled.

    Args:
        timeline: the maximum number of spans to keep for ``save`` and ``rounds``. Later spans are only counted.

    Determinism: results are bit-identical with and without a profile.
    Cost: about 0.1 us for each of a round's 3 to 10 spans if no profile is open, else 3 to 8 us and 64 bytes of
        timeline per span. A profile keeps no arrays.

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
    return Profile(check_integer("timeline", timeline, 0))


def room() -> int | None:
    """Return the number of spans that still fit into an open profile's timeline, or None if no profile is open."""
    return max((one.room() for one in _profiles), default=None)


def absorb(recorded: Recorded) -> None:
    """Add the recording of a different process to the open profiles."""
    for one in _profiles:
        one.absorb(recorded)


def profile_program() -> None:
    """Profile this process if ``FEDCORE_PROFILE`` is set; ``import fedcore`` calls this function.

    ``FEDCORE_PROFILE=1`` prints the table to stderr when the program exits. ``FEDCORE_PROFILE=trace.json`` also writes
    the timeline. A program without any phase, or a killed program, writes nothing. Processes of multiprocessing have no
    report of their own; the program's report includes those of the simulator.

    Raises:
        ConfigError: the variable is not empty, 0, 1, or a path that ends with .json.
    """
    value = os.environ.get("FEDCORE_PROFILE", "")
    if value not in ("", "0", "1") and not value.endswith(".json"):
        raise ConfigError(f"FEDCORE_PROFILE={value!r}: must be 1, or the path of a .json file to write")
    if value in ("", "0"):
        return
    from multiprocessing import current_process, parent_process  # slow to import

    # While a process spawned by multiprocessing runs its imports, ``parent_process`` is not yet set.
    is_part = parent_process() is not None or getattr(current_process(), "_inheriting", False)
    if not is_part:
        path = None if value == "1" else absolute(value)
        atexit.register(_report, Profile(1_000_000 if path else 0).__enter__(), path, os.getpid())


def _report(profile: Profile, path: os.PathLike[str] | None, process: int) -> None:
    """Print and write the profile when its process exits, unless no phase ran or this process is a fork."""
    profile.__exit__()
    if os.getpid() == process and profile.phases[1:]:  # there is a phase in addition to the time elsewhere
        lines = [profile.table()]
        try:
            if path is not None:
                profile.save(path)
                lines.append(f"wrote {path}")
        except FedcoreError as error:
            lines.append(f"error: FEDCORE_PROFILE: {error}")
        with suppress(OSError, ValueError, AttributeError):  # stderr may be closed
            print(*lines, sep="\n", file=sys.stderr)


def _phase_cells(phases: Sequence[PhaseTime]) -> list[tuple[str, ...]]:
    """Return the rows of the table of phases, including the headings and the total."""
    rows: list[tuple[str, ...]] = [("phase", "calls", "time", "share", "moved", "GB/s")]
    total = PhaseTime("in all", 0, sum(one.seconds for one in phases), 1.0, sum(one.bytes for one in phases))
    for one in (*phases, total):
        calls, rate = str(one.calls or ""), one.gigabytes_per_second
        share, speed = f"{100 * one.share:.1f} %", "" if rate is None else f"{rate:.1f}"
        rows.append((one.phase, calls, _in_unit(one.seconds, _TIMES), share, _in_unit(one.bytes, _SIZES), speed))
    return rows


def _round_cells(rounds: Sequence[RoundTime]) -> list[tuple[str, ...]]:
    """Return the rows of the table of rounds, including the headings."""
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
    """Return a number in its largest fitting unit with at least three digits; empty for 0.

    >>> _in_unit(0.00001234, _TIMES), _in_unit(0.5, _TIMES), _in_unit(61.23, _TIMES), _in_unit(1_430_000_000, _SIZES)
    ('12.3 us', '500 ms', '61.2 s', '1.43 GB')
    """
    unit, scale = next((one for one in units if number >= one[1]), units[-1])
    return f"{number / scale:{'.0f' if number > 999 * scale else '.3g'}} {unit}" if number else ""


def _events(parts: Sequence[Recorded]) -> Iterator[dict[str, Any]]:
    """Yield trace events for the names of processes and threads, the rounds, and the spans."""
    rounds, servers = _rounds_of(parts)
    zero = min((span[4] for part in parts for span in part.spans()), default=0)

    def event(cat: str, name: str, at: tuple[int, int], args: Any, start: int = zero, end: int = zero) -> Any:
        of = {"ph": "X" if cat else "M", "cat": cat, "name": name, "pid": at[0], "tid": at[1], "args": args}
        return of | {"ts": (start - zero) / 1e3, "dur": (end - start) / 1e3}  # in microseconds

    for part in parts:
        yield event("", "process_name", (part.process, 0), {"name": f"fedcore, process {part.process}"})
        for thread, name in part.threads.items():
            yield event("", "thread_name", (part.process, thread), {"name": name})
    for (process, _), number in servers.items():
        yield event("", "thread_name", (process, _ROUNDS + number), {"name": f"rounds of server {number}"})
    for (process, server, round), (start, end, _) in rounds.items():
        args = {"server": servers[process, server], "round": round}
        yield event("round", f"round {round}", (process, _ROUNDS + args["server"]), args, start, end)
    for part in parts:
        for phase, server, round, thread, start, end, _, moved in part.spans():
            args = {"server": servers[part.process, server], "round": round} if round >= 0 else {}
            args |= {"bytes": moved} if moved else {}
            yield event("phase", PHASES[phase], (part.process, thread), args, start, end)


def _after_fork() -> None:
    """Close all profiles in a forked process, and replace the lock, which a thread of the parent may hold."""
    global _profiles, _lock, _thread
    _profiles, _lock, _thread = (), threading.RLock(), _Thread()


os.register_at_fork(after_in_child=_after_fork)
