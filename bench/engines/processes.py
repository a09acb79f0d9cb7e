"""CPU seconds of this process, its workers on Ray, and Ray's other processes; other load hardly changes them."""

import os
from pathlib import Path
from typing import NamedTuple

PER_SECOND = os.sysconf("SC_CLK_TCK")


class Seconds(NamedTuple):
    """CPU seconds by process."""

    driver: float
    workers: float
    others: float

    def __sub__(self, before):
        return Seconds(*(now - then for now, then in zip(self, before, strict=True)))


def seconds(workers):
    """Return the CPU seconds so far.

    Args:
        workers: a function of a process's name and number that returns whether it is a worker.
    """
    table = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # the process has ended
            continue
        fields = text[text.rindex(")") + 2 :].split()
        name = text[text.index("(") + 1 : text.rindex(")")]
        used = (int(fields[11]) + int(fields[12])) / PER_SECOND
        table[int(path.parent.name)] = int(fields[1]), name, used
    own = {os.getpid()}
    while more := {number for number, (parent, *_) in table.items() if parent in own} - own:
        own |= more
    below = own - {os.getpid()}
    there = {number for number in below if workers(table[number][1], number)}
    driver = table[os.getpid()][2]
    return Seconds(driver, sum(table[one][2] for one in there), sum(table[one][2] for one in below - there))
