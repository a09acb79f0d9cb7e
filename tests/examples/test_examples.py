"""The examples run and print their results; NVFlare's example runs in tests/adapters/nvflare/test_simulator.py."""

import contextlib
import difflib
import io
import itertools
import runpy
from pathlib import Path

import numpy as np
import pytest

import fedcore

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


def test_streaming_diloco():
    """Fragments in turn, also late ones, send the bytes of the whole model, and the model learns."""
    pytest.importorskip("torch")
    example = runpy.run_path(str(EXAMPLES / "streaming_diloco.py"))
    found = [example["run"](**options, interval=25, syncs=1) for options in example["METHODS"].values()]
    assert len({(steps, sent) for [(steps, sent, _)] in found}) == 1
    assert all(loss < 4.2 for [(_, _, loss)] in found)  # it starts near log(128) = 4.85


STEPS = ["notebook", "in_flower", "on_disk", "robust"]


def test_each_step_from_a_notebook_to_a_cluster_changes_few_lines():
    texts = [(EXAMPLES / "cluster" / f"{name}.py").read_text().splitlines() for name in STEPS[1:]]
    for one, other in itertools.pairwise(texts):
        added = [line for line in difflib.ndiff(one, other) if line.startswith("+ ")]
        assert 1 <= len(added) <= 3


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("lies", [False, True])
def test_from_a_notebook_to_a_cluster(name, lies, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "notebook":
        found = runpy.run_path(str(EXAMPLES / "cluster" / "notebook.py"))
        assert np.abs(found["server"].x - found["optimum"].mean(axis=0)).max() < 1e-3
        return
    pytest.importorskip("flwr")
    from flwr.app import Array, Context, RecordDict

    from tests.adapters.flower.local_grid import LocalGrid

    client = runpy.run_path(str(EXAMPLES / "cluster" / "client_app.py"))

    def spoil(node, reply):
        if lies and node == 2**63 + 3:
            reply.content["arrays"]["x"] = Array(np.full(1000, 1e6, np.float32))

    grid = LocalGrid({2**63 + i: (client["app"], {"partition-id": i}) for i in range(10)}, spoil)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={"rounds": 100})
    runpy.run_path(str(EXAMPLES / "cluster" / f"{name}.py"))["app"](grid, context)
    assert (tmp_path / "state").exists() == (name != "in_flower")
    away = np.abs(np.load("model.npy") - client["optimum"].mean(axis=0)).max()
    assert (away < (1 if lies else 0.02)) == (not lies or name == "robust")
    if name != "in_flower":  # a second run resumes from the folder, and has no round left
        assert fedcore.Server.load("state", storage=fedcore.Storage(medium="ram")).round_number == 100
