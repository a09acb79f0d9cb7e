"""What a run says of itself in a log, where there are no bars."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from fedcore.callbacks import Progress
from fedcore.errors import MissingDependencyError
from fedcore.experiment import Event, load_preset
from fedcore.experiment.jobs import Job
from fedcore.experiment.records import RoundRecord
from fedcore.experiment.trial import trials


def line(round, accuracy):
    return RoundRecord(round, [0], 1, 0, accuracy, None, 0.1, 0.1, 5, 1, 1.0, 8, {"local": 18.0, "evaluate": 2.0})


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def jobs():
    experiment = load_preset("quickstart", ["rounds=100", "seeds=[0, 1]"])
    return [Job(trial, Path("runs")) for trial in trials(experiment)]


def told(jobs, steps, *, terminal=False):
    """The lines of a run whose trials take turns, each round at its moment in seconds."""
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=300, force_terminal=terminal)
    with Progress(100 * len(jobs), console=console, clock=clock) as progress:
        for job in jobs:
            progress.event(Event(job))
        for number, (now, accuracy) in enumerate(steps):
            clock.now = now
            progress.event(Event(jobs[number % len(jobs)], round=line(number // len(jobs), accuracy)))
    return out.getvalue().splitlines()


def test_a_line_now_and_then(jobs):
    lines = told(jobs[:2], [(10, None), (29, 0.5), (31, None), (35, None), (59, None), (62, 0.625)])
    assert lines == [
        "3 of 200 rounds, about 0:32:50 left: FedAvg, seed 0: 2; MIFA, seed 0: 1, 50.0 %",
        "6 of 200 rounds, about 0:32:20 left: FedAvg, seed 0: 3; MIFA, seed 0: 3, 62.5 %",
    ]


def test_many_trials_are_counted(jobs):
    (only,) = told(jobs, [(40, 0.1)])
    assert only.endswith("; FedAvg, seed 1: 0; 2 more")


def test_quick_runs_say_nothing_between(jobs):
    assert told(jobs, [(k / 100, 0.5) for k in range(50)]) == []


def test_what_a_run_goes_on_with_tells_how_long_a_round_takes(jobs):
    """Rounds of before come as events too, all at once; what is left will take what they took when they were run."""
    lines = told(jobs[:1], [*((0.1, None) for _ in range(90)), (40, 0.9)])
    assert lines == ["91 of 100 rounds, about 0:03:00 left: FedAvg, seed 0: 91, 90.0 %"]


def test_the_rounds_in_all_are_those_of_the_experiment(jobs):
    out, clock = io.StringIO(), Clock()
    with Progress(console=Console(file=out, width=300), clock=clock) as progress:
        progress.event(Event(jobs[0]))
        clock.now = 40
        progress.event(Event(jobs[0], round=line(0, None)))
    assert out.getvalue().startswith(f"1 of {100 * len(jobs)} rounds, about ")


@pytest.mark.parametrize("has_widgets", [True, False])
def test_in_a_notebook_there_are_bars_or_lines(jobs, monkeypatch, has_widgets):
    shown, made, clock = [], Path if has_widgets else None, Clock()
    monkeypatch.setattr("fedcore.callbacks.progress.find_spec", lambda name: made if name == "ipywidgets" else Path)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: shown.append(text))
    progress = Progress(console=Console(force_jupyter=True, width=300), clock=clock)
    progress.event(Event(jobs[0]))
    clock.now = 40
    progress.event(Event(jobs[0], round=line(0, None)))
    assert any("rounds, about" in text for text in shown) is not has_widgets


def test_without_rich_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("fedcore.callbacks.progress.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fedcore-fl\[sim\]'"):
        Progress()


def test_on_a_terminal_there_are_bars_alone(jobs):
    assert not any("rounds, about" in one for one in told(jobs, [(40, 0.1), (80, 0.1)], terminal=True))


def test_a_label_that_looks_like_richs_signs_is_shown_as_it_is():
    experiment = load_preset("quickstart", ["algorithms=[{name='FedAvg', label='a[/x]'}]"])
    assert any("a[/x]" in one for one in told([Job(trials(experiment)[0], Path("runs"))], [(1, 0.1)], terminal=True))


def test_rounds_of_a_trial_that_failed_are_not_waited_for(jobs):
    out, clock = io.StringIO(), Clock()
    with Progress(200, console=Console(file=out, width=300), clock=clock) as progress:
        for job in jobs[:2]:
            progress.event(Event(job))
            progress.event(Event(job, round=line(0, None)))
        progress.event(Event(jobs[0], over=True, error="made up"))
        clock.now = 40
        progress.event(Event(jobs[1], round=line(1, None)))
    assert "3 of 200 rounds, about 0:32:40 left: MIFA, seed 0: 2" in out.getvalue()  # 98 rounds of 20 s, one at a time


def test_the_bars_say_what_is_left_of_long_rounds(jobs):
    """One is done beside those that were there, more than a minute later: 20 s each, by the records."""
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=300, force_terminal=True, color_system=None)
    with Progress(200, console=console, clock=clock) as progress:
        progress.event(Event(jobs[0]))
        progress.event(Event(jobs[1]))
        for number in range(70):
            progress.event(Event(jobs[0], round=line(number, None)))
        clock.now = 90
        progress.event(Event(jobs[0], round=line(70, None)))
        progress._progress.refresh()
    assert re.search(r"all trials.* 71/200 0:21:30", out.getvalue())  # 129 rounds of 20 s, two at a time
    assert re.search(r"FedAvg, seed 0.* 71/100 0:09:40", out.getvalue())
    assert re.search(r"MIFA, seed 0.* 0/100 +-:--:--", out.getvalue())
