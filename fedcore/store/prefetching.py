"""A thread that brings rows to a device while the host does something else."""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetching(Generic[Item]):
    """Brings rows, one after another, in a thread of its own.

    Args:
        items: the rows, by number, and what ``bring`` is told of each.
        bring: brings one; what it cannot bring is left, for who needs it to hear why.
    """

    def __init__(self, items: Sequence[tuple[int, Item]], bring: Callable[[int, Item], None]) -> None:
        self._items, self._bring = items, bring
        self._brought: list[tuple[int, Item]] = []
        self._missed: list[tuple[int, Item]] = []
        self._thread = threading.Thread(target=self._run, name="fedcore-prefetch", daemon=True)
        self._thread.start()

    def end(self) -> tuple[list[tuple[int, Item]], list[tuple[int, Item]]]:
        """Wait until it has come to its end; the rows that were brought, and those that were not."""
        self._thread.join()
        return self._brought, self._missed

    def _run(self) -> None:
        for number, item in self._items:
            try:
                self._bring(number, item)
            except Exception:
                self._missed.append((number, item))
            else:
                self._brought.append((number, item))
