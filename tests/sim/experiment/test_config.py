"""Variants, bases, changes, partitions and grids of configurations."""

import json

import numpy as np
import pytest

from fedcore.errors import ConfigError, UnknownNameError
from fedcore.sim.data import shards
from fedcore.sim.experiment import Experiment, config, load_preset
from fedcore.sim.experiment.changes import incomparable, inherited_text, text_of
from fedcore.sim.experiment.config import at_scale, load_and_partition, merged, points
from tests.sim.experiment.kit import preset, sweep

TABLE = "flexible/table3-synthetic-niid-t2"


def test_table_with_a_name_replaces_the_one_below():
    below = {"data": {"name": "a", "x": 1}, "local": {"batch": 2, "epochs": 1}}
    assert merged(below, {"data": {"name": "b"}}) == {"data": {"name": "b"}, "local": {"batch": 2, "epochs": 1}}
    assert merged(below, {"data": {"name": "a", "y": 2}})["data"] == {"name": "a", "y": 2}
    assert merged({"among": below}, {"among": {"data": {"y": 2}}})["among"]["data"] == {"name": "a", "x": 1, "y": 2}
    assert merged(below, {"local": 3})["local"] == 3
    assert below == {"data": {"name": "a", "x": 1}, "local": {"batch": 2, "epochs": 1}}


@pytest.mark.parametrize(
    ("base", "key", "table"),
    [
        ("quickstart", "participation", '{ name = "Bernoulli", p = 0.3 }'),  # not its first_round
        ("quickstart", "partition", '{ name = "shards", clients = 20, shards_per_client = 3 }'),
        ("flexible/table4-synthetic-t50", "data", '{ name = "synthetic", alpha = 0.5, beta = 1 }'),
        ("flexible/table4-synthetic-t50", "participation.among", '{ name = "Trace" }'),  # not its first = 5
        ("mimic/table4-cifar-p10", "rate.lr", '{ name = "Exponential", initial = 0.1, decay = 0.5 }'),
        ("quickstart", "attack", '{ name = "SignFlip", clients = 2 }'),
        ("quickstart", "rate.optimizer", '{ name = "Adam", beta1 = 0.5 }'),
    ],
)
def test_table_with_a_name_means_the_same_in_a_file_and_on_the_command_line(tmp_path, base, key, table):
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "{base}"\n{key} = {table}\n')
    of_file, of_set = load_preset(path).tables(), load_preset(base, [f"{key}={table}"]).tables()
    top = key.partition(".")[0]
    assert of_file[top] == of_set[top]


@pytest.mark.parametrize("scale", ["full", "quick"])
def test_file_lists_what_it_has_from_its_preset(tmp_path, scale):
    """Neither its own keys, nor those of overrides or of its grid; and no more what an extended run changed."""
    path, base = tmp_path / "mine.toml", "momentum/figure5-s10"
    own = f'base = "{base}"\nparticipation = {{ name = "Uniform", k = 3 }}\nrounds = 9\n'
    path.write_text(f'{own}[local]\nbatch = 8\n[grid]\n"rate.lr" = [1]\n')
    experiment = load_preset(path, ["partition.alpha=0.5", "seeds=[0]"], scale=scale)
    text = inherited_text(experiment.tables())
    assert text.startswith(f"from {base}: ")
    keys = {key: value for key, _, value in (part.partition(" = ") for part in text.partition(": ")[2].split(", "))}
    shown = {"data": "mnist", "partition": "dirichlet", "partition.clients": "100", "local.steps": "16"}
    assert shown.items() <= keys.items()
    assert not {"seeds", "local.batch", "participation", "participation.k", "partition.alpha", "rate.lr"} & keys.keys()
    # The preset's table quick replaces the file's rounds.
    assert keys.get("rounds") == (None if scale == "full" else "60")
    again = tmp_path / "config.json"
    again.write_text(json.dumps(experiment.tables()))
    assert inherited_text(load_preset(again).tables()) == text
    assert inherited_text(load_preset(again, ["local.steps=2"]).tables()) == text.replace(", local.steps = 16", "")
    assert inherited_text(load_preset(base).tables()) == ""


def test_variants_are_the_product_of_their_tables():
    axes = [{"a": {"about": "A"}, "b": {"rounds": 2}}, {"x": {"about": "X", "rounds": 3}}]
    presets = config.variants("f", {"title": "T", "rounds": 1, "variants": axes})
    assert presets == {"f-a-x": {"title": "T: A, X", "rounds": 3}, "f-b-x": {"title": "T: X", "rounds": 3}}


