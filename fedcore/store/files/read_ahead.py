"""Reading ahead and writing back, in a thread of its own while others compute."""

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from fedcore.store.files.slot_file import SlotFile

IDLE_SECONDS = 0.05
"""How long after a commit nothing else must have been committed before its writing begins."""


class DiskThread:
    """One thread for a file of slots, which is started when it is first needed.

    Reading ahead is what makes a cold cohort quick: the disk gets many requests at a time, where reading row by row
    gives it one. Writing back while nothing is committed leaves little to do for the next sync; beside rounds that
    follow each other at once it would only hold them up (by five times, on one disk).
    """

    def __init__(self, slots: SlotFile) -> None:
        self._slots = slots
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._stopping = False
        self._commits = 0

    def read_ahead(self, slots: list[int]) -> None:
        """Start reading slots from the disk, in their order there."""
        self._do(lambda: self._read(sorted(slots)))

    def write_back(self) -> None:
        """Start writing what was changed to the disk, unless more is committed soon."""
        self._commits += 1
        commits = self._commits
        self._do(lambda: self._write(commits))

    def close(self) -> None:
        """Stop, and wait until the thread has; it may be this very one, where a dropped store is collected."""
        if self._thread is not None and self._process == os.getpid():
            self._stopping = True
            self._tasks.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._thread = None

    def _do(self, task: Callable[[], None]) -> None:
        if self._thread is None or self._process != os.getpid():  # a fork has no threads of its parent
            self._process, self._tasks, self._stopping = os.getpid(), SimpleQueue(), False
            self._thread = threading.Thread(target=self._run, args=(self._tasks,), name="fedcore-store", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _run(self, tasks: "SimpleQueue[Callable[[], None] | None]") -> None:
        while (task := tasks.get()) is not None:
            try:  # noqa: SIM105  # suppress() needs memory itself
                task()
            except (OSError, MemoryError):  # a system that cannot do this does without
                pass

    def _write(self, commits: int) -> None:
        if commits == self._commits and not self._stopping:
            time.sleep(IDLE_SECONDS)
            if commits == self._commits:
                self._slots.start_writing()

    def _read(self, slots: list[int]) -> None:
        for slot in slots:
            if self._stopping:
                return
            self._slots.will_need(slot)
