"""Code shared by the commands: the parser, argument types, common options, exit statuses and output.

Command modules import the simulator's packages only inside functions, so that ``--help`` is fast and needs only NumPy.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from inspect import cleandoc, getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedcore.errors import ConfigError, UnknownNameError
from fedcore.validation import add_to_path, load_module

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 1
"""The exit status if a trial failed or a store is damaged."""
MISTAKE = 2
"""The exit status for an invalid command line or input."""
INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 + SIGINT, as in shells."""

SIMULATOR = ("matplotlib", "pandas", "pydantic", "rich", "scipy", "sklearn", "torch")
"""The packages that commands on experiments need; other commands need only NumPy."""

INSTEAD = {"aggregate": "merge", "average": "merge", "sweep": "run --sweep", "data": "show-data", "info": "doctor"}
"""The commands that replace names which users guess."""

Options = argparse.Namespace
Run = Callable[[Options], None]


class Parser(argparse.ArgumentParser):
    """An argument parser with subcommands, which raises fedcore's errors."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message and a hint at ``--help``."""
        guess = re.search(r"COMMAND: invalid choice: '([\w-]+)'", message)
        if guess and guess[1] in INSTEAD:
            message = f"{guess[1]}: no such command; use `{self.prog} {INSTEAD[guess[1]]}`"
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # of a command too
        """Parse arguments; raise ConfigError for unknown ones, with a hint at the command's own ``--help``."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def add_commands(self) -> None:
        """Turn this parser into a group of commands; without a command it prints its help."""
        self.set_defaults(run=lambda options: self.print_help(), needs=())
        self._commands = self.add_subparsers(metavar="COMMAND", title="commands", parser_class=Parser)

    def add_command(self, name: str, run: Run | None = None, *, needs: Sequence[str] = (), help: str = "") -> "Parser":
        """Add a command to a group and return its parser.

        The first line of the docstring of ``run`` is the short help, at most 80 characters. The rest is printed below
        the options. A group has no function, but a ``help``. ``needs`` lists the packages that ``run`` imports.
        """
        summary, _, details = cleandoc(help or getdoc(run) or "").partition("\n\n")
        parser = self._commands.add_parser(
            name,
            help=summary.removesuffix("."),
            description=summary,
            epilog=details,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(run=run, needs=needs)
        return parser


def _parsed(text: str, kind: Callable[[str], float], least: float, what: str) -> Any:
    """Return a number of at least ``least``, or raise ArgumentTypeError."""
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be {what}")
    return number


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argument type for integers of at least ``least``, also such as 1e6."""
    return lambda text: _parsed(text, _integer, least, f"an integer of at least {least}")


def _integer(text: str) -> int:
    return int(text) if "e" not in text.lower() or not float(text).is_integer() else int(float(text))


def numbers(text: str) -> list[float]:
    """Parse numbers separated by commas."""
    what = "a finite number, or several separated by commas"
    return [float(_parsed(part, float, -math.inf, what)) for part in text.split(",")]


def amount(text: str) -> float:
    """Parse a finite number of at least 0."""
    return float(_parsed(text, float, 0, "a finite number of at least 0"))


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    return float(_parsed(text, float, math.ulp(0), "a finite number above 0"))


def add_changes(parser: Parser, about: str = "set a key of the configuration to a TOML value; repeatable") -> None:
    """Add the option that changes a configuration."""
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help=about)


def add_imports(parser: Parser) -> None:
    """Add the option that imports modules."""
    how: dict[str, Any] = {"dest": "imports", "action": "append", "default": [], "metavar": "MODULE"}
    parser.add_argument("--import", **how, help="import a module, a .py file or a folder's modules (DIR/); repeatable")


def add_json(parser: Parser) -> None:
    """Add the option that prints JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def load_imports(imports: Iterable[str]) -> None:
    """Import the modules of ``--import``, which may be in the working folder and may register names."""
    add_to_path(Path())
    for module in imports:
        if module.endswith("/") and not Path(module).is_dir():
            raise UnknownNameError(f"--import {module!r}: no such folder")
        load_module(module, f"--import {module!r}: cannot be imported")


def print_json(value: Any) -> None:
    """Print a value as JSON; types that JSON lacks, such as paths, become text, and NaN and infinities null."""
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
    print(json.dumps(plain, indent=2, ensure_ascii=False))


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns."""
    lines = list(pairs)
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:{width}}  {value}")


def print_plain(console: "Console", lines: Iterable[str], style: str = "", *, soft_wrap: bool = True) -> None:
    """Print text without markup; by default only the terminal wraps it, so that a path can be copied."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=soft_wrap)


def bytes_text(size: float) -> str:
    """Return a number of bytes as text with a unit.

    >>> bytes_text(53_248)
    '53.2 KB'
    """
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], object]]:
    """Show a bar on a terminal while the block runs; yield a function of the work done and the total."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