def test_family_differs_in_one_table():
    values = {"p1": {"varies": {"p": 0.1}}, "p9": {"about": "nearly all", "varies": {"p": 0.9}}}
    axes = [{"a": {"about": "A"}, "b": {"about": "B"}}, values, {"x": {}}]
    presets = config.variants("f", {"title": "T", "variants": axes})
    assert [tables["title"] for tables in presets.values()][:2] == ["T: A, p = 0.1", "T: A, nearly all"]
    assert presets["f-b-p9-x"]["pictures"]["varied"] == {"family": "f-b-x", "title": "T: B", "label": "p", "value": 0.9}


@pytest.mark.parametrize(
    "axes",
    [
        [{"a": {"varies": {"p": 1, "q": 2}}}],
        [{"a": {"varies": {"p": 1}}}, {"b": {"varies": {"q": 1}}}],
        [{"a": {"varies": {}}}],
    ],
)
def test_only_one_number_varies(axes):
    with pytest.raises(ConfigError, match="varies"):
        config.variants("f", {"title": "T", "variants": axes})


def leaves(tables):
    for value in tables.values() if isinstance(tables, dict) else tables:
        if isinstance(value, dict | list | tuple):
            yield from leaves(value)
        else:
            yield value


def test_families_of_the_presets_have_distinct_values_that_their_members_use():
    families = {}
    for name in config.names():
        tables = preset(name).model_dump(mode="json")
        varied = tables["pictures"]["varied"]
        if not varied:
            continue
        families.setdefault((varied["family"], varied["label"]), []).append(varied["value"])
        expected = varied["value"] / 100 if "%" in varied["label"] else varied["value"]
        if varied["label"] == "zeta":
            zeta = preset(name).network.topology(tables["partition"]["clients"]).zeta
            assert varied["value"] == pytest.approx(zeta, abs=5e-4), name
            continue
        if varied["label"] == "S" and tables["participation"]["name"] == "Always":
            expected = tables["partition"]["clients"]
        assert expected in leaves({key: tables[key] for key in ("partition", "participation")}), name
    assert families["mimic/table3", "tau_max"] == [20, 50, 100]
    assert families["momentum/figure5", "S"] == [100, 10, 5]
    assert families["flexible/table5-0.1", "round of the departure"] == list(range(10, 51, 5))
    assert all(len(values) == len(set(values)) > 1 for values in families.values())


@pytest.mark.parametrize(
    "change", ["participation.tau_max=500", "partition.clients=20", "grid={'partition.clients'=[5]}"]
)
def test_changed_preset_leaves_its_family(change):
    assert load_preset("mimic/table3-tau20", [change]).pictures.varied is None
    kept = load_preset("mimic/table3-tau20", ["rounds=3", "rate.lr=0.1", "grid={'rate.lr'=[0.2]}"]).pictures
    assert kept == load_preset("mimic/table3-tau20").pictures


def test_quick_scale_is_merged_last():
    tables = {"rounds": 9, "local": {"steps": 3}, "quick": {"local": {"steps": 1}}}
    assert at_scale(tables, "quick") == {"rounds": 9, "local": {"steps": 1}}
    assert at_scale(tables, "full") == {"rounds": 9, "local": {"steps": 3}}
    assert at_scale({"rounds": 9}, "quick") is None
    for scale, error, message in (("quick", ConfigError, "no table 'quick'"), ("tiny", UnknownNameError, "scale")):
        with pytest.raises(error, match=message):
            load_preset("quickstart", scale=scale)


def test_every_preset_of_a_paper_has_a_quick_scale():
    for name in config.names():
        if name != "quickstart":
            quick, full = load_preset(name, scale="quick"), preset(name)
            assert quick.rounds * len(quick.seeds) < full.rounds * len(full.seeds)
            assert [method.label for method in quick.algorithms] == [method.label for method in full.algorithms]


def test_preset_inherits_from_its_base_but_not_the_family():
    low, high = load_preset("mimic/table3-tau20"), load_preset("mimic/table3-tau100")
    assert (low.participation.options["tau_max"], high.participation.options["tau_max"]) == (20, 100)
    changed = {"name", "title", "participation", "pictures"}
    assert low.model_dump(exclude=changed) == high.model_dump(exclude=changed)
    base, derived = load_preset("mimic/figure6-p10"), load_preset("mimic/figure7")
    assert derived.participation == base.participation
    assert (base.pictures.varied.value, derived.pictures.varied, derived.pictures.over) == (0.1, None, "uploadings")
    load_preset("mimic/table3-tau20", ["participation.tau_max=3"])  # changes no cached table
    assert load_preset("mimic/table3-tau20") == low


