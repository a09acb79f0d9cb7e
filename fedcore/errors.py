"""The errors of fedcore: one class a kind, each also the built-in that a caller would expect.

Every message names the argument, what was due and what came: ``weights: expected float32[4], got float64[3]``.
"""

from collections.abc import Iterable
from difflib import get_close_matches

DISTRIBUTION = "fedcore-fl"
"""What a package index calls this package; ``fedcore`` is somebody else's there."""


class FedcoreError(Exception):
    """The base of all that fedcore raises on purpose."""


class ShapeError(FedcoreError, ValueError):
    """An array has the wrong shape, or is not contiguous."""


class DtypeError(FedcoreError, ValueError):
    """An array has the wrong dtype."""


class ArrayError(FedcoreError, ValueError):
    """An object is no array, or lies where it must not; an output is read-only, or overlaps an input."""


class RangeError(FedcoreError, ValueError):
    """A number is outside its range."""


class UnknownNameError(FedcoreError, ValueError):
    """A name (of an algorithm, a preset, a model, ...) is not one of those that exist."""

    @classmethod
    def of(cls, what: str, name: object, known: Iterable[str], *, else_: str = "") -> "UnknownNameError":
        """The error for ``name``, with the nearest known one, the list of all, and what else would do."""
        names = sorted(known)
        spelt = {known_name.lower(): known_name for known_name in names}
        near = get_close_matches(str(name).lower(), spelt, n=1, cutoff=0.5)
        hint = f"; did you mean {spelt[near[0]]!r}?" if near else ""
        other = f"; or {else_}" if else_ else ""
        return cls(f"{what}: {name!r} is unknown{hint} (known: {', '.join(names) or 'none'}{other})")


class ConfigError(FedcoreError, ValueError):
    """A configuration has a misspelt key or a value out of range."""


class AlgorithmError(FedcoreError, ValueError):
    """An algorithm's table contradicts itself, or its step or weights are not what was due."""


class UnknownClientError(FedcoreError, KeyError):
    """A client id is not registered."""

    __str__ = Exception.__str__  # KeyError would print the message's repr


class RoundError(FedcoreError, RuntimeError):
    """A round is used out of order: closed, or opened while another is open."""


class DivergedError(FedcoreError, RuntimeError):
    """A step would make the model infinite or NaN."""


class PicklingError(FedcoreError, TypeError):
    """An object that holds something, rather than being a value, was to be pickled or copied."""


class CheckpointError(FedcoreError, RuntimeError):
    """A saved state does not fit the thing that it is to be loaded into."""


class MissingDataError(FedcoreError, RuntimeError):
    """A data set's files are not there, or their content is not what it should be."""


class MissingDependencyError(FedcoreError, RuntimeError):
    """An optional package is needed; the message says what to install."""

    @classmethod
    def of(cls, what: str, needed: str, *, extra: str, instead: str = "") -> "MissingDependencyError":
        """The error of ``what``, which needs these packages, of one of fedcore's extras.

        Args:
            what: what was asked for.
            needed: the packages, as their own documents call them.
            extra: which of ``pyproject.toml``'s extras brings them.
            instead: what else would do.

        >>> print(MissingDependencyError.of("digits", "scikit-learn", extra="sim"))
        digits: need scikit-learn; pip install 'fedcore-fl[sim]'
        """
        return cls(f"{what}: need {needed}; pip install '{DISTRIBUTION}[{extra}]'{instead and f', or {instead}'}")


class DeviceError(FedcoreError, RuntimeError):
    """There is no CUDA device to be had, for the reason that the message says, or a call of its driver failed."""


class DeviceMemoryError(DeviceError, MemoryError):
    """A CUDA device has no memory for what was asked."""


class ClusterError(FedcoreError, RuntimeError):
    """There is no cluster at an address, or its workers end again and again."""


class StoreError(FedcoreError, RuntimeError):
    """A store cannot do what was asked: its folder is missing, foreign, newer, full or read-only, or it is closed."""


class LockedError(StoreError):
    """A store is open for writing in another place, or another process runs trials in a folder."""


class CorruptionError(StoreError, CheckpointError):
    """A store's content is not what was written; the message names the file, and the client and block if it can."""
