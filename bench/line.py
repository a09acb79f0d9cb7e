"""A line of the tables: a benchmark's figures, its targets, and whether it meets them."""

from dataclasses import dataclass, field

from rich.table import Table

OURS = "fedcore"
ALONE = ", alone"
MOST_OTHERS = 0.1
"""The largest share of the cores that other programs may take during a valid measurement."""


@dataclass
class Line:
    """One benchmark's figures. Every ratio is a rival's time (or memory) over fedcore's, so larger is better.

    Attributes:
        title: the measured work.
        ratios: by rival or floor, the median over the rounds of the ratio within a round.
        targets: by rival or floor, the ratio to reach.
        seconds: by participant, the median seconds.
        quartiles: by rival or floor, the first and third quartile of the ratio.
        after_pause: by rival, the ratio of the times after a pause, when the threads of both sleep.
        bytes: the bytes that the work must move; None if the benchmark does not measure bandwidth.
        others: the share of the cores that other programs used during the measurement.
        huge_pages: the share of the memory on huge pages.
        short: whether the arrays were small; targets do not apply then.
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
        """Whether other programs used so much of the machine that the figures are invalid."""
        return self.others is not None and self.others > MOST_OTHERS

    def met(self, *names):
        """Return whether these ratios reach the target: "yes", "no", "?" if disturbed, or "" without a target."""
        target = self.targets.get(names[0].removesuffix(ALONE))
        if target is None or self.short:
            return ""
        if self.is_disturbed:
            return "?"
        return "yes" if all(self.ratios[name] >= target for name in names if name in self.ratios) else "no"

    def table(self):
        """Return the line as a table for a terminal."""
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
        output = [] if self.huge_pages is None else [f"{self.huge_pages:.0%} of the memory on huge pages"]
        if self.short and self.targets:
            output.append("short form: targets are meant for full sizes")
        if self.is_disturbed:
            output.append(f"other programs took {self.others:.0%} of the cores: not to be quoted")
        return "; ".join(output)


def milliseconds(seconds):
    """Return seconds as milliseconds with three or four digits."""
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.4f}"


def number(ratio):
    """Return a ratio with two or three digits; "" for None."""
    if ratio is None:
        return ""
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"
