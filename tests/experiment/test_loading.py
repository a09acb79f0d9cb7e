import json

import pytest

from fedcore.errors import ConfigError, UnknownNameError
from fedcore.experiment import load_preset, presets


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_valid(name):
    assert load_preset(name).name == name


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("local.epochz=3", "local.epochz: unknown key; did you mean 'epochs'?"),
        ("rounds=0", "rounds: expected a number in [1, 1000000], got 0"),
        ("rate.lr=nan", "rate.lr: expected a number in (0, 100], got nan"),
        ("rate.decay=1.5", "rate.decay: expected a number in (0, 1], got 1.5"),
        ("rate.server_lr=0", "rate.server_lr.initial: expected a number in (0, 100], got 0"),
        ("rate.server_lr={initial=1, decy=0.9}", "rate.server_lr.decy: unknown key; did you mean 'decay'?"),
        ("rate.server_lr=fast", "rate.server_lr: expected a number or a table, got 'fast'"),
        ("local.steps=3", "local: expected exactly one of 'epochs' and 'steps', got both"),
        ("local.epochs=none", "local: expected exactly one of 'epochs' and 'steps', got neither"),
        ("local.batch='16'", "local.batch: expected a valid integer, got '16'"),
        ("local.batch=true", "local.batch: expected a valid integer, got True"),
        ("data.name=digit", "data.name: 'digit' is unknown; did you mean 'digits'?"),
        ("model.name=lanet", "model.name: 'lanet' is unknown; did you mean 'lenet'?"),
        ("algorithms=['Mimc']", "algorithms.0.name: 'Mimc' is unknown; did you mean 'MimiC'?"),
        ("algorithms=[{name='MIFA', wai=false}]", "algorithms.0.wai: unknown key; did you mean 'wait'?"),
        ("algorithms=[{name='MIFA', wait='no'}]", "algorithms.0.wait: expected a valid boolean, got 'no'"),
        ("algorithms=['MIFA', 'MIFA']", "algorithms: expected at least one, each label once"),
        ("algorithms=[]", "algorithms: expected at least one"),
        ("seeds=[1, 1]", "seeds: expected at least one seed, each once, got [1, 1]"),
        ("seeds=3", "seeds: expected a list, got 3"),
        ("participation.name=Sometimes", "participation.name: 'Sometimes' is unknown"),
        ("participation={name='Bernoulli'}", "participation.p: missing"),
        ("participation={name='Bernoulli', p=2.0}", "participation: p: expected a number in [0, 1], got 2.0"),
        ("participation={name='Bernoulli', p=0.1, clients=3}", "participation.clients: unknown key"),
        ("data=none", "data: missing"),
        ("data=3", "data: expected a table, got 3"),
        ("rounds.x=3", "'rounds' is no table"),
        ("rounds", "expected key=value, got 'rounds'"),
        ("title=a b", "neither TOML nor a bare word"),
    ],
)
def test_a_wrong_value_is_named(override, message):
    with pytest.raises(ConfigError) as caught:
        load_preset("quickstart", [override])
    assert message in str(caught.value)


def test_all_problems_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        load_preset("quickstart", ["rounds=0", "local.epochz=1", "algorithms=['Mimc']"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "quickstart: 3 problems"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["rounds", "algorithms.0.name", "local.epochz"]


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'quickstart'"):
        load_preset("quickstrat")


def test_overrides_are_toml_or_bare_words():
    changed = load_preset(
        "quickstart",
        [
            "local.steps=7",
            "local.epochs=none",
            "rate.server_lr=0.5",
            "data.name=mnist",
            "seeds=[4, 2]",
            'participation={name="RoundRobin", tau_max=3, first_round="all"}',
        ],
    )
    assert (changed.local.steps, changed.local.epochs, changed.data.name) == (7, None, "mnist")
    assert changed.rate.server_lr is not None
    assert (changed.rate.server_lr.initial, changed.rate.server_lr.decay) == (0.5, 1.0)
    assert changed.seeds == (4, 2)
    assert (changed.participation.options, changed.participation.first_round) == ({"tau_max": 3}, "all")


def test_an_algorithm_is_labelled_by_its_options_unless_it_says_otherwise():
    methods = load_preset(
        "quickstart", ["algorithms=['MIFA', {name='MIFA', wait=false}, {name='MimiC', label='ours'}]"]
    ).algorithms
    assert [method.label for method in methods] == ["MIFA", "MIFA (wait=False)", "ours"]


def test_a_configuration_survives_its_own_file(tmp_path):
    experiment = load_preset("quickstart", ["algorithms=[{name='MIFA', wait=false}]", "rate.server_lr=0.5"])
    file = tmp_path / "config.json"
    file.write_text(experiment.model_dump_json(exclude_none=True))
    assert load_preset(file) == experiment


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "rounds = [\n]]", "line 2"),
        ("a.json", "{", "line 1"),
        ("a.json", "[]", "expected tables at the top, got list"),
        ("a.json", json.dumps({"rounds": 3}), "title: missing"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, name, text, message):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_preset(file)


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match=r"nowhere\.toml: there is no such file"):
        load_preset("nowhere.toml")
