"""The conditions of a measurement: the machine, the versions, and the load of other programs."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import fedcore


def describe():
    """Return the machine and versions, for the header of a run and for its JSON."""
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
    """Return the description in three lines."""
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
    """Return the share of this process's memory on huge pages; None if Linux does not report it."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return round(kib["AnonHugePages"] / kib["Anonymous"], 2)


class OtherPrograms:
    """The share of the cores that other programs and virtual machines have used since this object was created.

    The time of child processes counts as this process's time once they have been waited for.
    """

    def __init__(self):
        self._before = self._seconds()

    def share(self):
        """Return a number in 0..1, or None if Linux does not report it."""
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
        busy = user + nice + system + sum(rest)  # interrupts, and time of other virtual machines
        return busy / per_second, (busy + idle + iowait) / per_second, sum(os.times()[:4])


def _cpu():
    """Return the processor's name, with family and model, since a hypervisor's name may hide the generation."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    output = dict(reversed([tuple(map(str.strip, line.partition(":")[::2])) for line in lines]))
    if "model name" not in output:
        return platform.processor() or platform.machine()
    return f"{output['model name']} (family {output.get('cpu family')}, model {output.get('model')})"


def _transparent_huge_pages():
    """Return the selected mode of transparent huge pages."""
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return modes.read_text().split("[")[1].split("]")[0] if modes.exists() else "unknown"


def _version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
