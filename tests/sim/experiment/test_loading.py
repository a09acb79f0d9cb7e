"""Presets, overrides and files; invalid ones are rejected with all their problems."""

import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest

from fedcore.errors import ConfigError, UnknownNameError
from fedcore.rules import OPEN, Krum, Median, MultiKrum, NearestNeighborMixing, TrimmedMean
from fedcore.sim import MODELS, nets
from fedcore.sim.experiment import config, load_preset
from tests.kit import python
from tests.sim.experiment.kit import preset


@pytest.mark.parametrize("name", config.names())
def test_every_preset_is_valid(name):
    assert preset(name).name == name


INVALID = tomllib.loads(Path(__file__).with_name("invalid_overrides.toml").read_text())["cases"]
INVALID += [
    (f"algorithms=[{{name='MIFA', label='{'a' * 1001}'}}]", "label: String should have at most 1000 characters"),
    (f"title='{'a' * 10**5}'", "title: String should have at most 1000 characters"),
    (f"title={'[' * 900}{']' * 900}", "neither TOML nor a bare word"),
    (f"title={'[' * 90}{']' * 90}", "at most 50 levels"),
    (f"rounds={'9' * 5000}", "neither TOML nor a bare word"),
]


TWICE = f"{{name='Weighted', k=2, weights={[1.0] * 30}, replacement=true}}"
PRIVATE = "aggregation={name='PrivateMean', clip=1.0, noise=1.0, expected=9.0}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithms=['FedAU']", f"participation={TWICE}"], "participation.replacement: FedAU takes each client once"),
        (["algorithms=['MIFA']", f"participation={{name='Always', among={TWICE}}}"], "MIFA takes each client once"),
        (["algorithms=[{name='FedAvg', weights='uniform'}]", f"participation={TWICE}", PRIVATE], "takes each client"),
        (["algorithms=[{name='FedAvgM', placement='client'}]", "rate.optimizer=Adam"], "momentum at the clients"),
        (["algorithms=['FedExP']", "rate.server_lr=1.0"], "algorithms.0: server_lr: does not combine with"),
        (["algorithms=['FedAvg']", f"participation={TWICE}"], None),
        (["algorithms=['MIFA']", f"participation={TWICE.replace('k=2', 'k=1')}"], None),
        (["algorithms=['MIFA']", f"participation={TWICE.replace('true', 'false')}"], None),
    ],
)
def test_what_a_server_refuses_is_refused_when_it_is_read(overrides, message):
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        load_preset("quickstart", overrides)


@pytest.mark.parametrize(("override", "message"), INVALID)
def test_invalid_value_is_rejected(override, message):
    with pytest.raises(ConfigError) as caught:
        load_preset("quickstart", [override])
    assert message in str(caught.value)


def test_all_problems_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        load_preset("quickstart", ["rounds=0", "local.epochz=1", "algorithms=['Mimc']"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "quickstart: 3 problems"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["rounds", "algorithms.0.name", "local.epochz"]


def test_problems_between_tables_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        load_preset("quickstart", ["participation={name='Uniform', k=31}", "local.clip=1", "algorithms=['SCAFFOLD']"])
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "participation",
        "local.clip",
    ]


def test_errors_appear_without_the_import_of_torch():
    program = """if True:
        import sys
        from fedcore.errors import ConfigError
        from fedcore.sim.experiment import load_preset
        for override, place in ("rate.foo=1", "rate.foo"), ("model.name=lanet", "did you mean 'lenet'"):
            try:
                load_preset("quickstart", [override])
            except ConfigError as error:
                assert place in str(error) and "torch" not in sys.modules
            else:
                raise AssertionError(override)
    """
    python("-c", program)
    assert sorted(MODELS) == sorted(nets.REGISTRY.own)


def test_error_names_the_nearest_preset():
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
            "model=mlp-mnist",
            "seeds=[4, 2]",
            'participation={name="RoundRobin", tau_max=3, first_round="all"}',
        ],
    )
    assert (changed.local.steps, changed.local.epochs, changed.data.name) == (7, None, "mnist")
    assert changed.rate.server_lr is not None
    assert (changed.rate.server_lr.name, changed.rate.server_lr.options) == ("Constant", {"value": 0.5})
    assert changed.seeds == (4, 2)
    assert (changed.participation.options, changed.participation.first_round) == ({"tau_max": 3}, "all")
    load_preset("quickstart", {"local": (mine := {"batch": 16, "steps": 3}), "local.momentum": 0.5})
    assert mine == {"batch": 16, "steps": 3}


def test_default_label_of_an_algorithm_lists_its_options():
    methods = load_preset(
        "quickstart", ["algorithms=['MIFA', {name='MIFA', wait=false}, {name='MimiC', label='ours'}]"]
    ).algorithms
    assert [method.label for method in methods] == ["MIFA", "MIFA (wait=False)", "ours"]
    own = "{name='MIFA', rate={lr=0.1, optimizer={name='Adam', eta=1.0}}, aggregation=['RejectLong']}"
    methods = load_preset("quickstart", [f"algorithms=['FedYogi', {own}]"]).algorithms
    assert [method.label for method in methods] == ["FedYogi", "MIFA (lr=0.1, optimizer=Adam, RejectLong)"]


@pytest.mark.parametrize(
    ("override", "due"),
    [
        ("median", [Median()]),
        ("trimmed-mean", [TrimmedMean()]),
        ("{name='krum', f=2}", [Krum(2)]),
        ("[{name='NearestNeighborMixing', f=2}, 'multi-krum']", [NearestNeighborMixing(2), MultiKrum()]),
        ("open", list(OPEN)),
    ],
)
def test_rules_by_name(override, due):
    experiment = load_preset("quickstart", [f"aggregation={override}", "algorithms=['FedAvg']"])
    assert [rule.make() for rule in experiment.aggregation] == due


def test_configuration_round_trips_through_json(tmp_path):
    changes = [
        "algorithms=[{name='MIFA', wait=false}]",
        "rate.server_lr=0.5",
        "rate.lr={name='Staircase', initial=1, restarts=[10]}",
        "data={name='synthetic', alpha=0.5, beta=1}",
        "partition={name='natural', clients=30}",
        "model={name='mlp', inputs=60, hidden=[8, 4]}",
        "participation={name='Schedule', arrivals={29=10}, among={name='Trace', among='Always'}}",
    ]
    experiment = load_preset("quickstart", changes)
    file = tmp_path / "config.json"
    file.write_text(experiment.model_dump_json(exclude_none=True), encoding="utf-8-sig")  # as Windows writes it
    assert load_preset(file) == experiment


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "rounds = [\n]]", "line 2"),
        ("a.json", "{", "line 1"),
        ("a.json", "[]", "must be a table, got list"),
        ("a.json", '{"rounds": 3}', "title: Field required"),
        ("nowhere.toml", None, r"nowhere\.toml: "),
    ],
)
def test_unreadable_file_is_reported(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_preset(tmp_path / name)


def test_derived_controls_need_plain_steps():
    with pytest.raises(ConfigError, match=r'local.momentum: does not work with SCAFFOLD.*control = "sent"'):
        load_preset("quickstart", ["algorithms=['FedAvg', 'SCAFFOLD']", "local.momentum=0.5"])
    sent = load_preset("quickstart", ["algorithms=[{name='SCAFFOLD', control='sent'}]", "local.momentum=0.5"])
    assert sent.local.momentum == 0.5
    assert load_preset("quickstart", ["algorithms=['SCAFFOLD']", "local.weight_decay=0.1"]).local.weight_decay == 0.1
