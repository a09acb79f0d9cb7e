"""``fedcore sweep``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedcore.cli.ending import exit_on_failures, interruptible
from fedcore.cli.progress import RunProgress
from fedcore.cli.report import show_sweep
from fedcore.cli.run import Changes, Jobs, Scale, Seeds, given
from fedcore.experiment import Sweep, load_preset, run_sweep


def sweep(
    names: Annotated[list[str], typer.Argument(help="Presets (see `fedcore list`), or .toml files.", metavar="PRESET")],
    scale: Scale = "full",
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    seeds: Seeds = None,
    changes: Changes = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder; by default runs/sweep-SCALE. It may hold a part of the sweep.", metavar="DIR"),
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Run several presets, each at every point of its grid of rates and betas.

    The same command goes on where it was stopped or killed: what is complete is skipped. Other presets, more seeds and
    more points of a grid may be added to a folder later. Of a grid's points the report shows each algorithm's best.

    Examples:

        fedcore sweep mimic/table3-tau20 mimic/table3-tau50 --scale quick

        fedcore sweep flexible/table3-synthetic-niid-t{1,2,3,4} --seeds 5 --out runs/table3

        fedcore sweep momentum/figure5-s10 --set 'grid={"rate.lr"=[0.01, 0.1], "algorithms.beta"=[0.2]}'
    """
    overrides = given(changes, rounds, seeds)
    folder = out or Path("runs", f"sweep-{scale}")
    experiments = [load_preset(name, overrides, scale=scale) for name in dict.fromkeys(names)]
    chosen = Sweep(experiments, folder)
    console = Console()
    total = sum(job.trial.experiment.rounds for job in chosen.jobs())
    go_on = f"the same command goes on, and what is there: fedcore report {folder}"
    with interruptible(console, go_on), RunProgress(console, total) as progress:
        failed = run_sweep(chosen, jobs=jobs, on_event=progress.show)
    show_sweep(console, folder)
    exit_on_failures(console, [(event.job.name, event) for event in failed])
