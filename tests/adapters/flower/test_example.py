"""``flwr run`` accepts the app in examples/flower; its apps run and learn, and docs/flower.md shows them."""

import sys
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.clientapp import ClientApp
from flwr.common.config import fuse_dicts
from flwr.serverapp import ServerApp
from flwr.supercore.object_ref import load_app

from fedcore import Server, Storage
from tests.adapters.flower.local_grid import LocalGrid

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "flower"


@pytest.fixture
def app(monkeypatch):
    """The app as Flower's own loader has it: its configuration, its ServerApp and its ClientApp."""
    monkeypatch.syspath_prepend(EXAMPLE)
    for name in [name for name in sys.modules if name.partition(".")[0] == "digits_app"]:
        monkeypatch.delitem(sys.modules, name)
    config, warnings = load_and_validate(EXAMPLE / "pyproject.toml")
    assert warnings == []
    app = config["tool"]["flwr"]["app"]
    apps = [load_app(app["components"][name], ValueError, EXAMPLE) for name in ("serverapp", "clientapp")]
    return app["config"], *apps


def test_the_page_shows_the_example():
    page = (ROOT / "docs" / "flower.md").read_text()
    for name in ("server_app.py", "client_app.py"):
        assert f"```python\n# examples/flower/digits_app/{name}\n```\n" in page, name


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_flower_builds_and_loads_the_app(app):
    config, server_app, client_app = app
    assert isinstance(server_app, ServerApp)
    assert isinstance(client_app, ClientApp)
    assert config["rounds"] >= 1
    files = zipfile.ZipFile(BytesIO(build_fab_from_disk(EXAMPLE))).namelist()
    assert {f"digits_app/{name}.py" for name in ("__init__", "client_app", "server_app", "model")} <= set(files)


def test_the_example_learns_and_a_second_run_finds_it_done(app, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    from digits_app import model

    config, server_app, client_app = app
    grid = LocalGrid({100 + i: (client_app, {"partition-id": i, "num-partitions": 10}) for i in range(10)})
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=fuse_dicts(config, {}))
    server_app(grid=grid, context=context)
    printed = capsys.readouterr().out
    assert f"accepted {sorted(grid.nodes)} rejected ()" in printed
    assert "on the nodes {'accuracy': 0." in printed

    module = model.make_module()
    module.load_state_dict(
        {k: torch.tensor(v) for k, v in Server.load("state", storage=Storage(medium="ram")).tensors().items()}
    )
    parts = [model.load_data({"partition-id": i, "num-partitions": 10}) for i in range(10)]
    assert np.mean([float((module(x).argmax(1) == y).float().mean()) for x, y in parts]) > 0.7

    server_app(grid=grid, context=context)
    assert Server.load("state", storage=Storage(medium="ram")).round_number == config["rounds"]
    assert "accepted" not in capsys.readouterr().out
