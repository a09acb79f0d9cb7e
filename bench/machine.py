"""What a figure depends on besides the code: the machine, the versions, and who else was computing."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import fedcore


def describe():
    """Machine and versions, for the head of a run and for its JSON."""
    built = fedcore.build_info()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": built["threads"],
        "isa": built["isa"],
        "isa_best": built["isa_best"],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "transparent_huge_pages": _transparent_huge_pages(),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "compiler": built["compiler"],
        "fedcore": built["fedcore"],
        "python": built["python"],
        **{name: _version(name) for name in ("numpy", "scipy", "torch")},
    }


def head(machine):
    """The description in three lines."""
    return (
        f"{machine['date']}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"pages of {machine['page_bytes'] // 1024} KiB, transparent huge pages: {machine['transparent_huge_pages']}\n"
        f"fedcore {machine['fedcore']} at {machine['isa']} (best: {machine['isa_best']}), compiler "
        f"{machine['compiler']}; fedcore and torch on {machine['threads']} threads; load average before: "
        f"{machine['load_average']}\n"
        f"torch {machine['torch']}, NumPy {machine['numpy']}, SciPy {machine['scipy']}, Python {machine['python']}, "
        f"{machine['platform']}"
    )


def huge_page_share():
    """The share of this process's own memory that lies on huge pages, or None where Linux does not tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return round(kib["AnonHugePages"] / kib["Anonymous"], 2)


class OtherPrograms:
    """What share of the cores other programs took, and the hypervisor gave to others, since this was made.

    The time of child processes counts as our own once they have ended and were waited for.
    """

    def __init__(self):
        self._before = self._seconds()

    def share(self):
        """A number in 0..1, or None where Linux does not tell."""
        if self._before is None:
            return None
        busy, all_, own = (after - before for after, before in zip(self._seconds(), self._before, strict=True))
        return round(max(0.0, busy - own) / all_, 3) if all_ else 0.0

    @staticmethod
    def _seconds():
        try:
            first = Path("/proc/stat").read_text().splitlines()[0]
        except OSError:
            return None
        user, nice, system, idle, iowait, *rest = (int(word) for word in first.split()[1:9])
        per_second = os.sysconf("SC_CLK_TCK")
        busy = user + nice + system + sum(rest)  # interrupts and what the hypervisor gave to others
        return busy / per_second, (busy + idle + iowait) / per_second, sum(os.times()[:4])


def _cpu():
    """The name, and the numbers that tell a generation where a hypervisor hides it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    said = dict(reversed([tuple(map(str.strip, line.partition(":")[::2])) for line in lines]))
    if "model name" not in said:
        return platform.processor() or platform.machine()
    return f"{said['model name']} (family {said.get('cpu family')}, model {said.get('model')})"


def _transparent_huge_pages():
    """The mode that is chosen: it stands in brackets."""
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return modes.read_text().split("[")[1].split("]")[0] if modes.exists() else "unknown"


def _version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
