"""Exceptions of fedcore. Each also derives from the matching built-in exception.

Messages name the argument, the value and the rule: ``steps=0: must be an integer >= 1``, or
``weights: expected float32[4], got float64[3]``.
"""

from collections.abc import Iterable

DISTRIBUTION = "fedcore-fl"
"""The name of this package on package indexes; the package ``fedcore`` there is unrelated."""


class FedcoreError(Exception):
    """Base class of fedcore's exceptions."""


class ShapeError(FedcoreError, ValueError):
    """An array has the wrong shape, or is not contiguous."""


class DtypeError(FedcoreError, ValueError):
    """An array has the wrong dtype."""


class ArrayError(FedcoreError, ValueError):
    """An object is not an array or is on the wrong device, or an output is read-only or overlaps an input."""


class RangeError(FedcoreError, ValueError):
    """A number is outside its range."""


class TooFewUpdatesError(RangeError):
    """A robust rule needs more updates than there are."""


class UnknownNameError(FedcoreError, ValueError):
    """A name, for example of an algorithm, a preset or a model, is unknown."""

    @classmethod
    def of(cls, what: str, name: object, known: Iterable[str], *, else_: str = "") -> "UnknownNameError":
        """Return the error for a name; its message suggests the nearest known name and lists up to 100."""
        from difflib import get_close_matches  # slow to import

        names = sorted(known)
        by_lower_case = {known_name.lower(): known_name for known_name in names}
        near = get_close_matches(str(name).lower(), by_lower_case, n=1, cutoff=0.65)
        hint = f"; did you mean {by_lower_case[near[0]]!r}?" if near else ""
        other = f"; or {else_}" if else_ else ""
        shown = ", ".join(names[:100]) + f" and {len(names) - 100} more" * (len(names) > 100)
        return cls(f"{what}: {name!r} is unknown{hint} (known: {shown or 'none'}{other})")


class ConfigError(FedcoreError, ValueError):
    """A configuration has a misspelt key or a value out of range."""


class AlgorithmError(FedcoreError, ValueError):
    """A method's coefficients are inconsistent, or your method, rate, rule or optimizer failed or returned nonsense."""


class UnknownClientError(FedcoreError, KeyError):
    """A client id is not registered."""

    __str__ = Exception.__str__  # KeyError would print the message's repr


class RoundError(FedcoreError, RuntimeError):
    """A closed round is used, or a round is opened while a different round is open."""


class DivergedError(FedcoreError, RuntimeError):
    """A step would make the model infinite or NaN."""


class PicklingError(FedcoreError, TypeError):
    """An object cannot be pickled or copied, for example because it has open files."""


class CheckpointError(FedcoreError, RuntimeError):
    """A saved state does not fit the object that loads it."""


class MissingDataError(FedcoreError, RuntimeError):
    """A data set's files are missing or corrupt."""


class MissingDependencyError(FedcoreError, RuntimeError):
    """An optional package is missing; the message names it and the command that installs it."""

    @classmethod
    def of(cls, what: str, needed: str, *, extra: str, instead: str = "") -> "MissingDependencyError":
        """Return the error for a feature that needs packages from an extra of fedcore.

        Args:
            what: the feature.
            needed: the packages' names, as in their documentation.
            extra: the extra in ``pyproject.toml`` that installs them.
            instead: an alternative to the installation.

        >>> print(MissingDependencyError.of("digits", "scikit-learn", extra="sim"))
        digits: needs scikit-learn; pip install 'fedcore-fl[sim]'
        """
        return cls(f"{what}: needs {needed}; pip install '{DISTRIBUTION}[{extra}]'{instead and f', or {instead}'}")


class DeviceError(FedcoreError, RuntimeError):
    """No CUDA device is available, or a driver call failed."""


class DeviceMemoryError(DeviceError, MemoryError):
    """A CUDA device is out of memory."""


class ClusterError(FedcoreError, RuntimeError):
    """No cluster responds at an address, or its workers fail repeatedly."""


class StoreError(FedcoreError, RuntimeError):
    """A store's operation failed.

    The store may be closed, or its folder may be missing, of a newer version or not a store, full, or read-only.
    """


class LockedError(StoreError):
    """A store or a folder is locked: a different process or object writes to it or runs trials in it."""


class CorruptionError(StoreError, CheckpointError):
    """A store's content is damaged. The message names the file and, if known, the client and block."""
