"""Tables of phases in words: lines for a terminal, and the cells of a notebook's."""

from collections.abc import Sequence

from fedcore.tracing.totals import ELSEWHERE, PhaseTime, RoundTime

HEADINGS = ("phase", "calls", "time", "share", "moved", "GB/s")


def phase_cells(phases: Sequence[PhaseTime]) -> list[tuple[str, ...]]:
    """The rows of a table of phases, its headings first and the sum last."""
    rows = [HEADINGS]
    for one in phases:
        rate = one.gigabytes_per_second
        calls, moved = (str(one.calls) if one.phase != ELSEWHERE else ""), (size(one.bytes) if one.bytes else "")
        share = f"{100 * one.share:.1f} %"
        rows.append((one.phase, calls, duration(one.seconds), share, moved, f"{rate:.1f}" if rate is not None else ""))
    moved = sum(one.bytes for one in phases)
    rows.append(("in all", "", duration(sum(one.seconds for one in phases)), "", size(moved) if moved else "", ""))
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
        [cell.ljust(width) if not i else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> duration(0.00001234), duration(0.5), duration(61.23)
    ('12.3 us', '500 ms', '61.2 s')
    """
    for unit, scale in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            break
    return f"{_short(seconds * scale)} {unit}"


def size(bytes: int) -> str:
    """A number of bytes in the unit that suits it.

    >>> size(999), size(1_430_000_000)
    ('999 B', '1.43 GB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)):
        if bytes >= scale:
            break
    return f"{_short(bytes / scale)} {unit}"


def _short(number: float) -> str:
    """A number in three digits, and whole from there on."""
    return f"{number:.0f}" if number >= 99.95 or not number else f"{number:.{2 if number < 9.995 else 1}f}"
