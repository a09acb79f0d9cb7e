"""The process: signals, seeds, threads, instruction set and build."""

# The functions of ``signal`` convert numbers to enums and back, which takes ten times as long for 60 signals.
import _signal  # type: ignore[import-not-found]
import hashlib
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from importlib import import_module
from itertools import compress
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from fedcore.arrays import core
from fedcore.errors import PicklingError
from fedcore.validation import check_integer


class Closing:
    """A context manager that closes itself at the end of the block."""

    def close(self) -> None:
        """Release what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Unpicklable:
    """Base class of objects that cannot be pickled. ``copy.deepcopy`` can copy them if they have no open files.

    A pickle has no version, is not validated on loading, and cannot hold open files.
    """

    _instead: ClassVar[str]
    """Advice for the error message."""

    def _in_files(self) -> bool:
        """Whether the object has open files, which a copy cannot share."""
        return False

    def __reduce__(self) -> Any:
        raise PicklingError(f"{type(self).__name__}: cannot be pickled; {self._instead}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self._in_files():
            raise PicklingError(f"{type(self).__name__}: cannot be copied because of open files; {self._instead}")
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied


_ALL = sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})

Handler = Callable[[int, FrameType | None], Any]


class uninterrupted:  # noqa: N801  # used like the functions of contextlib
    """Context manager that defers all signals with a Python handler until the end of the block.

    Python runs handlers in the main thread, at any line, and they may raise there. Deferred handlers run at the end of
    the block, once per signal and in the order of the signals. In other threads the block has no effect.

    The block resets ``signal.siginterrupt`` of these signals to Python's default, because setting a handler resets it
    and Python cannot read the earlier value. ``pthread_sigmask`` would not help: the system would deliver the signals
    to a different thread, and Python would still run the handlers in the main thread.

    Cost: 4 us.
    """

    def __enter__(self) -> Self:
        self._came: list[tuple[int, FrameType | None]] = []
        self._before: dict[int, Handler] = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        try:
            # Few signals have a Python handler. Every round runs this search, so a single fast pass finds them.
            for number in compress(_ALL, map(callable, map(_signal.getsignal, _ALL))):
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    _signal.signal(number, self._hold)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            try:
                self._restore()
            finally:
                if self._came and (errors := self._run()):
                    raise errors[0]

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))

    def _restore(self) -> None:
        """Restore every handler, even if a restored handler runs and raises."""
        waiting = list(self._before.items())
        try:
            while waiting:
                _signal.signal(*waiting[-1])
                waiting.pop()
        except BaseException:
            for number, handler in waiting:
                _signal.signal(number, handler)
            raise

    def run_handlers(self) -> list[BaseException]:
        """Run the handlers of the signals received so far, for a block that waits, and return their exceptions."""
        errors = self._run()
        for number in self._before:
            handler = _signal.getsignal(number)
            if handler != self._hold:  # a handler has installed a new handler, which replaces the old one
                self._before[number] = handler
                if callable(handler):
                    _signal.signal(number, self._hold)
        return errors

    def _run(self) -> list[BaseException]:
        """Run all deferred handlers, and return their exceptions."""
        errors: list[BaseException] = []
        while self._came:
            number, frame = self._came.pop(0)
            try:
                self._before[number](number, frame)
            except BaseException as error:
                errors.append(error)
        return errors


# Every random number is a function of (seed, round, client, purpose), so any part of a run can be repeated.


def tag(purpose: str) -> int:
    """Return the first 64 bits of the BLAKE2s digest of a purpose, little-endian.

    >>> tag("minibatches") == tag("cohort")
    False
    """
    return int.from_bytes(hashlib.blake2s(purpose.encode(), digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, *, round: int = 0, client: int = 0) -> "np.random.Generator":
    """Return a NumPy ``Generator`` over the counter-based Philox, as a function of the arguments.

    Args:
        seed: the run's seed, any int >= 0.
        purpose: a name for the use of the numbers (``"minibatches"``). Different purposes never share a stream.
        round: the round, if each round draws new numbers.
        client: the client's index, if each client draws its own numbers.

    Determinism: identical on every platform for a given version of NumPy.
    Cost: about 20 microseconds.

    >>> float(generator(7, "example").random()) == float(generator(7, "example").random())
    True
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, tag(purpose), round, client])))


def keys(purpose: str, *, round: int, clients: Sequence[int | str]) -> npt.NDArray[np.uint64]:
    """Return a key for each client, uint64[k, 2]: 128 bits of BLAKE2s of (purpose, round, client).

    The native code hashes a key with an element's index to get random bits. ``round`` is in 0..2^64-1. Client ids are
    ints in 0..2^64-1 or strings; 5 and ``"5"`` are different ids. Cost: about 1 microsecond per client.

    >>> keys("example", round=3, clients=[5, "5"])[0] == keys("example", round=3, clients=[5])[0]
    array([ True,  True])
    """
    common = hashlib.blake2s(
        digest_size=16, person=tag(purpose).to_bytes(8, "little"), salt=round.to_bytes(8, "little")
    )
    digests = []
    for client in clients:
        one = common.copy()
        if isinstance(client, str):
            one.update(b"s" + client.encode(errors="surrogatepass"))
        else:
            one.update(b"i" + int(client).to_bytes(8, "little"))
        digests.append(one.digest())
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64).reshape(-1, 2)


__version__ = core.version


def threads() -> int:
    """Return the number of threads that one call may use: FEDCORE_THREADS, or the number of usable cores.

    Usable cores are those in the process's affinity mask, limited by the CPU quota of its control group, for example of
    a container. A quota of 2.5 cores counts as 2, and a quota below 1 as 1.

    Raises:
        RuntimeError: FEDCORE_THREADS is not a number in 1..4096. Kernels that use threads also raise this error.
    """
    return core.threads()


def set_threads(count: int) -> None:
    """Limit each call to ``count`` threads, 1..4096. Results are bit-identical for any count."""
    core.set_threads(check_integer("count", count, 1, 4096))


def isa() -> str:
    """Return the instruction-set level of the kernels; the environment variable FEDCORE_ISA sets it."""
    return core.isa()


def build_info() -> dict[str, str | int]:
    """Return the compiler, instruction set, threads, and versions of the packages that affect results."""
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
    """Hide FutureWarnings of other packages in fedcore's own processes, unless ``-W`` or ``PYTHONWARNINGS`` is set."""
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(?!fedcore\b)")


def import_quietly(module: str) -> None:
    """Import a module without the FutureWarnings of the packages that it imports."""
    with warnings.catch_warnings():
        hide_warnings_of_others()
        import_module(module)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
