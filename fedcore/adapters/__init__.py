"""Adapters of fedcore to other frameworks: one module or package per framework, which imports only that framework."""

from collections.abc import Iterator
from contextlib import contextmanager

from fedcore.errors import MissingDependencyError


@contextmanager
def importing(adapter: str, needed: str) -> Iterator[None]:
    """Let a failed import say which framework is missing or too old, and how to install it."""
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError.of(f"fedcore.adapters.{adapter}", f"{needed} ({error})", extra=adapter) from error
