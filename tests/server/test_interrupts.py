"""Interrupts beside a round's changes, whoever handles SIGINT."""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from fedcore import Server, Update

HANDLED_IN_C = """
#include <signal.h>
#include <unistd.h>
static void handle(int number) { (void)number; (void)!write(1, "C\\n", 2); }
__attribute__((constructor)) static void install(void) { signal(SIGINT, handle); }
"""
ROUND = """
import signal
import numpy as np
from fedcore import Server, Update
assert signal.getsignal(signal.SIGINT) is None
server = Server(np.zeros(4, np.float32), "MIFA", 2, lr=0.1)
keep = server._backend.keep
def interrupted(*arguments):
    signal.raise_signal(signal.SIGINT)
    return keep(*arguments)
server._backend.keep = interrupted
server.round([Update(0, server.x + 1, 1)])
print(server.round_number, signal.getsignal(signal.SIGINT))
"""


def test_a_program_of_which_python_is_a_part_keeps_its_own_handler(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, for a program that handles SIGINT itself")
    folder = tmp_path_factory.mktemp("handler")  # code may be loaded from there, as from tmpfs not everywhere
    (folder / "handler.c").write_text(HANDLED_IN_C)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "handler.so", folder / "handler.c"], check=True)
    env = os.environ | {"LD_PRELOAD": str(folder / "handler.so")}
    run = subprocess.run([sys.executable, "-u", "-c", ROUND], env=env, capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.stderr) == ("C\n1 None\n", "")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_the_handler_of_before_is_back_after_a_round(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        server = Server(np.zeros(4, np.float32), "MIFA", 2, lr=0.1)
        server.round([Update(0, server.x + 1, 1)])
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
