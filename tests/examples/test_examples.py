"""The examples run and print their results; NVFlare's example runs in tests/adapters/nvflare/test_simulator.py."""

import contextlib
import io
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "needs", "expected"),
    [
        ("torch_loop", "torch", "(1, 2) ()"),
        ("lora", "torch", "the server has 578 of 2962 numbers"),
        ("edges", "numpy", "5 rounds, 2 edges: the same bits as one server"),
        ("private_round", "cryptography", "round 4: the sum of 8 hospitals, 835 examples"),
        ("pfl_mifa", "pfl", "60 rounds, accuracy 0.9"),
        ("fedlab_mimic", "fedlab", "30 rounds, accepted in the last one: ("),
    ],
)
def test_example(name, needs, expected):
    pytest.importorskip(needs)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))
    assert printed.getvalue().splitlines()[-1].startswith(expected)


def test_streaming_diloco():
    """Fragments in turn, also late ones, send the bytes of the whole model, and the model learns."""
    pytest.importorskip("torch")
    example = runpy.run_path(str(EXAMPLES / "streaming_diloco.py"))
    found = [example["run"](**options, interval=25, syncs=1) for options in example["METHODS"].values()]
    assert len({(steps, sent) for [(steps, sent, _)] in found}) == 1
    assert all(loss < 4.2 for [(_, _, loss)] in found)  # it starts near log(128) = 4.85
