"""Errors for unknown names, and the modules that a saved server may import."""

import importlib
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from fedcore import Server, Update, algorithms
from fedcore import validation as registries
from fedcore.algorithms import local_rules, named, optimizers, rates
from fedcore.cli import run as cli_run
from fedcore.errors import CheckpointError, ConfigError, RangeError, UnknownNameError
from fedcore.sim import attacks, data, nets, participation
from fedcore.sim.data import partitions
from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment.config import load_and_partition
from fedcore.validation import Registry, load_module
from tests.cli.command import invoke

HOUSE = Path(__file__).parent / "house"
REGISTRIES = [
    algorithms.REGISTRY,
    attacks.REGISTRY,
    data.REGISTRY,
    local_rules.REGISTRY,
    nets.REGISTRY,
    optimizers.REGISTRY,
    participation.REGISTRY,
    partitions.REGISTRY,
    rates.REGISTRY,
]


@pytest.fixture
def house(monkeypatch):
    """The package ``mine`` on the path, not imported before or after the test."""
    monkeypatch.syspath_prepend(str(HOUSE))
    importlib.invalidate_caches()
    before = [(registry, dict(registry)) for registry in REGISTRIES]
    yield
    for registry, rows in before:
        registry.clear()
        registry.update(rows)
    forget_mine()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder with a configuration, and beside it the modules that it names, which are not on the path."""
    shutil.copytree(HOUSE, tmp_path / "lab")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(HOUSE))])
    monkeypatch.setattr(registries, "ADDED", [])  # other tests added folders
    monkeypatch.setattr(cli_run, "ADDED", registries.ADDED)
    yield tmp_path / "lab" / "experiment.toml"
    forget_mine()


def forget_mine():
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "registers")]:
        del sys.modules[name]


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.what)
def test_every_registry_has_the_same_errors(registry):
    assert isinstance(registry, Registry)
    own = next(iter(registry))
    with pytest.raises(UnknownNameError, match=rf"{own + 'x'!r}.*{own!r}.*'module:Name'"):
        registry.find(own + "x")
    for name, message in (
        ("nowhere.at_all:Name", "'nowhere'.*--import"),
        ("sys:nothing", "'nothing'"),
        ("sys:maxsize", "maxsize"),
    ):
        with pytest.raises(UnknownNameError, match=rf"^{registry.what}\b.*{message}"):
            registry.find(name)
    with pytest.raises(UnknownNameError, match=rf"^{registry.what}\b.*'three'"):
        registry["three"] = 3
    assert "three" not in registry


def test_a_user_s_class_by_its_module(house):
    method = named("mine.methods:Accelerated", lam=0.25)
    assert type(method).__module__ == "mine.methods"
    assert method.lam == 0.25
    with pytest.raises(UnknownNameError, match=r"^option of mine.methods\b.*'lam'"):
        named("mine.methods:Accelerated", lams=1.0)
    with pytest.raises(UnknownNameError, match=r"\battribute\b.*known: Accelerated"):
        named("mine.methods:FedAC")
    with pytest.raises(UnknownNameError, match=r"^algorithm\b.*Algorithm"):
        named("mine.patterns:OddAndEven")


def test_errors_of_modules_name_the_place(tmp_path):
    (tmp_path / "broken_module.py").write_text("\n\nx = 1 / 0\n")
    with pytest.raises(UnknownNameError, match=r"ZeroDivisionError.*broken_module.py, line 3"):
        load_module(str(tmp_path / "broken_module.py"))
    assert "broken_module" not in sys.modules
    (tmp_path / "json.py").write_text("")
    with pytest.raises(UnknownNameError, match="'json'"):
        load_module(str(tmp_path / "json.py"))
    with pytest.raises(UnknownNameError, match=r"^import\b.*nothing\.py"):
        load_module(str(tmp_path / "nothing.py"))


def test_errors_of_an_experiment_with_a_user_s_classes(house):
    own = "algorithms=[{name='mine.methods:Accelerated', lam='much'}]"
    with pytest.raises(ConfigError, match=r"\balgorithms.0.lam\b"):
        load_preset("quickstart", [own])
    with pytest.raises(ConfigError, match=r"\bparticipation.shft\b.*'shift'"):
        load_preset("quickstart", ["participation={name='mine.patterns:OddAndEven', shft=1}"])
    with pytest.raises(ConfigError, match=r"model.*'mine\.models:line'"):
        load_preset("quickstart", ["model={name='mine.models:line'}"])
    among = "participation={name='Uniform', k=2, among={name='mine.patterns:OddAndEven'}}"
    assert load_preset("quickstart", [among]).participation.options["among"]["name"] == "mine.patterns:OddAndEven"


def saved(folder, method):
    server = Server(np.zeros(3, np.float32), method, 2, lr=0.1)
    server.round([Update(0, server.x + 1, 1)])
    server.save(folder)
    return server.x


def test_a_saved_method_is_found_if_its_module_is_imported(house, tmp_path):
    x = saved(tmp_path / "s", named("mine.methods:Accelerated", lam=0.25))
    loaded = Server.load(tmp_path / "s")
    assert (loaded.x == x).all()
    assert loaded.algorithm.lam == 0.25
    loaded.round([Update(1, loaded.x + 1, 1)])
    given = sys.modules["mine.methods"].Accelerated
    assert Server.load(tmp_path / "s", algorithm=given(0.25)).algorithm.lam == 0.25
    with pytest.raises(CheckpointError, match=r"^algorithm\b.*lam=0\.25"):
        Server.load(tmp_path / "s", algorithm=given(0.5))


def test_a_folder_cannot_import_a_module(house, tmp_path):
    """A folder may come from anyone, so it must not run code."""
    saved(tmp_path / "s", named("mine.methods:Accelerated"))
    forget_mine()
    with pytest.raises(CheckpointError, match=r"^algorithm\b.*'mine.methods'"):
        Server.load(tmp_path / "s")
    assert "mine.methods" not in sys.modules
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fedcore.algorithms]\nACG = mine.methods:Accelerated\n")
    sys.path.insert(0, str(tmp_path))
    try:
        assert type(Server.load(tmp_path / "s").algorithm).__name__ == "Accelerated"  # installed packages are trusted
    finally:
        sys.path.remove(str(tmp_path))


def test_a_method_without_a_module_must_be_given_again(tmp_path):
    class Mine(algorithms.MIFA):
        pass

    saved(tmp_path / "s", Mine())
    with pytest.raises(CheckpointError, match=r"^algorithm\b"):
        Server.load(tmp_path / "s")
    assert type(Server.load(tmp_path / "s", algorithm=Mine()).algorithm) is Mine


def test_a_folder_cannot_name_the_class_of_a_rate(house, tmp_path):
    """A rate can be any callable, so a folder could make an object of any class."""
    server = Server(np.zeros(3, np.float32), "FedAvg", 2, lr=Halving())
    server.save(tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"^lr\b"):
        Server.load(tmp_path / "s")


class Halving:
    def __call__(self, round):
        return 0.5**round


SMALL = ("--rounds", 1, "--seeds", 1, "--workers", 0)


@pytest.mark.parametrize(
    "words", [("show-data",), ("run", "--sweep", *SMALL), ("run", *SMALL)], ids=["data", "sweep", "run"]
)
def test_every_command_finds_modules_beside_the_configuration(lab, words):
    done = invoke(*words, "lab/experiment.toml")
    assert done.status == 0, done.errors


def test_a_run_resumes_with_the_folder_of_its_modules(lab, monkeypatch):
    assert invoke("run", lab, *SMALL, "--out", "run").status == 0
    assert cli_run.import_flags([]) == ["--import", f"{lab.parent}/"]
    sys.path.remove(str(lab.parent))
    registries.ADDED.clear()
    forget_mine()
    assert "--import" in invoke("run", "run", "--resume").errors
    done = invoke("run", "run", "--resume", "--rounds", 2, "--workers", 0, "--import", "lab/")
    assert done.status == 0, done.errors


def test_modules_in_the_working_folder_are_found(lab, monkeypatch):
    monkeypatch.chdir(lab.parent)
    options = ("--set", "data={name='mine.data:clouds'}", "--set", "model={name='mine.models:line'}")
    done = invoke("show-data", "quickstart", *options)
    assert done.status == 0, done.errors


def test_two_modules_with_one_name_are_an_error(lab, tmp_path, monkeypatch):
    """The other module would hide the one beside the configuration."""
    other = shutil.copytree(HOUSE, tmp_path / "other")
    monkeypatch.syspath_prepend(str(other))
    with pytest.raises(ConfigError, match=rf"'mine'.*{lab.parent}.*{other}"):
        load_preset(lab)


def test_the_folder_of_modules_must_exist(lab):
    assert "nowhere/" in invoke("list", "--import", "nowhere/").errors
    with pytest.raises(UnknownNameError, match=r"^data\b.*lab/:clouds"):
        data.REGISTRY.find("lab/:clouds")


CSV = """
import numpy as np
from pathlib import Path
from fedcore.sim.data import Source, from_arrays


