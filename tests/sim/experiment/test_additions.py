"""A run or sweep that is extended ends as if it had had its rounds, seeds and algorithms from the start."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from fedcore.algorithms import rates
from fedcore.cli import main
from fedcore.errors import ConfigError
from fedcore.sim.experiment import Sweep, load_preset, run_experiment, run_sweep
from fedcore.sim.experiment.changes import text_of
from fedcore.sim.experiment.results import Header, RoundRecord, Writer, read
from fedcore.sim.experiment.schema import Trial
from fedcore.sim.experiment.trial import run_trial
from tests.sim.experiment.kit import facts, interrupt, quick, records_in, rounds_of, sweep, write_times

EVALUATE = "evaluate={every=5, last=3}"


def experiment(*changes):
    return quick("seeds=[0]", "algorithms=['MimiC']", *changes)


@pytest.mark.parametrize(
    ("every", "last", "evaluated"),
    [(1, 1, [0, 1, 2, 3, 4, 5]), (2, 1, [1, 3, 5]), (4, 2, [3, 4, 5]), (4, 5, [1, 2, 3, 4, 5])],
)
def test_complete_run_is_extended_on_the_command_line(tmp_path, every, last, evaluated):
    """Rounds 1 and 2 of the short run were evaluated as its last ones; the long run evaluates others."""
    evaluate = f"evaluate={{every={every}, last={last}}}"
    run_experiment(experiment("rounds=3", evaluate), tmp_path / "run", jobs=0)
    main(["run", str(tmp_path / "run"), "--resume", "--rounds", "6", "--workers", "0"])
    run_experiment(experiment("rounds=6", evaluate), tmp_path / "straight", jobs=0)
    assert records_in(tmp_path / "run") == records_in(tmp_path / "straight")
    (trial,) = (tmp_path / "run" / "records").iterdir()
    assert [line.round for line in read(trial).rounds if line.accuracy is not None] == evaluated
    config = load_preset(tmp_path / "run" / "config.json")
    assert config.rounds == 6
    assert text_of(config.changes).startswith("rounds 100 -> 6")


def test_window_of_the_report_may_change(tmp_path):
    run_experiment(experiment("rounds=2"), tmp_path / "run", jobs=0)
    before = records_in(tmp_path)
    for window in (50, 1):
        main(["run", str(tmp_path / "run"), "--resume", "--set", f"report.window={window}", "--workers", "0"])
        assert f"among a trial's last {window};" in (tmp_path / "run" / "table.md").read_text()
    assert records_in(tmp_path) == before


def test_texts_may_change_and_only_models_of_the_longer_run_stay(tmp_path):
    short, long = (experiment(f"rounds={n}", "evaluate.keep=3", "algorithms=['FedAvg']") for n in (2, 4))
    run_experiment(short, tmp_path, jobs=0)
    config = tmp_path / "config.json"
    config.write_text(config.read_text(), encoding="utf-8-sig")  # as an editor on Windows writes it
    texts = {"note": "corrected", "description": "new", "source": "here"}
    run_experiment(long.model_copy(update=texts), tmp_path, resume=True, jobs=0)
    assert texts.items() <= facts(tmp_path).items()
    assert sorted(path.name for path in tmp_path.glob("models/*/*")) == ["round2.pt", "round3.pt"]


@pytest.mark.parametrize(("method", "seconds"), [("FedAvg", 0), ("FedAvg", 1e9), ("SCAFFOLDMVR", 0)])
def test_interrupted_trial_is_extended(tmp_path, method, seconds):
    short, long = (Trial(experiment(f"rounds={n}", f"algorithms=['{method}']", EVALUATE), 0, 0) for n in (5, 7))
    interrupt(short, tmp_path / "interrupted", 2, seconds)
    for folder in ("interrupted", "straight"):
        run_trial(long, tmp_path / folder)
    assert records_in(tmp_path / "interrupted") == records_in(tmp_path / "straight")


def test_run_gets_more_seeds_and_algorithms(tmp_path):
    run_experiment(experiment("rounds=2", "algorithms=['MIFA', 'FedAvg']"), tmp_path / "run", jobs=0)
    files = write_times(tmp_path)
    added = "algorithms=['FedAvg', 'MimiC']"
    main(["run", str(tmp_path / "run"), "--resume", "--seeds", "2", "--set", added, "--workers", "0"])
    assert files.items() <= write_times(tmp_path).items()
    straight = experiment("rounds=2", "seeds=[0, 1]", "algorithms=['MIFA', 'FedAvg', 'MimiC']")
    run_experiment(straight, tmp_path / "straight", jobs=0)
    assert records_in(tmp_path / "run") == records_in(tmp_path / "straight")
    assert len(records_in(tmp_path / "run")) == 6
    assert load_preset(tmp_path / "run" / "config.json") == straight


def test_interrupt_while_rounds_are_repeated_loses_none(tmp_path):
    """The record keeps the evaluations of the short trial's last rounds, too, until the new one is as long."""
    short, long = (Trial(experiment(f"rounds={n}", EVALUATE), 0, 0) for n in (5, 7))
    run_trial(short, tmp_path)
    before = rounds_of(short, tmp_path)
    for seconds in (0, 1e9):
        interrupt(long, tmp_path, 1, seconds)
        record = read(tmp_path / "records" / short.file_name)
        assert (record.rounds, record.header.rounds) == (before, 7)
    run_trial(long, tmp_path)
    assert len(rounds_of(long, tmp_path)) == 7


