import pytest

from fedcore.errors import ConfigError
from fedcore.experiment import load_preset
from fedcore.experiment.presets import points


def gridded(*changes):
    return load_preset("quickstart", ["algorithms=['FedAvg', 'FedAvgM', 'SCAFFOLDM']", *changes])


def test_without_a_grid_there_is_one_point_the_experiment_itself():
    (point,) = points(load_preset("quickstart"))
    assert point.name == ""
    assert point.experiment == load_preset("quickstart")


def test_an_option_is_tried_on_the_algorithms_that_have_it():
    found = points(gridded("grid={'rate.lr'=[0.1, 0.2], 'algorithms.beta'=[0.5, 0.8, 1.0]}"))
    assert [point.name for point in found] == ["rate.lr=0.1", "rate.lr=0.2"] + [
        f"rate.lr={lr},beta={beta}" for lr in (0.1, 0.2) for beta in (0.5, 0.8, 1.0)
    ]
    last = found[-1].experiment
    assert [method.label for method in last.algorithms] == ["FedAvgM", "SCAFFOLDM"]
    assert [method.options["beta"] for method in last.algorithms] == [1.0, 1.0]
    assert last.rate.lr.options == {"value": 0.2}
    assert [method.label for method in found[0].experiment.algorithms] == ["FedAvg"]
    assert (last.name, last.seeds, last.grid) == ("quickstart", (0, 1, 2, 3, 4), {})


def test_an_option_of_none_of_the_algorithms_that_are_left_changes_nothing():
    (point,) = points(load_preset("quickstart", ["algorithms=['FedAvg']", "grid={'algorithms.beta'=[0.5, 0.8]}"]))
    assert point.name == ""


def test_a_warm_start_is_tried_on_the_algorithms_that_take_one():
    plain, *found = points(gridded("grid={'algorithms.warm_start'=[1, 4]}"))
    assert [method.label for method in plain.experiment.algorithms] == ["FedAvg", "FedAvgM"]
    assert [[(one.name, one.warm_start) for one in point.experiment.algorithms] for point in found] == [
        [("SCAFFOLDM", 1)],
        [("SCAFFOLDM", 4)],
    ]


def test_any_key_of_the_experiment_can_be_tried():
    found = points(gridded("grid={'local.epochs'=[1, 2], 'participation.p'=[0.3]}"))
    assert [point.experiment.local.epochs for point in found] == [1, 2]
    assert found[0].experiment.participation.options == {"p": 0.3}


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("{'rate.lrr'=[0.1]}", "no key 'rate.lrr'"),
        ("{'local.epochs'=[0]}", "local.epochs"),
        ("{'x.y'=[0]}", "no key 'x.y'"),
        ("{'rate.lr'=[0.1, 0.10]}", "two points have the name rate.lr=0.1"),
        ("{seeds=[[0], [5]]}", "all points share 'seeds'"),
        ("{name=['a', 'b']}", "all points share 'name'"),
        ("{'algorithms.bta'=[0.5]}", "algorithms.bta: unknown key; did you mean 'beta'?"),
        ("{'algorithms.'=[1]}", "algorithms.: unknown key"),
        ("{'rate.lr'=[-1]}", "grid: quickstart at rate.lr=-1: rate.lr: expected a number in (0, 100], got -1"),
    ],
)
def test_a_wrong_grid_is_named(grid, message):
    with pytest.raises(ConfigError) as caught:
        points(gridded(f"grid={grid}"))
    assert message in str(caught.value)
