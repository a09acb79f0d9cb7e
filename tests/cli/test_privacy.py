"""``fedcore privacy``."""

import json
import sys

import pytest

from fedcore.rules.private import epsilon_of
from tests.cli.command import invoke

ROUNDS = ["--delta", "1e-5", "--rounds", "20", "--rate", "0.2"]


def test_the_printed_noise_keeps_the_budget():
    pytest.importorskip("dp_accounting")
    done = invoke("privacy", "--epsilon", "2", *ROUNDS, "--json")
    found = json.loads(done.output)
    assert found["epsilon"] == epsilon_of([(20, 0.2, found["noise"])], 1e-5)
    assert 1.98 < found["epsilon"] <= 2
    back = invoke("privacy", "--noise", str(found["noise"]), *ROUNDS)
    assert f"epsilon  {found['epsilon']:.4g}" in back.output
    assert f"noise={found['noise']:g}, expected=m, rate=0.2, rounds=20" in back.output


WRONG = "", "--epsilon 0", "--epsilon 1 --noise 1", "--noise 1 --rate 1.5", "--noise 1e-9", "--noise 1 --rounds 1e30"
WRONG += "--noise 2000", "--noise 1 --delta 1e-17"


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments(wrong):
    done = invoke("privacy", *ROUNDS, *wrong.split())
    assert done.status == 2
    assert "Traceback" not in done.errors


def test_a_missing_accountant_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    done = invoke("privacy", "--noise", "1", *ROUNDS)
    assert done.status == 2
    assert "needs dp_accounting; pip install 'fedcore-fl[dp]'" in done.errors