def test_file_on_a_preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "mimic/table3-tau20"\n[local]\nbatch = 64\n[quick]\nseeds = [7]\n')
    mine = load_preset(file, scale="quick")
    assert (mine.local.batch, mine.local.epochs, mine.seeds, mine.rounds) == (64, 5, (7,), 60)
    assert (mine.name, mine.pictures.varied) == ("mine", None)
    file.write_text('base = "mimic/table3-tau21"')
    with pytest.raises(UnknownNameError, match=r"did you mean 'mimic/table3-tau20'\? \(known: see `fedcore list`\)"):
        load_preset(file)
    with pytest.raises(UnknownNameError, match="several variants; choose one of mimic/table3-tau20"):
        load_preset("mimic/table3")


@pytest.mark.parametrize(
    ("name", "overrides", "text", "others"),
    [
        ("quickstart", [], "", ""),
        ("quickstart", ["rounds=100", "participation.p=0.1", "threads=2", "title=mine"], "", ""),
        ("quickstart", ["rounds=10", "seeds=[0]"], "rounds 100 -> 10, seeds 5 -> 1", ""),
        ("quickstart", ["seeds=[5, 6, 7, 8, 9]"], "seeds [0, 1, 2, 3, 4] -> [5, 6, 7, 8, 9]", ""),
        ("quickstart", ["participation.p=0.3"], "participation.p 0.1 -> 0.3", None),
        ("quickstart", ["partition={name='iid', clients=30}"], "partition shards -> iid", None),
        ("quickstart", ["rate.lr=0.1"], "rate.lr 0.2 -> 0.1", None),
        ("quickstart", ["local.clip=1.0"], "local.clip none -> 1.0", None),
        ("quickstart", ["evaluate.every=5"], "evaluate.every 1 -> 5", ""),
        ("quickstart", ["report.window=50"], "report.window 10 -> 50", ""),
        ("quickstart", ["algorithms=['FedAvg', 'FedProx']"], "algorithms", ""),
        (
            "quickstart",
            ["algorithms=['FedAvg', {name='MIFA', wait=false, label='MIFA'}]"],
            "algorithms, algorithms.MIFA.wait none -> false",
            "algorithms.MIFA.wait none -> false",
        ),
        (TABLE, ["participation={name='Uniform', k=5}"], "participation Trace -> Uniform", None),
    ],
)
def test_changes_of_a_preset(name, overrides, text, others):
    changes = load_preset(name, overrides).changes
    assert (text_of(changes), text_of(incomparable(changes))) == (text, text if others is None else others)


def test_changes_of_the_quick_scale():
    quick = load_preset("mimic/table3-tau20", scale="quick").changes
    assert text_of(quick) == "rounds 200 -> 60, seeds 3 -> 1, evaluate.every 1 -> 2, evaluate.last 1 -> 10"
    assert incomparable(quick) == ()
    assert text_of(incomparable(load_preset("mimic/figure5", scale="quick").changes)).startswith("model vgg11 -> mlp-")


def test_changes_survive_the_configuration_file(tmp_path):
    changed = load_preset("quickstart", ["participation.p=0.3"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed.tables()))
    assert load_preset(path) == changed
    assert load_preset(path, ["participation.p=0.1"]).changes == ()
    path.write_text(json.dumps(changed.tables() | {"changes": [], "rounds": 50}))  # by hand
    assert text_of(load_preset(path).changes) == "rounds 100 -> 50, participation.p 0.1 -> 0.3"


@pytest.mark.parametrize(
    ("text", "overrides", "changes"),
    [
        ('base = "quickstart"\ntitle = "Mine"\nrounds = 7\n', [], ""),
        ('base = "quickstart"\ntitle = "Mine"\nrounds = 7\n', ["rounds=8"], "rounds 7 -> 8"),
        ('base = "quickstart"\nrounds = 7\n', [], "rounds 100 -> 7"),  # with the preset's title
        (
            f'base = "{TABLE}"\nname = "{TABLE}"\ntitle = "T"\nparticipation = {{name = "Uniform", k = 5}}\n',
            [],
            "participation Trace -> Uniform",
        ),
    ],
)
def test_changes_of_a_file(tmp_path, text, overrides, changes):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    experiment = load_preset(path, overrides)
    assert text_of(experiment.changes) == changes
    again = tmp_path / "config.json"
    again.write_text(json.dumps(experiment.tables()))
    assert changes in text_of(load_preset(again, ["local.batch=99"]).changes)


