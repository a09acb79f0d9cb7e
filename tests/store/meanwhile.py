"""Another process's moves in a folder at the very moments when this one does something there."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has locks of an open file, and lists them")

OPENING, OPENED = "sqlite3.connect", "sqlite3.connect/handle"
_moves: list[Mapping[str, Callable[..., object]]] = []


@contextmanager
def meanwhile(moves: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """Call moves with the facts of the interpreter's audit events, by their names, as these happen."""
    if not _moves:
        sys.addaudithook(lambda event, facts: _moves[-1][event](*facts) if event in _moves[-1] else None)
    _moves.append(moves)
    try:
        yield
    finally:
        _moves.append({})
