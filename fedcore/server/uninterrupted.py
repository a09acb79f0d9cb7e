"""Ctrl-C has to wait while a round's changes are made."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a KeyboardInterrupt back until the block is done, so that it never stops half-way.

    Only the main thread is ever interrupted, and only where Python handles the signal: where it is ignored, ends the
    process, or is handled by a program that Python is part of, this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])
