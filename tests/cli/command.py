"""Call the command line in the process of the test, or in a new one."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from fedcore.cli import main


@dataclass(frozen=True)
class Result:
    status: int
    output: str
    errors: str


SMALL = ["--rounds", "1", "--seeds", "1", "--workers", "0", "--set", "local.epochs=1", "--set", "algorithms=['MIFA']"]
"""Options of the shortest run."""


def spawn(*arguments, cwd=None, **environment):
    command = [sys.executable, "-m", "fedcore", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )


def output_of(*arguments):
    """The output of a command, which must succeed."""
    result = invoke(*arguments)
    assert result.status == 0, result.errors
    return result.output


def assert_rejected(result, message):
    """The error is one line, and the exit status is 2."""
    assert result.status == 2
    assert message in result.errors
    assert result.errors.count("\n") == 1


def invoke(*arguments):
    output, errors, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = ended.code or 0
    return Result(status, output.getvalue(), errors.getvalue())
