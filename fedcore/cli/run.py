"""``fedcore run``."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from fedcore.cli.ending import exit_on_failures, interruptible
from fedcore.cli.progress import RunProgress
from fedcore.cli.report import show_report
from fedcore.errors import ConfigError
from fedcore.experiment import load_preset, run_experiment
from fedcore.experiment.folder import CONFIG, default_folder
from fedcore.experiment.trial import trials

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the configuration; may be repeated."),
]
Scale = Annotated[
    Literal["full", "quick"],
    typer.Option(help="`quick` is the preset's small size, for two cores."),
]
Seeds = Annotated[
    str | None, typer.Option(help="A count (`3` is 0,1,2), or a list (`0,4,7`; `4,` is the seed 4 alone).")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; by default as many as there are cores.")]


def run(
    preset: Annotated[str, typer.Argument(help="A preset (see `fedcore list`), or a .toml or .json file.")],
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    seeds: Seeds = None,
    changes: Changes = None,
    scale: Scale = "full",
    out: Annotated[
        Path | None,
        typer.Option(help="A new or empty folder; by default runs/PRESET-DATE-TIME.", metavar="DIR"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a stopped run: PRESET is its folder, and nothing is changed.")
    ] = False,
    jobs: Jobs = None,
    threads: Annotated[int | None, typer.Option(help="Threads of fedcore's kernels in each process.")] = None,
) -> None:
    """Run an experiment: every algorithm with every seed, on the same clients in the same rounds.

    Shows a table of accuracies and writes it, the curves, the records and the configuration to a folder.

    Examples:

        fedcore run quickstart

        fedcore run mimic/table3-tau20 --scale quick

        fedcore run quickstart --set rate.lr=0.1 --set 'participation={name="Bernoulli", p=0.2}'

        fedcore run quickstart --set 'algorithms=["MimiC", {name="MIFA", wait=false}]'

        fedcore run runs/quickstart-20260101-120000/config.json --out again

        fedcore run runs/quickstart-20260101-120000 --resume
    """
    overrides = given(changes, rounds, seeds)
    overrides += [f"threads={threads}"] if threads is not None else []
    if resume and (overrides or out or scale != "full"):
        raise ConfigError("--resume: expected the run's folder alone, since a run goes on as it was begun")
    experiment = load_preset(str(Path(preset, CONFIG)) if resume else preset, overrides, scale=scale)
    folder = Path(preset) if resume else out or default_folder(experiment)
    console = Console()
    total = experiment.rounds * len(trials(experiment))
    there = f"the finished rounds are in {folder / 'records'}: fedcore report {folder}"
    go_on = f"{there}, or go on: fedcore run {folder} --resume"
    with interruptible(console, go_on), RunProgress(console, total) as progress:
        failed = run_experiment(experiment, folder, resume=resume, jobs=jobs, on_event=progress.show)
    show_report(console, folder)
    exit_on_failures(console, [(event.trial.name, event) for event in failed])


def given(changes: list[str] | None, rounds: int | None, seeds: str | None) -> list[str]:
    """What the command line changes in a preset, as overrides."""
    overrides = list(changes or ())
    overrides += [f"rounds={rounds}"] if rounds is not None else []
    return overrides + ([f"seeds={_seeds(seeds)}"] if seeds is not None else [])


def _seeds(text: str) -> list[int]:
    """``"3"`` is the first three seeds, ``"0,4"`` these two."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--seeds: expected a count or numbers with commas between them, got {text!r}") from None
    return numbers if "," in text else list(range(numbers[0]))
