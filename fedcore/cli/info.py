"""``fedcore info``."""

from fedcore import cuda
from fedcore.cli.pairs import show_pairs
from fedcore.runtime import build_info


def info() -> None:
    """Show what a bug report needs: versions, what was built, and which CUDA devices there are."""
    pairs = [(name, str(value)) for name, value in build_info().items()]
    show_pairs([*pairs, *_devices()])


def _devices() -> list[tuple[str, str]]:
    """Each CUDA device, or why there is none."""
    reason = cuda.reason()
    if reason is not None:
        return [("cuda", f"none: {reason}")]
    return [
        (f"cuda:{ordinal}", f"{one.name}, {one.capability / 10:.1f}, {one.memory / 2**30:.1f} GiB")
        for ordinal, one in enumerate(cuda.devices())
    ]