def load(path: str = "own.csv"):
    table = np.genfromtxt(Path(__file__).parent / path, delimiter=",", names=True, dtype=None, encoding="utf-8")
    x = np.stack([table["x0"], table["x1"], table["x2"]], axis=1)
    clients = table["client"] if "client" in table.dtype.names else None
    return from_arrays(x, table["label"], x, table["label"], clients=clients)


own = Source(load, "a CSV file", shape=(3,), classes=2)
"""


def test_the_client_column_of_a_csv_file_is_the_natural_partition(lab):
    (lab.parent / "mine" / "csv.py").write_text(CSV)
    whose = ["b", "a", "c", "a", "b", "a"]
    rows = [f"{i},1.0,{i / 2},{i % 2},{client}" for i, client in enumerate(whose)]
    (lab.parent / "mine" / "own.csv").write_text("\n".join(["x0,x1,x2,label,client", *rows]) + "\n")
    (lab.parent / "mine" / "none.csv").write_text("x0,x1,x2,label\n1.0,2.0,3.0,1\n1.0,2.0,4.0,0\n")
    text = lab.read_text().replace("mine.data:clouds", "mine.csv:own").replace("points = 120\n", "")
    own = lab.with_name("own.toml")
    own.write_text(text.replace('name = "iid"\nclients = 4', 'name = "natural"'))
    experiment = load_preset(own)
    assert experiment.partition.clients == 3
    assert [part.tolist() for part in load_and_partition(experiment, 0)[1]] == [[1, 3, 5], [0, 4], [2]]
    done = invoke("run", own, *SMALL, "--set", "rate.lr=0.2", "--out", "own")
    assert done.status == 0, done.errors
    assert "rate.lr 0.1 -> 0.2" in done.output
    done = invoke("run", "own", "--resume", "--rounds", 2, "--workers", 0)
    assert done.status == 0, done.errors
    with pytest.raises(RangeError, match=r"^clients\b"):
        load_and_partition(load_preset(own, ["partition.clients=4"]), 0)
    with pytest.raises(ConfigError, match=r"own.toml.*no.csv"):
        load_preset(own, ["data.path=no.csv"])
    with pytest.raises(ConfigError, match=r"partition.*'arrays'"):
        load_preset(own, ["data.path=none.csv"])
