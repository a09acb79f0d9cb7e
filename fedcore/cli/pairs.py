"""Names and values, one pair a line."""

from collections.abc import Iterable


def show_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print the values in a column beside their names."""
    shown = list(pairs)
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        print(f"{name:{width}}  {value}")
