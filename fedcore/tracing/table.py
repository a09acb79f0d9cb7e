"""Tables of phases in words: lines for a terminal, and the cells of a notebook's."""

from collections.abc import Mapping, Sequence

from fedcore.tracing.totals import ELSEWHERE, PhaseTime, RoundTime

HEADINGS = ("phase", "calls", "time", "share", "moved", "GB/s")


def phase_cells(phases: Sequence[PhaseTime]) -> list[tuple[str, ...]]:
    """The rows of a table of phases, its headings first and the sum last."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    for one in phases:
        rate = one.gigabytes_per_second
        calls, share = "" if one.phase == ELSEWHERE else str(one.calls), f"{100 * one.share:.1f} %"
        speed = "" if rate is None else f"{rate:.1f}"
        rows.append((one.phase, calls, duration(one.seconds), share, _moved(one.bytes), speed))
    seconds, moved = sum(one.seconds for one in phases), sum(one.bytes for one in phases)
    rows.append(("in all", "", duration(seconds), "", _moved(moved), ""))
    return rows


def round_cells(rounds: Sequence[RoundTime]) -> list[tuple[str, ...]]:
    """The rows of a table of rounds, its headings first: each round's time, and that of each of its phases."""
    names = list(dict.fromkeys(one.phase for each in rounds for one in each.phases if one.phase != ELSEWHERE))
    names.append(ELSEWHERE)
    many = len({each.server for each in rounds}) > 1
    rows = [(*(("server",) if many else ()), "round", "time", *names)]
    for each in rounds:
        own = {one.phase: duration(one.seconds) for one in each.phases}
        of = (str(each.server),) if many else ()
        rows.append((*of, str(each.round), duration(each.seconds), *(own.get(name, "") for name in names)))
    return rows


def lines(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines: the first column on the left, the others on the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [
        [
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> duration(0.00001234), duration(0.5), duration(61.23)
    ('12.3 us', '500 ms', '61.2 s')
    """
    return _in_unit(seconds, {"s": 1, "ms": 1e-3, "us": 1e-6})


def size(bytes: int) -> str:
    """A number of bytes in the unit that suits it.

    >>> size(999), size(1_430_000_000)
    ('999 B', '1.43 GB')
    """
    return _in_unit(bytes, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1})


def _moved(bytes: int) -> str:
    return size(bytes) if bytes else ""


def _in_unit(number: float, units: Mapping[str, float]) -> str:
    """A number in the first unit that it reaches, in three digits where it has so many."""
    unit, scale = next(((unit, scale) for unit, scale in units.items() if number >= scale), [*units.items()][-1])
    value = number / scale
    return f"{value:.{0 if value >= 99.95 or not value else 2 if value < 9.995 else 1}f} {unit}"
