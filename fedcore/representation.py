"""Representations of objects: on one short line, and in notebooks as a table."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from html import escape
from inspect import Parameter, signature
from itertools import islice
from typing import Any

from fedcore.errors import FedcoreError

SOME = 6
"""Members of a collection that are shown."""
UNMADE = "it was never made"
"""The fact of an object whose arguments were refused."""
LONGEST = 60
"""Characters of a text that are shown."""


class Represented:
    """An object with facts by name: ``Name(fact=value, ...)`` on a line, a row each in a table.

    A subclass gives ``_facts``; a dataclass need not, and says ``repr=False``. Facts that are None are left out.
    """

    def _facts(self) -> Mapping[str, Any]:
        """The facts to show, by name."""
        assert is_dataclass(self)
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}

    def _rows(self) -> Iterable[tuple[str, ...]]:
        """The rows of the table; the facts, unless there is more to show in a notebook."""
        return ((name, shown(value)) for name, value in self._present().items())

    def _present(self) -> dict[str, Any]:
        try:
            return {name: value for name, value in self._facts().items() if value is not None}
        except FedcoreError as error:  # of a store that is closed, say: whoever looks at it must not fail
            return {"unknown": str(error)}
        except AttributeError:  # its arguments were wrong: a debugger, or a traceback with variables, finds it so
            return {"unknown": UNMADE}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={shown(value)}' for name, value in self._present().items())})"
        )

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._rows())


def html_table(caption: str, rows: Iterable[tuple[str, ...]]) -> str:
    """A table in HTML, as notebooks show it.

    >>> html_table("a & b", [("x", "<1>")])
    '<table><caption>a &amp; b</caption><tr><td>x</td><td>&lt;1&gt;</td></tr></table>'
    """
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption>{body}</table>"


def arguments_of(made: object) -> dict[str, Any]:
    """The arguments with which an object was made, as far as they are attributes of their names and not as usual."""
    found = {}
    for name, parameter in signature(type(made)).parameters.items():
        value = getattr(made, name, parameter.default)
        usual = value is parameter.default or (type(value) is type(parameter.default) and value == parameter.default)
        if not usual and value is not Parameter.empty:
            found[name] = value
    return found


def first(members: Iterable[Any]) -> list[Any]:
    """The first members of a collection, as a fact beside their count."""
    return list(islice(members, SOME))


def shown(value: Any) -> str:
    """A value in a few words: arrays by dtype and shape, collections by their first members.

    >>> import numpy as np
    >>> shown(np.zeros((2, 3))), shown(range(9)), shown(0.1 + 0.2), shown({"a": None})
    ('float64[2, 3]', '(0, 1, 2, 3, 4, 5, ... 9 in all)', '0.3', "{'a': None}")
    """
    if hasattr(value, "dtype") and len(value.shape):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, float) or hasattr(value, "dtype"):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, str):
        return repr(value if len(value) <= LONGEST else f"{value[: LONGEST - 3]}...")
    if isinstance(value, Mapping):
        members = [f"{shown(key)}: {shown(entry)}" for key, entry in islice(value.items(), SOME)]
        return _listed(members, len(value), "{}")
    if isinstance(value, list | tuple | range | set | frozenset) and type(value).__repr__ in PLAIN:
        return _listed([shown(member) for member in islice(value, SOME)], len(value), "()")
    return repr(value)


PLAIN = {kind.__repr__ for kind in (list, tuple, range, set, frozenset)}


def _listed(members: list[str], count: int, brackets: str) -> str:
    more = [f"... {count} in all"] if count > len(members) else []
    end = "," if count == 1 and brackets == "()" else ""
    return f"{brackets[0]}{', '.join([*members, *more])}{end}{brackets[1]}"