def test_record_is_replaced_once_the_new_one_is_as_long(tmp_path):
    header = Header("p", "P", "FedAvg", 0, 3, rounds=4, version="0")
    lines = [RoundRecord(n, [0], 1, 0, 0.5, None, 0.1, 0.1, 5, 1, 1.0, 8, {}) for n in range(4)]
    path = tmp_path / "a.jsonl"
    Writer(path, header, lines[:3]).close()
    with Writer(path, header, lines[:1], until=3) as writer:
        for count, line in ((3, lines[1]), (3, lines[2]), (4, lines[3])):
            writer.sync()
            writer.add(line)
            assert read(path).rounds == lines[:count]
    with Writer(path, header, lines[:1], until=4) as writer:
        writer.add(replace(lines[1], stopped=True))  # a trial may stop earlier than before
    assert len(read(path).rounds) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


@dataclass(frozen=True)
class Cosine:
    """A custom rate that depends on the total number of rounds."""

    of_whole_run: ClassVar[bool] = True
    rounds: int = 9

    def __call__(self, round: int) -> float:
        return 0.1 * (1 - round / self.rounds)


HORIZON = "{name='Horizon', L=10.0, K=4, T=400}"


@pytest.mark.parametrize(
    ("key", "rate", "name"),
    [
        ("rate.lr", HORIZON, "Horizon"),
        ("rate.server_lr", HORIZON, "Horizon"),
        ("rate.lr", "{name='Cosine', rounds=9}", "Cosine"),
    ],
)
def test_rate_of_the_total_number_of_rounds_forbids_more_rounds(tmp_path, monkeypatch, key, rate, name):
    monkeypatch.setitem(rates.REGISTRY, "Cosine", Cosine)
    run_experiment(experiment("rounds=1", f"{key}={rate}"), tmp_path / "run", jobs=0)
    before = records_in(tmp_path)
    with pytest.raises(ConfigError, match=f"{key} {name} depends on the total number"):
        run_experiment(experiment("rounds=2", f"{key}={rate}"), tmp_path / "run", resume=True, jobs=0)
    assert records_in(tmp_path) == before
    more = experiment("rounds=1", f"{key}={rate}", "seeds=[0, 1]")
    assert run_experiment(more, tmp_path / "run", resume=True, jobs=0) == []


def test_another_algorithm_of_the_same_label_is_rejected(tmp_path):
    run_experiment(experiment("rounds=1", "algorithms=[{name='MIFA', label='M'}]"), tmp_path / "run", jobs=0)
    other = experiment("rounds=1", "algorithms=[{name='MIFA', wait=false, label='M'}]")
    with pytest.raises(ConfigError, match=r"\(algorithms\.M\.wait none -> false\)"):
        run_experiment(other, tmp_path / "run", resume=True, jobs=0)


def test_sweep_gets_more_rounds_algorithms_seeds_and_points(tmp_path):
    sweep(tmp_path / "sweep", "rounds=1", "seeds=[0]", "grid={'rate.lr'=[0.1]}", "algorithms=['MIFA', 'FedAvg']")
    files = write_times(tmp_path)
    more = "grid={'rate.lr'=[0.1, 0.2]}", "algorithms=['FedAvg', 'MimiC', 'MIFA']"
    sweep(tmp_path / "sweep", "rounds=1", "seeds=[1, 0]", *more)
    assert files.items() <= write_times(tmp_path).items()
    config = load_preset(tmp_path / "sweep" / "quickstart" / "rate.lr=0.1" / "config.json")
    assert [method.label for method in config.algorithms] == ["MIFA", "FedAvg", "MimiC"]
    sweep(tmp_path / "sweep", "rounds=2", "seeds=[0, 1]", *more)
    sweep(tmp_path / "straight", "rounds=2", "seeds=[0, 1]", *more)
    extended, straight = (
        {
            (path.rpartition("/")[0], header.algorithm, header.seed): lines
            for path, (header, lines) in records_in(tmp_path / name).items()
        }
        for name in ("sweep", "straight")
    )
    assert extended == straight
    assert len(extended) == 12


def test_order_of_the_keys_of_a_grid_does_not_matter(tmp_path):
    first, second = "'rate.lr'=[0.1]", "'participation.p'=[0.2]"
    few = "rounds=1", "seeds=[0]", "algorithms=['MimiC']"
    sweep(tmp_path, *few, f"grid={{{first}, {second}}}")
    files = write_times(tmp_path)
    sweep(tmp_path, *few, f"grid={{{second}, {first}}}")
    assert write_times(tmp_path) == files


def test_seeds_without_trials_are_dropped_from_a_sweep(tmp_path):
    few, ended = ("rounds=1", "algorithms=['FedAvg']"), []

    def stop(event):
        ended.append(event.over)
        if sum(ended) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(Sweep([quick(*few, "seeds=[0, 1, 2, 3, 4, 5, 6, 7]")], tmp_path), jobs=0, on_event=stop)
    config = tmp_path / "quickstart" / "config.json"
    assert "seeds 5 -> 8" in text_of(load_preset(config).changes)
    for seeds in ("seeds=[0, 1, 2, 3, 4]", "seeds=[0]"):
        sweep(tmp_path, *few, seeds)
        assert load_preset(config).seeds == (0, 1, 2, 3, 4)
        assert "seeds" not in text_of(load_preset(config).changes)


def test_sweep_is_not_extended_without_all_of_its_trials(tmp_path):
    few = "seeds=[0]", "algorithms=['MimiC']"
    sweep(tmp_path, *few, "rounds=1", "seeds=[0, 1]")
    with pytest.raises(ConfigError, match=r"rounds=2: .* has MimiC, seed 1"):
        sweep(tmp_path, *few, "rounds=2")
    sweep(tmp_path / "other", *few, "rounds=2")
    with pytest.raises(ConfigError, match=r"rounds=1: must be at least 2"):
        sweep(tmp_path / "other", *few, "rounds=1")
    assert {len(lines) for _, lines in records_in(tmp_path / "quickstart").values()} == {1}
