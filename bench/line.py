"""A line of the tables: what one benchmark found, what it was due to find, and whether it did."""

from dataclasses import dataclass, field

from rich.table import Table

OURS = "fedcore"
ALONE = ", alone"
MOST_OTHERS = 0.1
"""The share of the cores that other programs may have taken from a line that is to be believed."""


@dataclass
class Line:
    """One benchmark's figures; every ratio is somebody's time (or memory) over fedcore's, so that more is better.

    Attributes:
        title: what was done.
        ratios: rival or floor -> median over the rounds of the ratio within a round.
        targets: rival or floor -> the ratio that is due.
        seconds: everybody -> median seconds.
        quartiles: rival or floor -> the first and third quartile of its ratio.
        after_pause: rival -> the ratio of the times after a pause, when the threads of both sleep.
        bytes: what the work must move, or None where that is not the point.
        others: the share of the cores that other programs took meanwhile.
        huge_pages: the share of the memory that lay on huge pages.
        short: whether the arrays were small, for which no target is meant.
    """

    title: str
    ratios: dict[str, float]
    targets: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    quartiles: dict[str, list[float]] = field(default_factory=dict)
    after_pause: dict[str, float] = field(default_factory=dict)
    bytes: int | None = None
    others: float | None = None
    huge_pages: float | None = None
    short: bool = False

    @property
    def is_disturbed(self):
        """Whether other programs took so much of the machine that no figure is to be quoted."""
        return self.others is not None and self.others > MOST_OTHERS

    def met(self, *names):
        """Whether those ratios, of one rival, reach its target: "yes", "no", "?" if disturbed; "" where none is due."""
        target = self.targets.get(names[0].removesuffix(ALONE))
        if target is None or self.short:
            return ""
        if self.is_disturbed:
            return "?"
        return "yes" if all(self.ratios[name] >= target for name in names if name in self.ratios) else "no"

    def table(self):
        """The line for a terminal."""
        table = Table(title=self.title, caption=self._caption(), title_justify="left")
        for column in ("", "ms (median)", "GB/s", "time / fedcore's", "quartiles", "after a pause", "target", "met"):
            table.add_column(column, justify="left" if column in ("", "met") else "right")
        names = [*self.seconds, *(name for name in self.ratios if name not in self.seconds)]
        for name in names:
            table.add_row(name, *self._cells(name))
        return table

    def _cells(self, name):
        took = self.seconds.get(name)
        low, high = self.quartiles.get(name, (None, None))
        target = self.targets.get(name.removesuffix(ALONE))
        return (
            "" if took is None else milliseconds(took),
            "" if took is None or self.bytes is None else f"{self.bytes / took / 1e9:.1f}",
            number(self.ratios.get(name)),
            "" if low is None else f"{number(low)}-{number(high)}",
            number(self.after_pause.get(name)),
            number(target),
            self.met(name),
        )

    def _caption(self):
        said = [] if self.huge_pages is None else [f"{self.huge_pages:.0%} of the memory on huge pages"]
        if self.short and self.targets:
            said.append("short form: targets are meant for full sizes")
        if self.is_disturbed:
            said.append(f"other programs took {self.others:.0%} of the cores: not to be quoted")
        return "; ".join(said)


def milliseconds(seconds):
    """Milliseconds with three or four digits."""
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.4f}"


def number(ratio):
    """A ratio with two or three digits; nothing for None."""
    if ratio is None:
        return ""
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"
