"""Presets, overrides and files; invalid ones are rejected with all their problems."""

import subprocess
import sys

import pytest

from fedcore.errors import ConfigError, UnknownNameError
from fedcore.rules import OPEN, Krum, Median, MultiKrum, NearestNeighborMixing, TrimmedMean
from fedcore.sim import MODELS, nets
from fedcore.sim.experiment import config, load_preset
from tests.sim.experiment.kit import preset


@pytest.mark.parametrize("name", config.names())
def test_every_preset_is_valid(name):
    assert preset(name).name == name


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("local.epochz=3", "local.epochz: unknown key; did you mean 'epochs'?"),
        ("rounds=0", "rounds: Input should be greater than or equal to 1, got 0"),
        ("rate.lr=nan", "rate.lr: must be a number in (0, 100], got nan"),
        ("rate.lr=true", "rate.lr: must be a number or a table, got True"),
        ("rate.lr={name='Constnt', value=1}", "rate.lr.name: 'Constnt' is unknown; did you mean 'Constant'?"),
        ("rate.lr={initial=1, decay=0.9}", "rate.lr.name: Field required"),
        ("rate.lr={name='Exponential', initial=0.1}", "rate.lr.decay: Field required"),
        ("rate.lr={name='Exponential', initial=1, decay=1.5}", "rate.lr: decay=1.5: must be a number in (0, 1]"),
        ("rate.lr={name='Staircase', initial=101}", "rate.lr: must be a number in (0, 100] in round 0, got 101.0"),
        ("rate.lr={name='Staircase', initial=1, restarts=[-3]}", "rate.lr: restarts=-3: must be an integer >= 0"),
        ("rate.lr={name='Staircase', initial=1, restarts=3}", "rate.lr.restarts: Input"),
        ("rate.lr={name='Horizon', L=1, K=2.5, T=9}", "rate.lr.K: Input should be a valid integer, got 2.5"),
        ("rate.lr={name='PerCohort', c=1, beta=1}", "rate.lr.name: 'PerCohort' depends on the cohort"),
        ("rate.server_lr=0", "rate.server_lr: must be a number in (0, 100], got 0"),
        (
            "rate.server_lr={name='Exponential', initial=1, decy=0.9}",
            "rate.server_lr.decy: unknown key; did you mean 'decay'?",
        ),
        ("rate.server_lr=fast", "rate.server_lr: must be a number or a table, got 'fast'"),
        ("objective={departures='keep'}", "objective.departures: Input should be 'include' or 'exclude', got 'keep'"),
        ("objective={restarts=true}", "objective.restarts: unknown key; did you mean 'restart'?"),
        ("grid={'rate.lr'=0.1}", "grid.rate.lr: Input should be a valid list, got 0.1"),
        ("local.steps=3", "local: set exactly one of 'epochs' and 'steps', got both"),
        ("local.epochs=none", "local: set exactly one of 'epochs' and 'steps', got neither"),
        ("local.batch='16'", "local.batch: Input should be a valid integer, got '16'"),
        ("local.batch=true", "local.batch: Input should be a valid integer, got True"),
        ("data.name=digit", "data.name: 'digit' is unknown; did you mean 'digits'?"),
        ("model.name=lanet", "model.name: 'lanet' is unknown; did you mean 'lenet'?"),
        ("model={name='mlp', hiden=[3]}", "model.hiden: unknown key; did you mean 'hidden'?"),
        ("model={name='mlp', hidden='3'}", "model.hidden: 'str' instances are not allowed"),
        ("model={name='mlp', hidden=3}", "model.hidden: Input should be an instance of Sequence, got 3"),
        ("model={name='mlp', hidden=[3.5]}", "model.hidden: Input should be a valid integer, got 3.5"),
        ("model={name='mlp', hidden=[0]}", "model: hidden=0: must be an integer >= 1"),
        ("model=lenet", "model: 'lenet': "),
        ("model={name='mlp', classes=3}", "model: must have 10 outputs"),
        ("data.split=3", "data.split: unknown key"),
        ("data={name='cifar-10', standardize=true}", "data.standardize: unknown key; did you mean 'standardise'?"),
        ("data=emnist-bymerg", "data.name: 'emnist-bymerg' is unknown; did you mean 'emnist-bymerge'?"),
        ("data={name='synthetic', alpha=1.0}", "data.beta: Field required"),
        ("data={name='synthetic', alpha=-1, beta=0.5}", "data: alpha"),
        ("data={name='synthetic', alpha='1', beta=1}", "data.alpha: Input should be a valid number, got '1'"),
        (
            "data={name='synthetic-iid', sizes='parto'}",
            "data.sizes: Input should be 'pareto' or 'lognormal', got 'parto'",
        ),
        ("data={name='synthetic-iid', seed=3}", "data.seed: unknown key"),
        ("partition=none", "partition: Field required"),
        ("partition.name=dirichle", "partition.name: 'dirichle' is unknown; did you mean 'dirichlet'?"),
        ("partition.name=none", "partition.name: Field required"),
        ("partition.clients=0", "partition.clients: Input should be greater than or equal to 1, got 0"),
        ("partition.clients=none", "partition.clients: Field required"),
        ("partition.shards_per_client=0", "partition: shards_per_client=0: must be an integer >= 1"),
        ("partition.shards_per_client=none", "partition.shards_per_client: Field required"),
        ("partition.shards_per_clint=3", "partition.shards_per_clint: unknown key; did you mean 'shards_per_client'?"),
        ("partition.client=3", "partition.client: unknown key; did you mean 'clients'?"),
        ("partition={name='dirichlet', clients=3}", "partition.alpha: Field required"),
        ("partition={name='dirichlet', clients=3, alpha=0}", "partition: alpha"),
        ("partition={name='label-k', clients=3, classes_per_client=0}", "partition: classes_per_client"),
        ("partition={name='one-label', clients=3, largest=3}", "partition: largest"),
        (
            "partition={name='one-label', clients=3, largest=3.5}",
            "partition.largest: Input should be a valid integer, got 3.5",
        ),
        ("partition={name='iid', clients=3, seed=1}", "partition.seed: unknown key"),
        (
            "partition={name='natural', clients=3}",
            "partition.name: 'digits' does not assign examples to clients; use synthetic, synthetic-iid",
        ),
        ("algorithms=['Mimc']", "algorithms.0.name: 'Mimc' is unknown; did you mean 'MimiC'?"),
        ("algorithms=[{name='MIFA', wai=false}]", "algorithms.0.wai: unknown key; did you mean 'wait'?"),
        ("algorithms=[{name='MIFA', wait='no'}]", "algorithms.0.wait: Input should be a valid boolean, got 'no'"),
        ("algorithms=['MIFA', 'MIFA']", "algorithms: needs at least one algorithm, with distinct labels"),
        ("algorithms=[]", "algorithms: needs at least one"),
        ("algorithms=[{name='MIFA', rate={lrr=0.1}}]", "algorithms.0.rate.lrr: unknown key; did you mean 'lr'?"),
        ("algorithms=[{name='MIFA', rate={lr=-1}}]", "algorithms.0.rate.lr: must be a number in (0, 100], got -1"),
        ("algorithms=[{name='MIFA', local={steps=0}}]", "algorithms.0.local.steps: Input should be greater than"),
        ("algorithms=[{name='SCAFFOLD', local={clip=1.0}}]", "algorithms.0.local.clip: does not work with SCAFFOLD"),
        ("algorithms=[{name='FedAdam', etaa=1}]", "algorithms.0.rate.optimizer.etaa: unknown key; did you mean 'eta'?"),
        ("algorithms=[{name='MIFA', limits={max_norm=0}}]", "algorithms.0.limits.max_norm: Input should be greater"),
        ("aggregation=['ClipToMedan']", "aggregation.0.name: 'ClipToMedan' is unknown; did you mean 'ClipToMedian'?"),
        ("aggregation=medain", "aggregation.0.name: 'medain' is unknown; did you mean 'Median'?"),
        ("aggregation={name='trimmed-mean', g=2}", "aggregation.0.g: unknown key"),
        ("aggregation={name='krum', f=-1}", "aggregation.0: f=-1"),
        ("aggregation=['Median', 'RejectLong']", "aggregation: Median must be the last rule"),
        ("aggregation=['Mean', 'Mean']", "aggregation: a rule occurs twice"),
        (f"algorithms=[{{name='MIFA', label='{'a' * 1001}'}}]", "label: String should have at most 1000 characters"),
        (f"title='{'a' * 10**5}'", "title: String should have at most 1000 characters"),
        ('title="a\\u0007b"', "title: String should match pattern"),
        ("seeds=[1, 1]", "seeds: needs at least one seed, without duplicates, got [1, 1]"),
        ("seeds=3", "seeds: Input should be a valid tuple, got 3"),
        ("participation.name=Sometimes", "participation.name: 'Sometimes' is unknown"),
        ("participation={name='Bernoulli'}", "participation.p: Field required"),
        ("participation={name='Bernoulli', p=2.0}", "participation: p=2.0: must be a number in [0, 1]"),
        ("participation={name='Bernoulli', p=0.1, clients=3}", "participation.clients: unknown key"),
        ("participation={name='Bernoulli', p='x'}", "participation.p: Input should be a valid number, got 'x'"),
        ("participation={name='Bernoulli', p=[0.1]}", "participation: p: expected 30 numbers"),
        ("participation={name='Uniform', k=31}", "participation: k"),
        ("participation={name='Trace', traces='nowhere.csv'}", "participation: traces: cannot read nowhere.csv"),
        ("participation={name='Trace', first=9}", "participation: first"),
        ("participation={name='Schedule', arrivals={30=1}}", "participation: arrivals: client"),
        (
            "participation={name='Schedule', arrivals={3='x'}}",
            "participation.arrivals: Input should be a valid integer, got 'x'",
        ),
        (
            "participation={name='Schedule', arivals={3=1}}",
            "participation.arivals: unknown key; did you mean 'arrivals'?",
        ),
        ("participation.among=Unifrom", "participation.among.name: 'Unifrom' is unknown; did you mean 'Uniform'?"),
        ("participation.among={k=3}", "participation.among.name: Field required"),
        ("participation.among=3", "participation.among: must be a name, or a table"),
        ("participation.among=Uniform", "participation.among.k: Field required"),
        ("participation.among={name='Uniform', k=3, seed=1}", "participation.among.seed: unknown key"),
        (
            "participation.among={name='Trace', among={name='Uniform', kk=3}}",
            "participation.among.among.kk: unknown key; did you mean 'k'?",
        ),
        ("participation.among={name='Uniform', k=31}", "participation: k"),
        ("data=none", "data: Field required"),
        ("data=3", "data: must be a name, or a table with a name and options, got 3"),
        ("rounds.x=3", "'rounds' must be a table"),
        ("rounds", "override 'rounds': must be KEY=VALUE"),
        ("title=a b", "neither TOML nor a bare word"),
        (f"title={'[' * 900}{']' * 900}", "neither TOML nor a bare word"),
        (f"title={'[' * 90}{']' * 90}", "at most 50 levels"),
        (f"rounds={'9' * 5000}", "neither TOML nor a bare word"),
    ],
)
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
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
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
    file.write_text(experiment.model_dump_json(exclude_none=True))
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
