"""Threads, instruction set and build: what a bug report needs to say."""

import platform
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from fedcore.arguments import whole
from fedcore.native import core

__version__ = core.version


def threads() -> int:
    """The number of threads that one call may use: FEDCORE_THREADS, else the cores that this process may use.

    Those are the cores that it may run on, or fewer where its control group (a container's, say) has less time than
    theirs: a quota of 2.5 cores counts as 2, and one below 1 as 1.

    Raises:
        RuntimeError: FEDCORE_THREADS is no number in 1..4096. A kernel that would share its work says the same.
    """
    return core.threads()


def set_threads(count: int) -> None:
    """Let one call use up to ``count`` threads; results have the same bits for any count.

    Raises:
        RangeError: ``count`` is not in 1..4096.
    """
    core.set_threads(whole("count", count, 1, 4096))


def isa() -> str:
    """The instruction-set level of the kernels in use; the environment variable FEDCORE_ISA forces one."""
    return core.isa()


def build_info() -> dict[str, str | int]:
    """Versions, compiler, instruction set and threads, and the packages that an experiment's figures depend on."""
    return {
        "fedcore": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "compiler": core.compiler,
        "cuda_kernels": core.cuda_targets or f"none: {core.cuda_missing}",
        "platform": platform.platform(),
        "isa": isa(),
        "isa_best": core.best_isa(),
        "threads": threads(),
        "torch": _version("torch"),
        "scikit-learn": _version("scikit-learn"),
    }


def hide_warnings_of_others() -> None:
    """In a process that is fedcore's own, show no FutureWarning of another package: its user can do nothing about it.

    One that torch, say, has of a package that it finds installed. Whoever asks for warnings (``python -W``,
    ``PYTHONWARNINGS``) gets all of them.
    """
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(?!fedcore\b)")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
