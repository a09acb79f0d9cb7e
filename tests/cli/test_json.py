"""The output of commands as JSON."""

import json

import numpy as np
import pytest

from fedcore import ClientStore, Server, Storage, Update, build_info
from fedcore.cli.terminal import print_json
from fedcore.sim.data import REGISTRY, holdings, partitions
from fedcore.sim.experiment import config
from fedcore.sim.experiment.config import load_and_partition, load_preset
from tests.cli.command import invoke


def json_of(*arguments, status=0):
    done = invoke(*arguments, "--json")
    assert done.status == status, done.errors
    return json.loads(done.output)


def test_list():
    listed = json_of("list")
    assert [one["name"] for one in listed["presets"]] == config.names()
    first = listed["presets"][0]
    assert first == {"name": "quickstart", "title": first["title"], "rounds": 100, "seeds": [0, 1, 2, 3, 4]}
    assert "MimiC" in listed["methods"]
    assert listed["partitions"] == partitions.REGISTRY.names()


def test_numbers_that_json_lacks(capsys):
    print_json({"epsilon": [float("inf"), float("-inf"), float("nan"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"epsilon": [None, None, None, 1.5]}


def test_doctor():
    listed = json_of("doctor", "core")["build"]
    assert listed | build_info() == listed
    assert (listed["cuda_missing"] is None) == bool(listed["cuda_devices"])


@pytest.mark.parametrize("kind", ["methods", "models", "participation", "rates", "optimizers"])
def test_list_of_names_with_their_options(kind):
    (listed,) = json_of("list", kind).values()
    assert [one["name"] for one in listed] == json_of("list")[kind]
    assert all(one["about"] for one in listed)


def test_list_of_presets():
    assert json_of("list", "presets") == {"presets": json_of("list")["presets"]}


def test_list_of_a_kind():
    listed = json_of("list", "data") | json_of("list", "partitions")
    assert [one["name"] for one in listed["data"]] == REGISTRY.names()
    rules = {one["name"]: one for one in listed["partitions"]}
    assert rules["dirichlet"]["options"] == {"alpha": {}, "least": {"default": 1}}
    (digits,) = (one for one in listed["data"] if one["name"] == "digits")
    assert (digits["shape"], digits["classes"]) == ([1, 8, 8], 10)


def test_show_data(tmp_path):
    listed = json_of("show-data", "quickstart", "--seed", 3, "--out", tmp_path / "holdings.png")
    dataset, parts = load_and_partition(load_preset("quickstart"), 3)
    assert listed["counts"] == holdings(dataset.train_y, parts, 10).tolist()
    assert (listed["data"], listed["seed"]) == ("digits", 3)
    assert (tmp_path / "holdings.png").stat().st_size > 1000


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "state"
    with Server(
        np.zeros(2000, np.float32), "MIFA", 3, lr=0.1, storage=Storage(path=path, keep_previous=True)
    ) as server:
        for _ in range(2):
            server.round([Update(0, server.x + 1, 1), Update(2, server.x - 3, 1)])
    return path


def test_store_info(folder):
    listed = json_of("store", "info", folder)
    assert listed["path"] == str(folder)
    assert (listed["round"], listed["clients"], listed["rows"], listed["n"]) == (1, 3, 2, 2000)
    assert listed["vectors"]["x"] == ["<f4", [2000]]
    assert "transaction 2" in listed["undo"]["what"]


def test_store_verify(folder):
    assert json_of("store", "verify", folder)["sound"] is True
    with ClientStore.open(folder) as store:
        vectors = {name: store.vector(name) for name in store.vector_names()}
        total = vectors["total"] + 1
        store.commit(2, vectors | {"total": total})
    listed = json_of("store", "verify", folder, status=1)
    assert listed["sound"] is False
    assert len(listed["problems"]) == 1
