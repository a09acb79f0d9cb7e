"""Processes that are killed at their so many-th call into the system."""

import os
import signal

from fedcore.store.files import disk as system_calls

WRITING = ("resize", "free", "reserve", "sync", "sync_path", "write", "commit", "rename", "exchange")
CALLS = [(system_calls, name) for name in WRITING] + [(os, "unlink"), (os, "rmdir")]
"""All that changes a disk, except that a file is made: an empty one is there at the next call."""


def die_at(call, *, after, all_of=None):
    """Have this process killed at its ``call``-th call, before or after it happened; or a group of processes."""
    count = 0

    def deadly(act):
        def acting(*arguments, **named):
            nonlocal count
            count += 1
            own = count  # a call may make others
            if own == call and not after:
                kill(all_of)
            try:
                return act(*arguments, **named)
            finally:  # it may fail, as to unlink what is not there does
                if own == call:
                    kill(all_of)

        return acting

    for module, name in CALLS:
        setattr(module, name, deadly(getattr(module, name)))


def kill(group=None):
    if group is not None:
        os.killpg(group, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # it comes at once


def count_calls():
    """A list that has an entry for each of this process's calls into the system from now on."""
    calls = []

    def counted(act):
        def acting(*arguments, **named):
            calls.append(act)
            return act(*arguments, **named)

        return acting

    for module, name in CALLS:
        setattr(module, name, counted(getattr(module, name)))
    return calls
