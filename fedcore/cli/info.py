"""``fedcore info``."""

from fedcore.cli.pairs import show_pairs
from fedcore.runtime import build_info


def info() -> None:
    """Show what a bug report needs."""
    show_pairs((name, str(value)) for name, value in build_info().items())
