"""``fedcore sweep``."""

from pathlib import Path
from typing import Literal

from rich.console import Console

from fedcore.callbacks import Progress
from fedcore.cli.engine import EngineOptions, found_anywhere
from fedcore.cli.exit_status import exit_on_failures, interruptible
from fedcore.cli.imports import load_all
from fedcore.cli.log import Loggers, both
from fedcore.cli.overrides import given, on_device
from fedcore.cli.report import show_sweep
from fedcore.experiment import Sweep, load_preset, run_sweep
from fedcore.experiment.records import started


def sweep(
    names: list[str],
    scale: Literal["full", "quick"],
    rounds: int | None,
    seeds: str | None,
    changes: list[str],
    out: Path | None,
    jobs: int | None,
    device: str | None,
    server_device: str | None,
    imports: list[str],
    engine: Literal["process", "ray"],
    workers: int | None,
    gpus: float | None,
    address: str | None,
    loggers: list[str],
) -> None:
    """Run several presets at every point of their grids."""
    load_all(imports)
    runner = EngineOptions(engine, workers, gpus, address, jobs).trials()
    overrides = given(changes, rounds, seeds) + on_device(device, server_device)
    folder = out or Path("runs", f"sweep-{scale}")
    experiments = [load_preset(name, overrides, scale=scale) for name in dict.fromkeys(names)]
    chosen = Sweep(experiments, folder)
    console = Console()
    total = sum(job.trial.experiment.rounds for job in chosen.jobs())
    with (
        interruptible(console, lambda: _how_to_go_on(folder)),
        Loggers(loggers, folder, console) as logged,
        Progress(total, console=console) as progress,
    ):
        show = both(progress.event, logged.show)
        failed = run_sweep(chosen, jobs=jobs, imports=found_anywhere(imports), runner=runner, on_event=show)
    show_sweep(console, folder)
    exit_on_failures(console, [(event.job.name, event) for event in failed])


def _how_to_go_on(folder: Path) -> str:
    """The advice after an interruption, by what the folder holds then."""
    if any(map(started, folder.rglob("records/*.jsonl"))):
        return f"the same command goes on, and what is there: fedcore report {folder}"
    return "no round is finished yet: the same command begins again"
