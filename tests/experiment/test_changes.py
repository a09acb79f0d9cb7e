"""What an experiment says of itself where it is another one than its title."""

import json

import pytest

from fedcore.experiment import Experiment, Sweep, load_preset, run_sweep
from fedcore.experiment.changes import other_figures, said
from fedcore.experiment.presets import points

TABLE = "flexible/table3-synthetic-niid-t2"


@pytest.mark.parametrize(
    ("preset", "overrides", "words", "others"),
    [
        ("quickstart", [], "", ""),
        ("quickstart", ["rounds=100", "participation.p=0.1", "threads=2", "title=mine"], "", ""),
        ("quickstart", ["rounds=10", "seeds=[0]"], "rounds 100 -> 10, seeds 5 -> 1", ""),
        ("quickstart", ["seeds=[5, 6, 7, 8, 9]"], "seeds [0, 1, 2, 3, 4] -> [5, 6, 7, 8, 9]", ""),
        ("quickstart", ["participation.p=0.3"], "participation.p 0.1 -> 0.3", "participation.p 0.1 -> 0.3"),
        ("quickstart", ["partition={name='iid', clients=30}"], "partition shards -> iid", "partition shards -> iid"),
        ("quickstart", ["rate.lr=0.1"], "rate.lr 0.2 -> 0.1", "rate.lr 0.2 -> 0.1"),
        ("quickstart", ["local.clip=1.0"], "local.clip none -> 1.0", "local.clip none -> 1.0"),
        ("quickstart", ["evaluate.every=5"], "evaluate.every 1 -> 5", ""),
        ("quickstart", ["algorithms=['FedAvg', 'FedProx']"], "algorithms", ""),
        (
            "quickstart",
            ["algorithms=['FedAvg', {name='MIFA', wait=false, label='MIFA'}]"],
            "algorithms, algorithms.MIFA.wait none -> false",
            "algorithms.MIFA.wait none -> false",
        ),
        (
            TABLE,
            ["participation={name='Uniform', k=5}"],
            "participation Trace -> Uniform",
            "participation Trace -> Uniform",
        ),
    ],
)
def test_the_changes_of_a_preset(preset, overrides, words, others):
    found = load_preset(preset, overrides).changes
    assert (said(found), said(other_figures(found))) == (words, others)


def test_the_small_scale_is_another_size():
    small = load_preset("mimic/table3-tau20", scale="quick").changes
    assert said(small) == "rounds 200 -> 60, seeds 3 -> 1, evaluate.every 1 -> 2"
    assert other_figures(small) == ()
    assert said(other_figures(load_preset("mimic/figure5", scale="quick").changes)).startswith("model vgg11 -> mlp-")


def test_a_configuration_that_is_run_again_says_the_same(tmp_path):
    changed = load_preset("quickstart", ["participation.p=0.3"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed.tables()))
    assert load_preset(path) == changed
    assert load_preset(path, ["participation.p=0.1"]).changes == ()
    path.write_text(json.dumps(changed.tables() | {"changes": [], "rounds": 50}))  # by hand
    assert said(load_preset(path).changes) == "rounds 100 -> 50, participation.p 0.1 -> 0.3"


def test_a_file_of_one_s_own_is_what_it_says_it_is(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "quickstart"\ntitle = "Mine"\nrounds = 7\n')
    assert load_preset(path).changes == ()
    changed = load_preset(path, ["rounds=8"])
    assert said(changed.changes) == "rounds 7 -> 8"
    again = tmp_path / "config.json"
    again.write_text(json.dumps(changed.tables()))
    assert said(load_preset(again, ["participation.p=0.3"]).changes) == "rounds 7 -> 8, participation.p 0.1 -> 0.3"
    path.write_text('base = "quickstart"\nrounds = 7\n')
    assert said(load_preset(path).changes) == "rounds 100 -> 7"  # it bears the preset's title


def test_a_file_that_bears_a_preset_s_name_is_compared_with_it(tmp_path):
    path = tmp_path / "other.toml"
    path.write_text(f'base = "{TABLE}"\nname = "{TABLE}"\ntitle = "T"\nparticipation = {{name = "Uniform", k = 5}}\n')
    assert said(load_preset(path).changes) == "participation Trace -> Uniform"


def test_what_a_grid_of_one_s_own_tries_is_a_change_and_the_preset_s_own_is_none():
    grid = "grid={'rate.lr'=[0.2, 0.1], 'participation.p'=[0.1, 0.3]}"
    found = [said(point.experiment.changes) for point in points(load_preset("quickstart", ["rounds=5", grid]))]
    rest = ["", "participation.p 0.1 -> 0.3", "rate.lr 0.2 -> 0.1", "rate.lr 0.2 -> 0.1, participation.p 0.1 -> 0.3"]
    assert found == [", ".join(filter(None, ["rounds 100 -> 5", one])) for one in rest]
    method = ["algorithms=['FedAvgM']", "grid={'algorithms.beta'=[0.5]}"]
    (point,) = points(load_preset("quickstart", method))
    assert said(point.experiment.changes) == "algorithms, algorithms.FedAvgM.beta none -> 0.5"
    for point in points(load_preset("momentum/figure5-s10", scale="quick")):
        assert other_figures(point.experiment.changes) == ()


def test_seeds_that_are_added_to_a_sweep_are_counted_together(tmp_path):
    small = ["algorithms=['FedAvg']", "rounds=1", "local.epochs=1"]
    for seed, words in ((0, "seeds 5 -> 1"), (1, "seeds 5 -> 2")):
        run_sweep(Sweep([load_preset("quickstart", [*small, f"seeds=[{seed}]"])], tmp_path), jobs=0)
        config = tmp_path / "quickstart" / "config.json"
        assert words in said(Experiment.model_validate_json(config.read_text()).changes)


@pytest.mark.parametrize("name", ["../../x", "/abs", "a/../../b", "..", ".", "/"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name, tmp_path):
    tables = load_preset("quickstart").tables() | {"name": name}
    with pytest.raises(ValueError, match="must be a name, or a path below the folder of the run"):
        Experiment.model_validate_json(json.dumps(tables))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tables))
    with pytest.raises(ValueError, match=r"config\.json: name: must be a name, or a path below"):
        load_preset(path)


def test_a_name_with_a_control_character_is_refused():
    tables = load_preset("quickstart").tables() | {"name": "a\0b"}
    with pytest.raises(ValueError, match="should match pattern"):
        Experiment.model_validate_json(json.dumps(tables))
