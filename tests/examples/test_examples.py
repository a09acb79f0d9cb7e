"""The examples run and print their results; NVFlare's example runs in tests/adapters/nvflare/test_simulator.py."""

import contextlib
import io
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT reads what Transformers deprecates
@pytest.mark.parametrize(
    ("name", "needs", "expected"),
    [
        ("torch_loop", "torch", "(1, 2) ()"),
        ("lora", "peft", "PeftModel.from_pretrained loads the result: yes"),
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
