"""Checks of arguments, representations of objects, and registries of names."""

import math
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter, getdoc, isclass, signature
from itertools import chain, islice
from numbers import Real
from operator import index
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from fedcore.arrays import ieee, own_classes
from fedcore.errors import (
    AlgorithmError,
    ArrayError,
    DtypeError,
    FedcoreError,
    RangeError,
    StoreError,
    UnknownNameError,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

LONGEST_REASON = 500
"""The maximum length of a rejection's reason, which may contain text from a client."""
MOST_LEVELS = 50
"""The maximum number of levels of a configuration; Python cannot copy or write values of some hundreds of levels."""


def name_of(owner: object) -> str:
    """Return the name of a function, or of an object's class, for an error about a user's code."""
    return str(getattr(owner, "__qualname__", type(owner).__name__))


def failed(owner: object, call: str, error: Exception) -> NoReturn:
    """Raise an exception of a user's object as an AlgorithmError that names the object; FedcoreErrors stay."""
    if isinstance(error, FedcoreError | MemoryError):
        raise error
    raise AlgorithmError(f"{name_of(owner)}: {call} raised {type(error).__name__}: {error}; correct it") from error


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number of Python or NumPy, excluding bools."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object, low: int | None = None, high: int | None = None) -> TypeGuard[int]:
    """Whether a value is an integer of Python or NumPy in low..high, excluding bools."""
    if type(value) is not int and (not isinstance(value, int | np.integer) or isinstance(value, bool)):
        return False
    number = index(value)
    return (low is None or low <= number) and (high is None or number <= high)


def in_interval(value: Any, interval: str) -> bool:
    """Whether a value is a number in an interval, such as ``"(0, 1]"`` or ``"(0, inf)"``.

    >>> [in_interval(value, "(0, 1]") for value in (0.5, 0, float("nan"), "1")]
    [True, False, False, False]
    """
    number, (low, high) = _plain(value), _ends(interval)
    above = number >= low if interval[0] == "[" else number > low
    below = number <= high if interval[-1] == "]" else number < high
    return above and below  # False for a NaN


def _plain(value: Any) -> float:
    """Return a number as a float, and other values as NaN.

    Other classes compare differently: as a float16, a limit of 100,000 is infinite.
    """
    try:
        return float(value) if is_number(value) else math.nan
    except OverflowError:
        return math.nan


@lru_cache(64)
def _ends(interval: str) -> tuple[float, float]:
    low, high = interval[1:-1].split(",")
    return float(low), float(high)


@ieee
def check_number(name: str, value: Any, interval: str) -> float:
    """Return a value as a float; raise RangeError if the value is not a number in the interval.

    >>> check_number("lr", 0, "(0, inf)")
    Traceback (most recent call last):
    fedcore.errors.RangeError: lr=0: must be a finite number > 0
    """
    number = _plain(value)
    if not in_interval(number, interval):
        raise RangeError(f"{name}={short_repr(value)}: must be {describe_interval(interval)}")
    return number


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return a value as an int; raise RangeError if the value is not an integer in low..high.

    >>> check_integer("steps", 2.5, 1)
    Traceback (most recent call last):
    fedcore.errors.RangeError: steps=2.5: must be an integer >= 1
    """
    number = index(value) if is_integer(value) else value  # read once, since a class may change its answer
    if not is_integer(number, low, high):
        raise RangeError(f"{name}={short_repr(value)}: must be {describe_integers(low, high)}")
    return index(number)


class Checked:
    """The base class of frozen dataclasses that check their numeric options."""

    _intervals: ClassVar[tuple[tuple[Any, ...], ...]] = ()
    """Its own options, each with its interval, or least and greatest integer, and other values: None or a text."""
    _converts: ClassVar[bool] = False
    """Whether the options become a float or an int."""

    def __post_init__(self) -> None:
        listed = (vars(kind).get("_intervals", ()) for kind in reversed(type(self).__mro__))
        for name, among, *others in chain.from_iterable(listed):
            value, is_number = getattr(self, name), isinstance(among, str)
            if not isinstance(value, str | None) or value not in others:
                checked = check_number(name, value, among) if is_number else check_integer(name, value, *among)
                if self._converts:
                    object.__setattr__(self, name, checked)


def as_integer(value: object) -> Any:
    """Return a float with an integer value as an int, since messages may carry counts as floats; else the value."""
    if not is_number(value) or is_integer(value) or not math.isfinite(value) or value != int(value):
        return value
    return int(value)


def describe_interval(interval: str) -> str:
    """Return an interval in words: ``a finite number > 0`` for ``"(0, inf)"``."""
    low, high = (end.removesuffix(".0") for end in interval[1:-1].split(", "))
    if high != "inf":
        return f"a number in {interval[0]}{low}, {high}{interval[-1]}"
    return f"a finite number {'>=' if interval[0] == '[' else '>'} {low}"


def describe_integers(low: int, high: int | None = None) -> str:
    """Return a range of integers in words: ``an integer in 1..10``."""
    if low == high:
        return str(low)
    return f"an integer >= {low}" if high is None else f"an integer in {low}..{_power(high)}"


def _power(number: int) -> str:
    """Return a high power of two, or one less, in the form ``2**63 - 1``; other numbers in digits."""
    for below in (0, 1):
        bits = (number + below).bit_length() - 1
        if bits >= 31 and number + below == 1 << bits:
            return f"2**{bits}" + " - 1" * below
    return str(number)


def short_repr(value: object) -> str:
    """Return a short representation of any value."""
    try:
        if isinstance(value, bytes | bytearray | str):
            value = value[:100]  # reprlib would first build the whole text
        return reprlib.repr(value)
    except Exception:  # a repr failed, or an int has too many digits
        return f"an unprintable {type(value).__name__}"


def require_objects(options: Mapping[str, Any]) -> None:
    """Raise RangeError if an option, or an entry of one, is a class in place of an object."""
    for name, value in options.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isclass(one):
                raise RangeError(f"{name}={one.__name__}: is a class; call it: {one.__name__}(...)")


def listed(name: str, values: Any) -> list[Any]:
    """Return the entries of an argument; raise RangeError if it has none, or is a text, whose letters are no entries.

    >>> listed("ids", ("ab", "c"))
    ['ab', 'c']
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable) or getattr(values, "shape", None) == ():
        raise RangeError(f"{name}={short_repr(values)}: must be a list, such as [{short_repr(values)}]")
    return list(values)


