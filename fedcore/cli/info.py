"""``fedcore info``."""

from fedcore import cuda
from fedcore.cli.pairs import show_json, show_pairs
from fedcore.runtime import build_info


def info(as_json: bool) -> None:
    """Show what a bug report needs: versions, what was built, and which CUDA devices there are."""
    reason = cuda.reason()
    devices = [] if reason is not None else cuda.devices()
    if as_json:
        show_json(build_info() | {"cuda_missing": reason, "cuda_devices": [device._asdict() for device in devices]})
        return
    pairs = [(name, str(value)) for name, value in build_info().items()]
    if reason is not None:
        pairs.append(("cuda", f"none: {reason}"))
    for ordinal, one in enumerate(devices):
        pairs.append((f"cuda:{ordinal}", f"{one.name}, {one.capability / 10:.1f}, {one.memory / 2**30:.1f} GiB"))
    show_pairs(pairs)
