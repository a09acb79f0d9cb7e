"""The file of a trace, in the Trace Event Format, which chrome://tracing and Perfetto show."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedcore.atomic_file import replacing
from fedcore.errors import ConfigError
from fedcore.tracing.functions import FUNCTIONS
from fedcore.tracing.recording import Recorded, spans_of
from fedcore.tracing.totals import RoundSpans

ROUNDS = 1_000_000
"""The thread under which a process's first server has its rounds, and so on from there: no real one has the number."""


def write(path: Path, parts: Sequence[Recorded], facts: dict[str, Any]) -> None:
    """Write the file, or leave what was there: it is there as a whole or not at all.

    Args:
        facts: what the file says beside the events.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with replacing(path) as file:
            file.write('{"traceEvents": [')
            for number, event in enumerate(_events(parts)):
                file.write(f"{',' if number else ''}\n{json.dumps(event)}")
            file.write(f'\n], "displayTimeUnit": "ms", "otherData": {json.dumps(facts)}}}\n')
    except OSError as error:
        raise ConfigError(f"path: cannot write to {path}: {error}") from error


def _events(parts: Sequence[Recorded]) -> Iterator[dict[str, Any]]:
    """Names of processes and threads, each round as an event, and the spans, each within what called it."""
    rounds = RoundSpans((part.process, span) for part in parts for span in spans_of(part))
    zero = min((span.start for part in parts for span in spans_of(part)), default=0)
    for process in dict.fromkeys(part.process for part in parts):
        yield _name("process_name", process, 0, f"fedcore, process {process}")
    for (process, _), server in rounds.servers.items():
        yield _name("thread_name", process, ROUNDS + server, f"rounds of server {server}")
    for part in parts:
        for thread, name in part.threads.items():
            yield _name("thread_name", part.process, thread, name)
    for (process, server, round), (start, end) in rounds.ends.items():
        number = rounds.servers[process, server]
        of = {"server": number, "round": round}
        yield _complete(f"round {round}", "round", process, ROUNDS + number, start - zero, end - start, of)
    for part in parts:
        for span in spans_of(part):
            function = FUNCTIONS[span.function]
            args: dict[str, Any] = {"function": function.place}
            if span.round >= 0:
                args |= {"server": rounds.servers[part.process, span.server], "round": span.round}
            if span.bytes:
                args |= {"bytes": span.bytes}
            name, kind = (function.name, "kernel") if function.is_kernel else (function.phase, "phase")
            yield _complete(name, kind, part.process, span.thread, span.start - zero, span.end - span.start, args)


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    name: str, kind: str, process: int, thread: int, start: int, length: int, args: dict[str, Any]
) -> dict[str, Any]:
    """An event with its beginning and length, which the format has in microseconds."""
    times = {"ts": start / 1e3, "dur": length / 1e3}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": thread, **times, "args": args}