def rejection_reason(error: Exception) -> str:
    """Return an error's text as a rejection reason of at most ``LONGEST_REASON`` characters.

    >>> rejection_reason(KeyError("w"))
    "update: cannot be read: KeyError: 'w'"
    """
    try:
        kind = "" if isinstance(error, FedcoreError) else f"update: cannot be read: {type(error).__name__}: "
        return shorten(f"{kind}{error}")
    except Exception:
        return f"update: cannot be read: {type(error).__name__:.100}"


def shorten(text: str) -> str:
    """Return a text cut to ``LONGEST_REASON`` characters, with characters escaped that UTF-8 cannot encode."""
    text = str.encode(text, errors="backslashreplace").decode()
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 3]}..."


def short_id(client: object) -> str:
    """Return a client's id of any type, from a message, as a text of at most 100 characters."""
    text = client if isinstance(client, str) else short_repr(client)
    return shorten(text if len(text) <= 100 else f"{text[:97]}...")


def shallow(value: T) -> T:
    """Return a value from a file of tables and lists; raise ValueError if it has more than ``MOST_LEVELS`` levels."""
    level: list[Any] = [value]
    for _ in range(MOST_LEVELS):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for each in inner for one in each]
    if level:
        raise ValueError(f"tables and lists must have at most {MOST_LEVELS} levels")
    return value


def check_list(name: str, values: Any) -> tuple[Any, ...]:
    """Return a list or tuple as a tuple, which other threads cannot change; raise ArrayError for other values."""
    if not isinstance(values, list | tuple):
        raise ArrayError(f"{name}: expected a list or tuple, got {type(values).__name__}")
    return tuple(values)


def length(name: str, array: Any) -> int:
    """Return the length of an array; raise ArrayError if the value has no length."""
    try:
        return len(array)
    except TypeError:
        raise ArrayError(f"{name}: expected an array in CPU memory, got {type(array).__name__}") from None


