"""``FEDCORE_PROFILE``: a trace of a whole program, from the import of fedcore to the end."""

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path

from fedcore.arguments import absolute
from fedcore.errors import ConfigError, FedcoreError
from fedcore.tracing.trace import TIMELINE, Trace

VARIABLE = "FEDCORE_PROFILE"


def profile() -> None:
    """Trace this process if the environment asks for it.

    ``FEDCORE_PROFILE=1`` writes the table to stderr when the program ends, ``FEDCORE_PROFILE=trace.json`` also the
    file. A program in which nothing ran writes nothing, nor does one that is killed. A process that multiprocessing has
    started has its own program's trace, not one of its own; the simulator's are part of it.

    Raises:
        ConfigError: the variable is neither 1 (or 0, or empty) nor a path that ends with .json.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked in ("", "0"):
        return
    if asked != "1" and not asked.endswith(".json"):
        raise ConfigError(f"{VARIABLE}: expected 1, or the path of a .json file to be written, got {asked!r}")
    if not _is_of_multiprocessing():
        path = None if asked == "1" else absolute(asked)
        atexit.register(_report, Trace(TIMELINE if path else 0).__enter__(), path, os.getpid())


def _is_of_multiprocessing() -> bool:
    """Tell whether multiprocessing has started this process: one is spawned that knows it only after its imports."""
    from multiprocessing import current_process, parent_process

    return parent_process() is not None or getattr(current_process(), "_inheriting", False)


def _report(trace: Trace, path: Path | None, process: int) -> None:
    """Show and write the trace at the end of its process; a fork of it has none."""
    if os.getpid() != process or _is_of_multiprocessing():
        return
    trace.__exit__(None, None, None)
    if not any(one.calls for one in trace.phases):
        return
    said = [trace.table()]
    try:
        if path is not None:
            trace.save(path)
            said.append(f"wrote {path}")
    except FedcoreError as error:
        said.append(f"error: {VARIABLE}: {error}")
    with suppress(OSError, ValueError, AttributeError):  # there may be no stderr any more
        print(*said, sep="\n", file=sys.stderr)
