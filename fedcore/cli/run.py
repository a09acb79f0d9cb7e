"""``fedcore run``."""

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from rich.console import Console

from fedcore.callbacks import Progress
from fedcore.cli.engine import EngineOptions
from fedcore.cli.exit_status import exit_on_failures, interruptible
from fedcore.cli.imports import flags, load_all
from fedcore.cli.log import Loggers, both
from fedcore.cli.overrides import given, on_device
from fedcore.cli.report import show_report
from fedcore.errors import ConfigError
from fedcore.experiment import load_preset, presets, run_experiment
from fedcore.experiment.additions import gone_on_with
from fedcore.experiment.records import started
from fedcore.experiment.run_folder import CONFIG, default_folder
from fedcore.experiment.trial import trials
from fedcore.tracing import trace

TRACE = "trace.json"
TOGETHER = {"yes": "true", "no": "false", "vmap": '"vmap"'}


def run(
    preset: str,
    rounds: int | None,
    seeds: str | None,
    changes: list[str],
    scale: Literal["full", "quick"],
    out: Path | None,
    resume: bool,
    jobs: int | None,
    threads: int | None,
    together: Literal["yes", "no", "vmap"] | None,
    device: str | None,
    server_device: str | None,
    imports: list[str],
    profile: bool,
    engine: Literal["process", "ray"],
    workers: int | None,
    gpus: float | None,
    address: str | None,
    loggers: list[str],
) -> None:
    """Run an experiment."""
    load_all(imports)
    engines = EngineOptions(engine, workers, gpus, address, jobs)
    overrides = given(changes, rounds, seeds)
    overrides += [f"threads={threads}"] if threads is not None else []
    overrides += [f"together={TOGETHER[together]}"] if together is not None else []
    overrides += on_device(device, server_device)
    if resume and (out or scale != "full"):
        named = "--out" if out else "--scale"
        raise ConfigError(
            f"--resume: expected no {named}, since a run goes on in its folder as it was begun, got one: leave it out "
            "(--rounds, --seeds and --set 'algorithms=[...]' may add to it)"
        )
    _require_run_or_preset(preset, resume)
    experiment = load_preset(str(Path(preset, CONFIG)) if resume else preset, overrides, scale=scale)
    folder = Path(preset) if resume else out or default_folder(experiment)
    experiment = gone_on_with(folder, experiment) if resume else experiment
    console = Console()
    total = experiment.rounds * len(trials(experiment))
    traced = trace() if profile else None
    with (
        engines.clients(imports) as make_engine,
        interruptible(console, lambda: _how_to_go_on(folder, imports)),
        Loggers(loggers, folder, console) as logged,
        Progress(total, console=console) as progress,
        traced or nullcontext(),
    ):
        failed = run_experiment(
            experiment,
            folder,
            resume=resume,
            jobs=jobs,
            imports=imports,
            make_engine=make_engine,
            on_event=both(progress.event, logged.show),
        )
    show_report(console, folder)
    if traced is not None:
        traced.save(folder / TRACE)
        console.print(traced.table(), markup=False, highlight=False, soft_wrap=True)
        console.print(f"wrote {folder / TRACE}", markup=False, highlight=False, soft_wrap=True)
    exit_on_failures(console, [(event.trial.name, event) for event in failed])


def _how_to_go_on(folder: Path, imports: list[str]) -> str:
    """The advice after an interruption, by what the folder holds then."""
    if not (folder / CONFIG).is_file():
        return "nothing was written yet: the same command begins again"
    go_on = shlex.join(["fedcore", "run", str(folder), "--resume", *flags(imports)])
    if not any(map(started, (folder / "records").glob("*.jsonl"))):
        return f"no round is finished yet; go on: {go_on}"
    return f"the finished rounds are in {folder / 'records'}: fedcore report {folder}, or go on: {go_on}"


def _require_run_or_preset(preset: str, resume: bool) -> None:
    """Refuse a folder that is no run's with ``--resume``, and one that is without."""
    is_run = Path(preset, CONFIG).is_file()
    if resume and not is_run:
        raise ConfigError(f"{preset}: expected the folder of a run, with {CONFIG} in it, found none: name the folder")
    if not resume and is_run and preset not in presets.names():
        raise ConfigError(f"{preset}: it is a run's folder: --resume goes on, `fedcore report {preset}` shows it")
