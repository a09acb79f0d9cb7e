"""A run or a sweep that is there is given more rounds, seeds and algorithms, and ends as if it had had them from the
start."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from fedcore.algorithms import rates
from fedcore.cli import main
from fedcore.errors import ConfigError
from fedcore.experiment import Sweep, load_preset, run_experiment, run_sweep
from fedcore.experiment.changes import said
from fedcore.experiment.results import Header, RoundRecord, Writer, read, read_folder
from fedcore.experiment.schema import Trial
from fedcore.experiment.trial import run_trial

SMALL = ["local.epochs=1", "seeds=[0]", "algorithms=['MimiC']"]


def experiment(*changes):
    return load_preset("quickstart", [*SMALL, *changes])


def timeless(folder):
    """The records by file; what a round took is no part of them."""
    return {
        path.relative_to(folder).as_posix(): (found.header, [replace(line, seconds={}) for line in found.rounds])
        for path in sorted(folder.rglob("*.jsonl"))
        for found in [read(path)]
    }


def stopped_after(count):
    def on_round(line):
        if line.round == count:
            raise KeyboardInterrupt

    return on_round


def labels_of(folder):
    return [method.label for method in load_preset(folder / "config.json").algorithms]


@pytest.mark.parametrize("every", [1, 2], ids=["each round evaluated", "the last round evaluated as the last"])
def test_a_complete_run_goes_on_to_more_rounds_from_the_command_line(tmp_path, every):
    begun = experiment("rounds=3", f"evaluate.every={every}")
    run_experiment(begun, tmp_path / "run", jobs=0)
    main(["run", str(tmp_path / "run"), "--resume", "--rounds", "6", "--workers", "0"])
    run_experiment(experiment("rounds=6", f"evaluate.every={every}"), tmp_path / "straight", jobs=0)
    assert timeless(tmp_path / "run") == timeless(tmp_path / "straight")
    assert load_preset(tmp_path / "run" / "config.json").rounds == 6
    assert said(load_preset(tmp_path / "run" / "config.json").changes).startswith("rounds 100 -> 6")


@pytest.mark.parametrize("method", ["FedAvg", "SCAFFOLDMVR"])
@pytest.mark.parametrize("seconds", [0, 1e9], ids=["checkpoint every round", "none"])
def test_an_interrupted_trial_goes_on_to_more_rounds(tmp_path, method, seconds):
    short, long = (Trial(experiment(f"rounds={n}", f"algorithms=['{method}']"), 0, 0) for n in (5, 7))
    with pytest.raises(KeyboardInterrupt):
        run_trial(short, tmp_path / "stopped", stopped_after(2), checkpoint_seconds=seconds)
    run_trial(long, tmp_path / "stopped")
    run_trial(long, tmp_path / "straight")
    assert timeless(tmp_path / "stopped") == timeless(tmp_path / "straight")


def test_a_run_is_given_seeds_and_algorithms_beside_its_own(tmp_path):
    run_experiment(experiment("rounds=2", "algorithms=['MIFA', 'FedAvg']"), tmp_path / "run", jobs=0)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    named = "algorithms=['FedAvg', 'MimiC']"
    main(["run", str(tmp_path / "run"), "--resume", "--seeds", "2", "--set", named, "--workers", "0"])
    assert {path: path.stat().st_mtime_ns for path in files} == files
    straight = experiment("rounds=2", "seeds=[0, 1]", "algorithms=['MIFA', 'FedAvg', 'MimiC']")
    run_experiment(straight, tmp_path / "straight", jobs=0)
    assert timeless(tmp_path / "run") == timeless(tmp_path / "straight")
    assert len(timeless(tmp_path / "run")) == 6
    assert load_preset(tmp_path / "run" / "config.json") == straight


def test_a_run_that_is_stopped_while_it_does_rounds_again_has_lost_none(tmp_path):
    short, long = (Trial(experiment(f"rounds={n}"), 0, 0) for n in (5, 7))
    path = tmp_path / "records" / short.file_name
    run_trial(short, tmp_path)
    before = read(path).rounds
    for seconds in (0, 1e9):
        with pytest.raises(KeyboardInterrupt):
            run_trial(long, tmp_path, stopped_after(1), checkpoint_seconds=seconds)
        assert read(path).rounds == before
        assert read(path).header.rounds == 7
    run_trial(long, tmp_path)
    assert len(read(path).rounds) == 7


def test_a_record_is_replaced_when_there_is_as_much_again(tmp_path):
    header = Header("p", "P", "FedAvg", 0, 3, rounds=4, version="0")
    lines = [RoundRecord(n, [0], 1, 0, 0.5, None, 0.1, 0.1, 5, 1, 1.0, 8, {}) for n in range(4)]
    path = tmp_path / "a.jsonl"
    Writer(path, header, lines[:3]).close()
    with Writer(path, header, lines[:1], until=3) as writer:
        for count, line in ((3, lines[1]), (3, lines[2]), (4, lines[3])):
            writer.sync()
            writer.add(line)
            assert read(path).rounds == lines[:count]
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


@dataclass(frozen=True)
class Cosine:
    """A rate of one's own that falls over the run's length."""

    of_whole_run: ClassVar[bool] = True

    rounds: int = 9

    def __call__(self, round: int) -> float:
        return 0.1 * (1 - round / self.rounds)


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        ("rate.lr={name='Horizon', L=10.0, K=4, T=400}", "rate.lr Horizon depends on the length of the whole run"),
        ("rate.server_lr={name='Horizon', L=10.0, K=4, T=400}", "rate.server_lr Horizon depends on"),
        ("rate.lr={name='Cosine', rounds=9}", "rate.lr Cosine depends on"),
    ],
)
def test_what_goes_by_the_length_of_the_run_refuses_another_one(tmp_path, monkeypatch, rate, said):
    monkeypatch.setitem(rates.REGISTRY, "Cosine", Cosine)
    run_experiment(experiment("rounds=1", rate), tmp_path / "run", jobs=0)
    before = timeless(tmp_path)
    with pytest.raises(ConfigError, match=said):
        run_experiment(experiment("rounds=2", rate), tmp_path / "run", resume=True, jobs=0)
    assert timeless(tmp_path) == before
    more = experiment("rounds=1", rate, "seeds=[0, 1]")  # as many rounds
    assert run_experiment(more, tmp_path / "run", resume=True, jobs=0) == []


def test_another_algorithm_of_the_same_label_is_refused_by_name(tmp_path):
    run_experiment(experiment("rounds=1", "algorithms=[{name='MIFA', label='M'}]"), tmp_path / "run", jobs=0)
    other = experiment("rounds=1", "algorithms=[{name='MIFA', wait=false, label='M'}]")
    with pytest.raises(ConfigError, match=r"\(algorithms\.M\.wait none -> false\): take another folder"):
        run_experiment(other, tmp_path / "run", resume=True, jobs=0)


def sweep(folder, *changes):
    assert run_sweep(Sweep([experiment(*changes)], folder), jobs=0) == []


def test_a_sweep_is_given_rounds_algorithms_seeds_and_points_and_does_what_is_missing(tmp_path):
    begun = "grid={'rate.lr'=[0.1]}", "algorithms=['MIFA', 'FedAvg']"
    sweep(tmp_path / "sweep", "rounds=1", *begun)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    more = "grid={'rate.lr'=[0.1, 0.2]}", "algorithms=['FedAvg', 'MimiC', 'MIFA']"
    sweep(tmp_path / "sweep", "rounds=1", "seeds=[1, 0]", *more)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert labels_of(tmp_path / "sweep" / "quickstart" / "rate.lr=0.1") == ["MIFA", "FedAvg", "MimiC"]
    sweep(tmp_path / "sweep", "rounds=2", "seeds=[0, 1]", *more)
    sweep(tmp_path / "straight", "rounds=2", "seeds=[0, 1]", *more)
    sorted_by = [
        {(name.rpartition("/")[0], head.algorithm, head.seed): lines for name, (head, lines) in timeless(place).items()}
        for place in (tmp_path / "sweep", tmp_path / "straight")
    ]
    assert sorted_by[0] == sorted_by[1]
    assert len(sorted_by[0]) == 12


def test_the_keys_of_a_grid_in_another_order_are_the_same_sweep(tmp_path):
    first, second = "'rate.lr'=[0.1]", "'participation.p'=[0.2]"
    sweep(tmp_path, "rounds=1", f"grid={{{first}, {second}}}")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    sweep(tmp_path, "rounds=1", f"grid={{{second}, {first}}}")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")} == files


def test_seeds_that_no_trial_has_begun_are_no_part_of_the_sweep_any_more(tmp_path):
    few = "rounds=1", "algorithms=['FedAvg']"
    done = []

    def stop(event):
        done.append(event)
        if sum(one.over for one in done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(Sweep([experiment(*few, "seeds=[0, 1, 2, 3, 4, 5, 6, 7]")], tmp_path), jobs=0, on_event=stop)
    config = tmp_path / "quickstart" / "config.json"
    assert "seeds 5 -> 8" in said(load_preset(config).changes)
    sweep(tmp_path, *few, "seeds=[0, 1, 2, 3, 4]")
    assert load_preset(config).seeds == (0, 1, 2, 3, 4)
    assert "seeds" not in said(load_preset(config).changes)
    sweep(tmp_path, *few, "seeds=[0]")
    assert load_preset(config).seeds == (0, 1, 2, 3, 4)  # they are there


def test_a_sweep_is_not_made_longer_without_a_part_of_what_is_there(tmp_path):
    sweep(tmp_path, "rounds=1", "seeds=[0, 1]")
    with pytest.raises(ConfigError, match=r"rounds=2: MimiC, seed 1, is in"):
        sweep(tmp_path, "rounds=2", "seeds=[0]")
    sweep(tmp_path / "other", "rounds=2")
    with pytest.raises(ConfigError, match=r"rounds=1: must be at least 2, .*: take another folder for fewer"):
        sweep(tmp_path / "other", "rounds=1")
    assert {len(record.rounds) for record in read_folder(tmp_path / "quickstart")} == {1}