def numbers(name: str, values: Any, dtype: type | None = None) -> npt.NDArray[Any]:
    """Return values as a new array of a dtype; raise DtypeError if a value is not a number."""
    try:
        if np.iscomplexobj(found := np.asarray(own_classes(name, values))):
            raise TypeError("complex numbers")
        return np.array(found, dtype)
    except FedcoreError:
        raise
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise DtypeError(f"{name}: expected numbers: {error}") from None


def expand_home(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Return a path with ``~`` expanded; raise RangeError if it is no path, or the home directory is unknown."""
    if not isinstance(path, str | os.PathLike):
        raise RangeError(f"{name}={short_repr(path)}: must be a path, a str or an os.PathLike[str]")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise RangeError(f"{name}={expanded!r}: the home directory of ~ is unknown; for a folder named ~ write ./~")
    return Path(expanded)


def absolute(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Return the absolute path with ``~`` expanded.

    Raises:
        RangeError: as for ``expand_home``.
        StoreError: the working directory was deleted, or no file can have this name.
    """
    expanded = expand_home(path, name)
    try:
        os.access(expanded, os.F_OK)  # raises ValueError for a zero character or half of a surrogate pair
        return expanded.absolute()
    except FileNotFoundError:
        raise StoreError(f"{expanded}: the working directory was deleted; use an absolute path") from None
    except ValueError as error:
        raise StoreError(f"{shorten(str(expanded))}: cannot be read or written: {error}; rename it") from None


# Representations of objects: one line, and a table in notebooks.


SOME = 6
"""The maximum number of members of a collection in a representation."""
UNMADE = "its constructor raised an error"
"""The text for an object whose constructor raised an error."""
LONGEST_TEXT = 60
"""The maximum number of characters of a text in a representation."""


def frozen(kind: type[T], fields: dict[str, Any]) -> T:
    """Return a dataclass of these fields, and the plain defaults of others, in a tenth of the usual time."""
    made = object.__new__(kind)
    object.__setattr__(made, "__dict__", fields)
    return made


class Represented:
    """Base class of objects with a repr ``Name(fact=value, ...)``, and a table of the same facts in notebooks.

    A subclass defines ``_facts``, or is a dataclass with ``repr=False``. Facts that are None are omitted.
    """

    def _facts(self) -> Mapping[str, Any]:
        """Return the facts by name."""
        assert is_dataclass(self)
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}

    def _rows(self) -> Iterable[tuple[str, ...]]:
        """Return the rows of the table in notebooks."""
        return ((name, describe_value(value)) for name, value in self._present().items())

    def _present(self) -> dict[str, Any]:
        try:
            return {name: value for name, value in self._facts().items() if value is not None}
        except FedcoreError as error:  # for example from a closed store; a repr must not raise
            return {"unknown": str(error)}
        except AttributeError:  # the constructor raised; debuggers and tracebacks with variables show such objects
            return {"unknown": UNMADE}

    def __repr__(self) -> str:
        shown = (f"{name}={describe_value(value)}" for name, value in self._present().items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._rows())


