"""The command line called within the test's own process."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from fedcore.cli import main


@dataclass(frozen=True)
class Result:
    status: int
    output: str
    errors: str


def invoke(*arguments):
    output, errors, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = ended.code or 0
    return Result(status, output.getvalue(), errors.getvalue())
