"""A parser of command lines whose mistakes are fedcore's errors, and whose words fill the terminal."""

import argparse
import math
import re
import shutil
import textwrap
from collections.abc import Callable
from functools import partial
from inspect import cleandoc
from typing import Any, NoReturn

from fedcore.arguments import due_in, due_whole, inside, is_whole, shown
from fedcore.cli.work import work
from fedcore.errors import ConfigError

WIDEST = 100
"""Columns that words fill at most; longer lines are hard to read."""


class Parser(argparse.ArgumentParser):
    """A parser of one command, or of a group of them.

    Args:
        prog: how it is called, ``fedcore run``.
        words: what is said of it: a sentence, and paragraphs. Indented lines, such as commands, stay as they are.
    """

    def __init__(self, prog: str, words: str, **options: Any) -> None:
        width = min(shutil.get_terminal_size().columns, WIDEST) - 2
        paragraphs = re.split(r"\n\s*\n", cleandoc(words))
        filled = [part if part.startswith(" ") else textwrap.fill(part, width) for part in paragraphs]
        super().__init__(
            prog,
            description="\n\n".join(filled),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def group(self) -> "Group":
        """Make this the parser of a group; called without a command, it shows its help."""
        self.set_defaults(do=self.print_help)
        return Group(self)


class Group:
    """The commands of a parser."""

    def __init__(self, parser: Parser) -> None:
        self._prog = parser.prog
        self._below = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=Parser)

    def command(self, name: str, words: str, *, do: str = "", simulates: bool = True) -> Parser:
        """The parser of a new command, whose arguments are still to be added.

        Args:
            name, words: of the command.
            do, simulates: what does its work, see ``work``; nothing for a group.
        """
        words = cleandoc(words)
        parser = self._below.add_parser(name, help=words.partition("\n")[0], prog=f"{self._prog} {name}", words=words)
        if do:
            parser.set_defaults(do=partial(work, do, simulates=simulates))
        return parser


def whole(least: int) -> Callable[[str], int]:
    """A type of argument: a whole number from ``least`` on."""

    def read(text: str) -> int:
        number = int(text) if re.fullmatch(r"[+-]?\d{1,4000}", text) else None
        if not is_whole(number, least):
            raise argparse.ArgumentTypeError(f"expected {due_whole(least)}, got {shown(text)}")
        return number

    return read


def real(interval: str) -> Callable[[str], float]:
    """A type of argument: a finite number in an interval."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not inside(number, interval):
            raise argparse.ArgumentTypeError(f"expected {due_in(interval)}, got {shown(text)}")
        return number

    return read
