"""The exit status of a command that runs trials: interrupted, or with trials that failed."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from fedcore.cli.status import FAILED, INTERRUPTED
from fedcore.experiment import Event


@contextmanager
def interruptible(console: Console, how_to_go_on: Callable[[], str]) -> Iterator[None]:
    """At Ctrl-C, or SIGTERM (a scheduler's, when a job's time is over), say how to go on; exit with ``INTERRUPTED``.

    Args:
        console: where it is said.
        how_to_go_on: makes the advice, from what is there at that time.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if in_main else None
    try:
        yield
    except KeyboardInterrupt:
        said = f"interrupted; {how_to_go_on()}"
        console.print(said, style="yellow", markup=False, highlight=False, soft_wrap=True)
        sys.exit(INTERRUPTED)
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def exit_on_failures(console: Console, failed: Sequence[tuple[str, Event]]) -> None:
    """Name the trials that failed and exit with ``FAILED``, if there are any."""
    for name, event in failed:
        console.print(f"{name}: failed: {event.error}", style="red", markup=False, soft_wrap=True)
    if failed:
        sys.exit(FAILED)
