"""The apps in examples/flower run, learn, and are what the README shows."""

import sys
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, RecordDict

from fedcore import Server
from tests.adapters.flower.local_grid import LocalGrid

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "flower"


def test_the_readme_shows_the_example():
    readme = (ROOT / "README.md").read_text()
    for name in ("server_app.py", "client_app.py"):
        assert (EXAMPLE / name).read_text() in readme, name


def test_the_example_learns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE)
    for name in ("model", "server_app", "client_app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import client_app
    import model
    import server_app

    grid = LocalGrid({100 + i: (client_app.app, {"partition-id": i}) for i in range(10)})
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    server_app.app(grid=grid, context=context)
    assert str(sorted(grid.nodes)) in capsys.readouterr().out.replace("(", "[").replace(")", "]")

    module = model.make_module()
    module.load_state_dict({k: torch.tensor(v) for k, v in Server.load("state", medium="ram").tensors().items()})
    right = [float((module(x).argmax(1) == y).float().mean()) for x, y in map(model.load_data, range(10))]
    assert np.mean(right) > 0.7
