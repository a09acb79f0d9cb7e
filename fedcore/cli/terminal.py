"""Parts that the commands share: the parser, types of arguments, common options, exit statuses and output.

The modules of commands import the simulator's packages only in their functions, so that ``--help`` needs NumPy alone
and is fast.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from inspect import cleandoc, getdoc
from pathlib import Path
from typing import Any, NoReturn

from fedcore.errors import ConfigError, UnknownNameError
from fedcore.registries import load_module, look_in

FAILED = 1
"""The exit status where a trial failed or a store is damaged."""
MISTAKE = 2
"""The exit status where the command line or its input is wrong."""
INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 + SIGINT, as of shells."""

SIMULATOR = ("matplotlib", "pandas", "pydantic", "rich", "scipy", "sklearn", "torch")
"""The packages of commands that run experiments or show them; the other commands need only NumPy."""

Options = argparse.Namespace
Run = Callable[[Options], None]


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are errors of fedcore, and which can have commands."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def add_commands(self) -> None:
        """Make this the parser of a group, which shows its help if no command is given."""
        self.set_defaults(run=lambda options: self.print_help(), needs=())
        self._commands = self.add_subparsers(metavar="COMMAND", title="commands", parser_class=Parser)

    def add_command(self, name: str, run: Run | None = None, *, needs: Sequence[str] = (), help: str = "") -> "Parser":
        """Add a command to a group and return its parser.

        Args:
            name: of the command.
            run: the function that does its work. Its docstring is the help: a line of at most 80 characters, and the
                text below the options.
            needs: packages that it imports.
            help: of a group, in the place of a function's docstring.
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


def whole_number(least: int) -> Callable[[str], int]:
    """Return a type of argument: a whole number, at least ``least``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least {least}")
        return number

    return parse


def share(text: str) -> float:
    """Read an argument that is a finite number, at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a finite number, at least 0")
    return number


def add_changes(parser: Parser) -> None:
    """Add the option that changes a configuration."""
    words = "set a key of the configuration (repeatable); VALUE is TOML"
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help=words)


def add_imports(parser: Parser) -> None:
    """Add the option that imports modules."""
    words = "import your module, .py file, or all modules of a folder (DIR/); repeatable"
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=words)


def add_json(parser: Parser) -> None:
    """Add the option that prints JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")


def load_imports(imports: Iterable[str]) -> None:
    """Import the modules of ``--import``, which add to the registries; modules of the working folder are found, too.

    Raises:
        UnknownNameError: a module cannot be imported.
    """
    look_in(Path())
    for module in imports:
        if module.endswith("/") and not Path(module).is_dir():
            raise UnknownNameError(f"--import: expected a folder before the /, got {module!r}: there is none")
        load_module(module, f"--import: expected a module that can be imported, got {module!r}")


def print_json(value: Any) -> None:
    """Print a value as JSON; types without a form in JSON, such as a path, become text."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Print the values in a column beside their names."""
    shown = list(pairs)
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        print(f"{name:{width}}  {value}")


def bytes_text(size: float) -> str:
    """Return bytes as people read them.

    >>> bytes_text(53_248)
    '53.2 KB'
    """
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