def html_table(caption: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return an HTML table.

    >>> html_table("a & b", [("x", "<1>")])
    '<table><caption>a &amp; b</caption><tr><td>x</td><td>&lt;1&gt;</td></tr></table>'
    """
    from html import escape  # slow to import

    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption>{body}</table>"


def arguments_of(owner: object) -> dict[str, Any]:
    """Return the constructor arguments that an object has as attributes and that differ from their defaults."""
    arguments = {}
    for name, parameter in signature(type(owner)).parameters.items():
        value, default = getattr(owner, name, parameter.default), parameter.default
        is_default = value is default or (type(value) is type(default) and value == default)
        if not is_default and value is not Parameter.empty:
            arguments[name] = value
    return arguments


def first_members(members: Iterable[Any]) -> list[Any]:
    """Return the first members of a collection, for a representation."""
    return list(islice(members, SOME))


_PLAIN_REPRS = {kind.__repr__ for kind in (list, tuple, range, set, frozenset)}


def describe_value(value: Any) -> str:
    """Return a short form of a value: arrays by dtype and shape, collections by their first members.

    >>> import numpy as np
    >>> [describe_value(value) for value in (np.zeros((2, 3)), range(9), 0.1 + 0.2, {"a": None})]
    ['float64[2, 3]', '(0, 1, 2, 3, 4, 5, ... 9 in all)', '0.3', "{'a': None}"]
    """
    if hasattr(value, "dtype") and len(value.shape):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, float) or hasattr(value, "dtype"):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, str):
        return repr(value if len(value) <= LONGEST_TEXT else f"{value[: LONGEST_TEXT - 3]}...")
    if isinstance(value, Mapping):
        entries = [f"{describe_value(key)}: {describe_value(entry)}" for key, entry in islice(value.items(), SOME)]
        return _bracketed(entries, len(value), "{}")
    if isinstance(value, list | tuple | range | set | frozenset) and type(value).__repr__ in _PLAIN_REPRS:
        return _bracketed([describe_value(member) for member in islice(value, SOME)], len(value), "()")
    return repr(value)


def _bracketed(members: list[str], count: int, brackets: str) -> str:
    more = [f"... {count} in all"] if count > len(members) else []
    end = "," if count == 1 and brackets == "()" else ""
    return f"{brackets[0]}{', '.join([*members, *more])}{end}{brackets[1]}"


# Registries map names to objects: methods, patterns, data sets and so on. A name is one of
#
# - a key of the registry; a module can add a key by ``algorithms.REGISTRY["Mine"] = Mine``;
# - an installed package's entry point in the registry's group;
# - ``module:Name``, which imports the module.


OWN = "'module:Name' of your own"
_IMPORT_HINT = (
    "put the module in the working folder or in that of the .toml file; commands with --import take its file there, or "
    "its folder with a final /, also with --resume"
)

ADDED: list[str] = []
"""The folders that ``add_to_path`` added to ``sys.path``."""


class Registry(Represented, dict[str, T]):
    """A mapping from names to objects of one kind (rows), including those of other packages and modules.

    Args:
        what: the kind in one word, for messages.
        rows: fedcore's rows.
        expected: a description of a valid row, for messages.
        fits: whether an object is a valid row.
        group: the group of entry points by which installed packages add rows. The mapping's rows have precedence.

    Attributes:
        own: the names of fedcore's rows.
        composed: names of combinations of a row with other options, and how to make each.

    >>> is_int = lambda row: isinstance(row, int)
    >>> numbers = Registry("number", {"one": 1}, expected="an int", fits=is_int, group="x.numbers")
    >>> numbers.find("one"), numbers.find("sys:maxsize") > 1
    (1, True)
    """

    def __init__(
        self, what: str, rows: Mapping[str, T], *, expected: str, fits: Callable[[Any], bool], group: str
    ) -> None:
        super().__init__(rows)
        self.what, self.expected, self.group, self.composed = what, expected, group, dict[str, str]()
        self.own = frozenset(rows)
        self._fits = fits

    def __setitem__(self, name: str, row: T) -> None:
        """Add or replace a row; raise UnknownNameError if the row is invalid or the name belongs to fedcore."""
        if name in self.own and self.get(name) is not row:
            raise UnknownNameError(f"{self.what}: the name {name!r} belongs to fedcore; choose a different name")
        super().__setitem__(name, self._checked(name, row))

    def _facts(self) -> dict[str, Any]:
        return {"what": self.what, "names": self.names()}

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for name, row in self.items():
            yield name, str(getattr(row, "about", "") or (getdoc(row) or "").partition("\n")[0])
        for name, point in self.offered().items():
            yield name, point.value

    def offered(self) -> "dict[str, EntryPoint]":
        """Return the group's entry points by name, except those with the name of a row.

        Cost: reads the metadata of every installed package, without imports.
        """
        from importlib.metadata import entry_points  # slow to import

        return {point.name: point for point in entry_points(group=self.group) if point.name not in self}

    def names(self) -> list[str]:
        """Return the names of all rows and entry points."""
        return [*self, *self.offered()]

    def find(self, name: str, *, imports: bool = True) -> T:
        """Return the row with a name.

        Args:
            imports: whether ``module:Name`` may import a module. If False, as for names from folders and messages, the
                module must already be imported, or ``module:Name`` must be the value of an entry point.

        Raises:
            UnknownNameError: the name is unknown, its module cannot or must not be imported, or the object is not a
                valid row.
        """
        if name in self:
            return self[name]
        offered = self.offered()
        if name in offered:
            return self._checked(name, self._attribute(name, *_split(offered[name].value)))
        if how := {one.lower(): how for one, how in self.composed.items()}.get(name.lower()):
            raise UnknownNameError(f"{self.what}: {name} is {how}")
        if ":" not in name:
            raise UnknownNameError.of(self.what, name, [*self, *offered, *self.composed], else_=OWN)
        module, attribute = _split(name)
        if not imports and module not in sys.modules and name not in {point.value for point in offered.values()}:
            raise UnknownNameError(
                f"{self.what}: {name!r} needs module {module!r}, which is not imported; names in folders and messages "
                f"must not run code. If you trust the module, import it first, or pass the {self.what} as an object"
            )
        return self._checked(name, self._attribute(name, module, attribute))

    def name_of(self, row: object) -> str | None:
        """Return the name with which ``find`` returns a row: its key for fedcore's rows, ``module:Name`` for classes.

        Return None for a function without a row, and for a class in ``__main__`` without a row, since its name differs
        in other processes.
        """
        rows = [name for name, known in self.items() if known is row]
        if not isclass(row) or self.own.intersection(rows):
            return rows[0] if rows else None
        found: Any = None if row.__module__ in ("__main__", "__mp_main__") else sys.modules.get(row.__module__)
        for part in row.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is row and self._fits(row):
            return f"{row.__module__}:{row.__qualname__}"
        return rows[0] if rows else None

    def _attribute(self, name: str, module: str, attribute: str) -> Any:
        if module.endswith((".py", "/")):
            raise UnknownNameError(f"{self.what}: {name!r} must start with a module name, not a path; {_IMPORT_HINT}")
        found: Any = load_module(module, f"{self.what}: cannot import the module of {name!r}")
        for part in attribute.split("."):
            if not hasattr(found, part):
                known = [own for own, value in vars(sys.modules[module]).items() if self._fits(value)]
                raise UnknownNameError.of(f"{self.what}: {name!r}: attribute", attribute, known)
            found = getattr(found, part)
        return found

    def _checked(self, name: str, row: Any) -> T:
        if not self._fits(row):
            raise UnknownNameError(f"{self.what}: {name!r} must be {self.expected}, got {row!r:.200}")
        checked: T = row
        return checked


def add_to_path(folder: Path) -> None:
    """Append a folder to the end of the import path, so that installed packages have precedence."""
    entry = str(folder.resolve())
    if entry not in ADDED:
        ADDED.append(entry)
        sys.path.append(entry)


def load_module(name: str, problem: str = "") -> ModuleType | None:
    """Import and return a module.

    Args:
        name: the module's name, or the path of a .py file, whose stem becomes the module's name. If ``name`` ends in
            "/", it is a folder; the function then adds the folder to the import path and returns None.
        problem: the beginning of the error message.

    Raises:
        UnknownNameError: the module does not exist, or its code raises an error.
    """
    problem = problem or f"import: cannot import {name!r}"
    if name.endswith("/"):
        add_to_path(Path(name))
        return None
    try:
        return _load_file(absolute(name).resolve()) if name.endswith(".py") else import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{name}.".startswith(f"{missing}.") and missing:
            raise UnknownNameError(f"{problem}: module {missing!r} was not found; {_IMPORT_HINT}") from None
        raise UnknownNameError(f"{problem}: the module needs {missing!r}, which is not installed") from error
    except UnknownNameError:
        raise
    except Exception as error:
        raise UnknownNameError(f"{problem}: {type(error).__name__}: {error}{_line_of(error)}") from error


def _load_file(path: Path) -> ModuleType:
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) and Path(str(known.__file__)).resolve() == path:
            return known
        raise UnknownNameError(f"import: a different module is already named {name!r}; rename {path}")
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UnknownNameError(f"import: {path} does not exist or is not a Python file")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _split(dotted: str) -> tuple[str, str]:
    module, _, attribute = dotted.partition(":")
    return module.strip(), attribute.partition("[")[0].strip()


def _line_of(error: BaseException) -> str:
    """Return the file and line that raised an error, as the end of a message."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