def test_other_data_do_not_have_the_description_of_the_base(tmp_path):
    path, base = tmp_path / "mine.toml", load_preset("quickstart")
    for text, described in (("rounds = 7", base.description), ('[data]\nname = "mnist"\n[model]\nname = "lenet"', "")):
        path.write_text(f'base = "quickstart"\n{text}\n')
        mine = load_preset(path)
        assert (mine.description, bool(mine.source)) == (described, bool(described))


def test_changes_of_the_points_of_a_grid(tmp_path):
    grid = "grid={'rate.lr'=[0.2, 0.1], 'participation.p'=[0.1, 0.3]}"
    texts = [text_of(point.experiment.changes) for point in points(load_preset("quickstart", ["rounds=5", grid]))]
    rest = ["", "participation.p 0.1 -> 0.3", "rate.lr 0.2 -> 0.1", "rate.lr 0.2 -> 0.1, participation.p 0.1 -> 0.3"]
    assert texts == [", ".join(filter(None, ["rounds 100 -> 5", one])) for one in rest]
    (point,) = points(load_preset("quickstart", ["algorithms=['FedAvgM']", "grid={'algorithms.beta'=[0.5]}"]))
    assert text_of(point.experiment.changes) == "algorithms, algorithms.FedAvgM.beta none -> 0.5"
    for point in points(load_preset("momentum/figure5-s10", scale="quick")):  # the preset's own grid
        assert incomparable(point.experiment.changes) == ()


def test_changes_count_the_added_seeds_of_a_sweep(tmp_path):
    for seed, text in ((0, "seeds 5 -> 1"), (1, "seeds 5 -> 2")):
        sweep(tmp_path, "algorithms=['FedAvg']", "rounds=1", f"seeds=[{seed}]")
        file = tmp_path / "quickstart" / "config.json"
        assert text in text_of(Experiment.model_validate_json(file.read_text()).changes)


@pytest.mark.parametrize("name", ["../../x", "/abs", "a/../../b", "..", ".", "/", "a\0b"])
def test_name_that_is_not_a_relative_path_is_rejected(name, tmp_path):
    tables = load_preset("quickstart").tables() | {"name": name}
    message = "should match pattern" if "\0" in name else "must be a name or a relative path"
    with pytest.raises(ValueError, match=message):
        Experiment.model_validate_json(json.dumps(tables))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tables))
    with pytest.raises(ValueError, match=rf"config\.json: name: .*{message}"):
        load_preset(path)


def test_each_seed_partitions_the_same_data():
    experiment = load_preset("quickstart")
    (first, parts), (second, others) = load_and_partition(experiment, 0), load_and_partition(experiment, 1)
    assert first is second  # cached
    expected = shards(first.train_y, 30, 2, seed=1, distinct_classes=True)
    assert all(np.array_equal(part, one) for part, one in zip(others, expected, strict=True))
    assert any(not np.array_equal(part, other) for part, other in zip(parts, others, strict=True))


def test_generated_data_depends_on_the_seed():
    changes = ["data={name='synthetic', alpha=1, beta=1, largest=60}", "partition={name='natural', clients=4}"]
    experiment = load_preset("quickstart", [*changes, "model=logistic"])
    (first, parts), (second, _) = load_and_partition(experiment, 0), load_and_partition(experiment, 1)
    assert [len(part) for part in parts] == [len(part) for part in first.parts]
    assert len(parts) == 4
    assert not np.array_equal(first.train_x[:50], second.train_x[:50])


@pytest.mark.parametrize(
    "partition",
    [
        "{name='label-k', clients=6, classes_per_client=3}",
        "{name='dirichlet', clients=6, alpha=0.3, least=5}",
        "{name='one-label', clients=6, smallest=5}",
        "{name='iid', clients=6}",
        "{name='iid-pareto', clients=6, smallest=5, largest=100}",
    ],
)
def test_every_partition_of_a_file(partition):
    dataset, parts = load_and_partition(load_preset("quickstart", [f"partition={partition}"]), 0)
    assert len(parts) == 6
    assert 0 <= min(part.min() for part in parts) <= max(part.max() for part in parts) < len(dataset.train_y)


