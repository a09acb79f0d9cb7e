"""Registries: the objects behind the names of methods, patterns, data sets, ..., of fedcore and of others.

A name is a registry's own row (an import may add rows: ``algorithms.REGISTRY["Mine"] = Mine``), the name of an entry
point of the registry's group in an installed package, or ``module:Name``, which imports the module.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from inspect import getdoc, isclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fedcore.arguments import absolute
from fedcore.errors import UnknownNameError
from fedcore.representation import Represented

T = TypeVar("T")

OWN = "'module:Name' of your own"
_WAY = (
    "put it beside the .toml file, or give its file, or its folder with a / at the end, to --import, as --resume needs"
)

ADDED: list[str] = []
"""The folders that ``look_in`` has added to ``sys.path``."""


class Registry(Represented, dict[str, T]):
    """The rows of one kind by name, and those that other packages and modules offer.

    Args:
        what: the kind in a word, for messages.
        rows: fedcore's own.
        due: a description of every row, for messages.
        fits: whether something is such a row.
        group: of the entry points by which installed packages add rows. A row of the registry comes before them.

    Attributes:
        own: the names of fedcore's own rows.

    >>> numbers = Registry("number", {"one": 1}, due="an int", fits=lambda row: isinstance(row, int), group="x.numbers")
    >>> numbers.find("one"), numbers.find("sys:maxsize") > 1
    (1, True)
    """

    def __init__(self, what: str, rows: Mapping[str, T], *, due: str, fits: Callable[[Any], bool], group: str) -> None:
        super().__init__(rows)
        self.what, self.due, self.group = what, due, group
        self.own = frozenset(rows)
        self._fits = fits

    def __setitem__(self, name: str, row: T) -> None:
        """Add a row, or put another one in its place.

        Raises:
            UnknownNameError: it is no such row, or the name is one of fedcore's.
        """
        if name in self.own and self.get(name) is not row:
            raise UnknownNameError(f"{self.what}: expected a name of your own, got {name!r}, which is fedcore's")
        super().__setitem__(name, self._checked(name, row))

    def _facts(self) -> dict[str, Any]:
        return {"what": self.what, "names": self.names()}

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for name, row in self.items():
            yield name, str(getattr(row, "about", "") or (getdoc(row) or "").partition("\n")[0])
        for name, point in self.offered().items():
            yield name, point.value

    def offered(self) -> dict[str, EntryPoint]:
        """The entry points of the group, by name, that have no row of their own.

        Cost: reads the metadata of every installed package; nothing is imported.
        """
        return {point.name: point for point in entry_points(group=self.group) if point.name not in self}

    def names(self) -> list[str]:
        """The names of all rows and entry points."""
        return [*self, *self.offered()]

    def find(self, name: str, *, imports: bool = True) -> T:
        """The row of a name.

        Args:
            imports: whether ``module:Name`` may import a module. If not, as for a name in a folder or a message, the
                module must have been imported before, or be the one of an entry point.

        Raises:
            UnknownNameError: it is unknown; its module cannot be imported, or may not; or it is the name of something
                else.
        """
        if name in self:
            return self[name]
        offered = self.offered()
        if name in offered:
            return self._checked(name, self._attribute(name, *_parts(offered[name].value)))
        if ":" not in name:
            raise UnknownNameError.of(self.what, name, [*self, *offered], else_=OWN)
        module, attribute = _parts(name)
        if not imports and module not in sys.modules and name not in {point.value for point in offered.values()}:
            raise UnknownNameError(
                f"{self.what}: expected one whose module is imported, since a folder or a message must not have code "
                f"run, got {name!r}: import {module!r} first if you trust it, or give the {self.what} itself"
            )
        return self._checked(name, self._attribute(name, module, attribute))

    def name_of(self, row: object) -> str | None:
        """The name by which ``find`` finds this class: its row's if it is fedcore's own, else ``module:Name``.

        None for functions, and for a program's classes (``__main__``), which other processes know by another name,
        unless they are rows.
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
            raise UnknownNameError(f"{self.what}: expected a module's name before the colon, got {name!r}: {_WAY}")
        found: Any = load_module(module, f"{self.what}: expected a module that can be imported, got {name!r}")
        for part in attribute.split("."):
            if not hasattr(found, part):
                known = [own for own, value in vars(sys.modules[module]).items() if self._fits(value)]
                raise UnknownNameError.of(f"{self.what}: {name!r}: attribute", attribute, known)
            found = getattr(found, part)
        return found

    def _checked(self, name: str, row: Any) -> T:
        if not self._fits(row):
            raise UnknownNameError(f"{self.what}: expected {self.due}, got {row!r:.200} as {name!r}")
        checked: T = row
        return checked


def look_in(folder: Path) -> None:
    """Let modules be found in a folder, after all other places, so that it hides no installed package."""
    entry = str(folder.resolve())
    if entry not in ADDED:
        ADDED.append(entry)
        sys.path.append(entry)


def load_module(named: str, refusal: str = "") -> ModuleType | None:
    """Import a module by its name, or by the path of its file, which ends in ``.py``; it is imported once.

    A file's module has the file's name without the ending. Of a folder, which ends
    in ``/``, nothing is imported: modules are found in it from then on.

    Args:
        refusal: the beginning of the message if it cannot be imported.

    Raises:
        UnknownNameError: there is no such module, or its code fails.
    """
    refusal = refusal or f"import: expected a module that can be imported, got {named!r}"
    if named.endswith("/"):
        look_in(Path(named))
        return None
    try:
        return _of_file(absolute(named).resolve()) if named.endswith(".py") else import_module(named)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{named}.".startswith(f"{missing}.") and missing:
            raise UnknownNameError(f"{refusal}: there is no module {missing!r}: {_WAY}") from None
        raise UnknownNameError(f"{refusal}: it needs {missing!r}, which is not installed") from error
    except UnknownNameError:
        raise
    except Exception as error:
        raise UnknownNameError(f"{refusal}: {type(error).__name__}: {error}{_place(error)}") from error


def _of_file(path: Path) -> ModuleType:
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) and Path(str(known.__file__)).resolve() == path:
            return known
        raise UnknownNameError(
            f"import: expected a file whose module has a name of its own, got {path}: there is another module {name!r}"
        )
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UnknownNameError(f"import: expected a file with Python code, got {path}: there is none")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _parts(dotted: str) -> tuple[str, str]:
    module, _, attribute = dotted.partition(":")
    return module.strip(), attribute.partition("[")[0].strip()


def _place(error: BaseException) -> str:
    """The place where it was raised, for the author of the module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
