"""Names and values: one pair a line, or all of them as JSON; and numbers as people read them."""

import json
from collections.abc import Iterable
from typing import Any


def show_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print the values in a column beside their names."""
    shown = list(pairs)
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        print(f"{name:{width}}  {value}")


def show_json(value: Any) -> None:
    """Print a value as JSON, for other programs: what it has no form for, such as a path, as text."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def bytes_of(size: float) -> str:
    """Bytes as people read them."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