def with_grid(grid):
    return points(load_preset("quickstart", ["algorithms=['FedAvg', 'FedAvgM', 'SCAFFOLDM']", f"grid={grid}"]))


@pytest.mark.parametrize("changes", [[], ["algorithms=['FedAvg']", "grid={'algorithms.beta'=[0.5, 0.8]}"]])
def test_without_a_grid_the_only_point_is_the_experiment(changes):
    (point,) = points(load_preset("quickstart", changes))
    assert point.name == ""
    assert changes or point.experiment == load_preset("quickstart")


def test_option_of_a_grid_applies_to_the_algorithms_that_have_it():
    found = with_grid("{'rate.lr'=[0.1, 0.2], 'algorithms.beta'=[0.5, 0.8, 1.0]}")
    assert [point.name for point in found] == ["rate.lr=0.1", "rate.lr=0.2"] + [
        f"rate.lr={lr},beta={beta}" for lr in (0.1, 0.2) for beta in (0.5, 0.8, 1.0)
    ]
    last = found[-1].experiment
    assert [(method.label, method.options["beta"]) for method in last.algorithms] == [("FedAvgM", 1), ("SCAFFOLDM", 1)]
    assert last.rate.lr.options == {"value": 0.2}
    assert [method.label for method in found[0].experiment.algorithms] == ["FedAvg"]
    assert (last.name, last.seeds, last.grid) == ("quickstart", (0, 1, 2, 3, 4), {})


def test_warm_start_of_a_grid_applies_to_the_algorithms_that_take_one():
    found = with_grid("{'algorithms.warm_start'=[1, 4]}")
    methods = [[(one.name, one.warm_start) for one in point.experiment.algorithms] for point in found]
    assert methods == [[("FedAvg", False), ("FedAvgM", False)], [("SCAFFOLDM", 1)], [("SCAFFOLDM", 4)]]


def test_key_of_a_grid_does_not_affect_an_algorithm_with_its_own_value():
    methods = "algorithms=['FedAvg', {name='MIFA', label='MIFA', rate={lr=0.3}}]"
    found = points(load_preset("quickstart", [methods, "grid={'rate.lr'=[0.1, 0.2]}"]))
    labels = {point.name: [method.label for method in point.experiment.algorithms] for point in found}
    assert labels == {"rate.lr=0.1": ["FedAvg"], "rate.lr=0.2": ["FedAvg"], "": ["MIFA"]}


def test_grid_takes_any_key_also_one_that_the_experiment_leaves_at_its_default():
    found = with_grid("{'local.epochs'=[1, 2], 'participation.p'=[0.3]}")
    assert [point.experiment.local.epochs for point in found] == [1, 2]
    assert found[0].experiment.participation.options == {"p": 0.3}
    found = with_grid("{'rate.optimizer'=['SGD', {name='Adam', eta=0.03}], 'evaluate.last'=[2]}")
    optimizers = [point.experiment.rate.optimizer for point in found]
    assert [(one.name, one.options) for one in optimizers] == [("SGD", {}), ("Adam", {"eta": 0.03})]
    assert {point.experiment.evaluate.last for point in found} == {2}


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("{'rate.lrr'=[0.1]}", "grid: quickstart at rate.lrr=0.1: rate.lrr: unknown key; did you mean 'lr'?"),
        ("{'local.epochs'=[0]}", "local.epochs"),
        ("{'x.y'=[0]}", "x: unknown key"),
        ("{'rounds.x'=[0]}", "grid: rounds.x: 'rounds' must be a table"),
        ("{'rate.lr'=[0.1, 0.10]}", "two points have the name rate.lr=0.1"),
        ("{seeds=[[0], [5]]}", "grid: 'seeds'"),
        ("{name=['a', 'b']}", "grid: 'name'"),
        ("{'algorithms.bta'=[0.5]}", "algorithms.bta: unknown key; did you mean 'beta'?"),
        ("{'algorithms.'=[1]}", "algorithms.: unknown key"),
        ("{'rate.lr'=[-1]}", "grid: quickstart at rate.lr=-1: rate.lr: must be a number in (0, 100], got -1"),
    ],
)
def test_invalid_grid_is_rejected(grid, message):
    with pytest.raises(ConfigError) as caught:
        with_grid(grid)
    assert message in str(caught.value)
