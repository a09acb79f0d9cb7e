"""Processes that are killed after a time, or at their so many-th call into the system."""

import os
import select
import signal
import traceback

from fedcore.store.files import disk as system_calls

WRITING = ("resize", "free", "reserve", "sync", "sync_path", "write", "commit", "rename", "exchange")
CALLS = [(system_calls, name) for name in WRITING] + [(os, "unlink"), (os, "rmdir")]
"""All that changes a disk, except that a file is made: an empty one is there at the next call."""


def die_at(call, *, after, all_of=None, calls=CALLS):
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

    for module, name in calls:
        setattr(module, name, deadly(getattr(module, name)))


def kill(group=None):
    if group is not None:
        os.killpg(group, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # it comes at once


def count_calls(calls=CALLS):
    """A list that has an entry for each of this process's calls into the system from now on."""
    made = []

    def counted(act):
        def acting(*arguments, **named):
            made.append(act)
            return act(*arguments, **named)

        return acting

    for module, name in calls:
        setattr(module, name, counted(getattr(module, name)))
    return made


def calls_of(act, calls=CALLS):
    """The number of calls into the system that ``act`` makes in a forked process."""
    read, write = os.pipe()

    def counted():
        made = count_calls(calls)
        act()
        os.write(write, str(len(made)).encode())

    assert not killed(counted)
    os.close(write)
    with os.fdopen(read) as pipe:
        return int(pipe.read())


def killed(act):
    """Run this in a forked process; return whether it was killed."""
    if (child := os.fork()) == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)
    status = ended(child)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "an error in the process"
    return os.WIFSIGNALED(status)


def ended(child, seconds=300):
    """The status of a forked process, which must end by then."""
    watched = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
    if watched is not None:
        ready, _, _ = select.select([watched], [], [], seconds)
        os.close(watched)
        if not ready:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"the forked process {child} hangs: it has not ended within {seconds} s")
    return os.waitpid(child, 0)[1]
