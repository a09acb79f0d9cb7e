"""``fedcore run``: a run, or a sweep over presets and grids."""

import json
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcore.cli import terminal
from fedcore.cli.report import show_run, show_sweep
from fedcore.cli.terminal import Options, Parser
from fedcore.errors import ConfigError
from fedcore.profiling import profile
from fedcore.validation import ADDED, absolute, expand_home

if TYPE_CHECKING:
    from rich.console import Console

    from fedcore.sim.experiment import Event, Experiment

TRACE = "trace.json"
WORKERS = 2
"""The default number of workers on Ray."""
MOST_SEEDS = 1_000_000


def add_arguments(top: Parser) -> None:
    """Add the command."""
    parser = top.add_command("run", run, needs=terminal.SIMULATOR)
    add = parser.add_argument
    add("presets", nargs="+", metavar="PRESET", help="presets (see `fedcore list presets`), or .toml or .json files")
    add("--seeds", metavar="SEEDS", help="a count (3: seeds 0,1,2) or a list (0,4,7; only seed 4: 4,)")
    add("--sweep", action="store_true", help="run a sweep even for one preset without a grid")
    add("--best", action="store_true", help="run each method with its best settings; PRESET is the folder of a sweep")
    add("--resume", action="store_true", help="resume or extend a run; PRESET is its folder")
    add_shared(parser, "runs/PRESET-DATE-TIME or runs/sweep-SCALE")


def add_shared(parser: Parser, folder: str) -> None:
    """Add the options of commands that run experiments; ``folder`` is the default output folder."""
    add = parser.add_argument
    add("--scale", choices=("full", "quick"), default="full", help="size of the experiment (default: full)")
    add("--rounds", type=terminal.whole_number(1), metavar="N", help="number of rounds")
    terminal.add_changes(parser)
    add("--out", type=expand_home, metavar="DIR", help=f"output folder (default: {folder})")
    add("--backend", choices=("local", "ray"), default="local", help="execution backend; results do not depend on it")
    add("--workers", type=terminal.whole_number(0), metavar="N", help="processes (default: cores), or Ray workers (2)")
    add("--ray-address", metavar="ADDRESS", help="running Ray cluster: auto or HOST:PORT (default: start Ray)")
    add("--gpus-per-worker", type=terminal.share, metavar="SHARE", help="GPUs per Ray worker; 0.25: four share one")
    add("--device", metavar="NAME", help="device for client training: cpu, cuda, cuda:1, ...")
    add("--server-device", metavar="NAME", help="device for the server's vectors: cpu, cuda, ...")
    about = "log rounds to tensorboard[=DIR], mlflow[=ADDRESS] or wandb[=PROJECT]; repeatable"
    add("--log", dest="loggers", action="append", default=[], metavar="KIND[=WHERE]", help=about)
    add("--profile", action="store_true", help="print the time of each phase, and write DIR/trace.json")
    terminal.add_imports(parser)


def run(options: Options) -> None:
    """Run an experiment, or a sweep over several presets or a grid.

    A run trains every algorithm with every seed, with the same clients in the same rounds.
    Its folder has a table, plots, the records of all rounds and the configuration.

    Several presets, a grid, or --sweep make a sweep: each preset at each point of its grid,
    in one folder. The same command resumes a sweep and skips complete trials. Presets,
    seeds, algorithms, rounds and points can be added.
    --best runs the methods of a sweep again, each with the settings of its best point.
    --resume resumes a run. --rounds and --seeds are then the new totals, and
    --set 'algorithms=[...]' adds algorithms; nothing else can change.

    With --backend ray, the workers share the clients of a run or the trials of a sweep.
    Use --ray-address on a trusted network only.

    Examples:
      fedcore run quickstart
      fedcore run mimic/table3-tau20 --scale quick --device cuda
      fedcore run quickstart --set rate.lr=0.1 --set 'participation={name="Bernoulli", p=0.2}'
      fedcore run quickstart --set 'algorithms=["MimiC", {name="MIFA", wait=false}]'
      fedcore run quickstart --set 'algorithms=["MimiC", "mine.methods:FedACG"]' --log tensorboard
      fedcore run runs/quickstart-20260101-120000 --resume --rounds 200 --seeds 10
      fedcore run mimic/table3-tau20 --backend ray --workers 8

      fedcore run flexible/table3-synthetic-niid-t{1,2,3,4} --seeds 5 --out runs/table3
      fedcore run momentum/figure5-s10 --set 'grid={"rate.lr"=[0.01, 0.1]}'
      fedcore run mimic/table3-tau20 --sweep --backend ray --workers 64 --ray-address auto

      fedcore run quickstart --seeds 3 --set 'grid={"rate.lr"=[0.05, 0.1, 0.2]}' --out runs/rates
      fedcore run runs/rates --best --seeds 10 --out runs/final
    """
    from fedcore.sim.experiment import load_preset
    from fedcore.sim.experiment.config import with_overrides
    from fedcore.sim.experiment.results import CONFIG
    from fedcore.sim.experiment.runner import default_folder, with_additions

    terminal.load_imports(options.imports)
    require_backend(options)
    _check(options)
    seeds = None if options.seeds is None else parse_seeds(options.seeds)
    overrides = overrides_of(options) + ([] if seeds is None else [f"seeds={json.dumps(seeds)}"])
    names = list(dict.fromkeys(options.presets))
    if options.resume:
        folder = Path(names[0])
        experiments = [with_additions(folder, load_preset(str(folder / CONFIG), overrides, scale=options.scale))]
    elif options.best:
        from fedcore.sim.reports import tuned

        experiments = [with_overrides(one, overrides) for name in names for one in tuned(expand_home(name))]
    else:
        experiments = [load_preset(name, overrides, scale=options.scale) for name in names]
    sweep = not options.resume and (options.sweep or len(experiments) > 1 or any(experiments[0].grid.values()))
    name = f"sweep-{'best' if options.best else options.scale}"
    if not options.resume:
        folder = options.out or (Path("runs", name) if sweep else default_folder(experiments[0]))
    if failed := train(options, experiments, folder, sweep=sweep):
        sys.exit(failed)


def train(options: Options, experiments: "Sequence[Experiment]", folder: Path, *, sweep: bool) -> int:
    """Run or resume trials, and show the report; return the exit status."""
    from rich.console import Console

    from fedcore.callbacks import Progress
    from fedcore.cli.log import Loggers
    from fedcore.sim.experiment import Sweep, run_experiment, run_sweep
    from fedcore.sim.experiment.schema import trials

    console, chosen = Console(), Sweep(experiments, folder)
    work = [job.trial for job in chosen.jobs()] if sweep else trials(experiments[0])
    total = sum(trial.experiment.rounds for trial in work)
    traced = profile() if options.profile else None
    advice = _sweep_advice if sweep else partial(_run_advice, options.imports)
    with (
        _backend(options, sweep) as backend,
        interruptible(console, lambda: advice(folder)),
        Loggers(options.loggers, folder, console) as logged,
        Progress(total, console=console) as progress,
        traced or nullcontext(),
    ):

        def on_event(event: "Event") -> None:
            progress.event(event)
            logged.show(event)

        shared = backend | {"imports": absolute_imports(options.imports), "on_event": on_event}
        if sweep:
            failed = run_sweep(chosen, **shared)
        else:
            failed = run_experiment(experiments[0], folder, resume=options.resume, **shared)
    (show_sweep if sweep else show_run)(console, folder)
    if traced is not None:
        traced.save(folder / TRACE)
        terminal.print_plain(console, [traced.table(), f"wrote {folder / TRACE}"])
    for event in failed:
        name = event.job.name if sweep else event.trial.name
        console.print(f"{name}: failed: {event.error}", style="red", markup=False, soft_wrap=True)
    return terminal.FAILED if failed else 0


def require_backend(options: Options) -> None:
    """Raise ConfigError for options that do not fit the backend."""
    of_ray = {"--ray-address": options.ray_address, "--gpus-per-worker": options.gpus_per_worker}
    if options.backend != "ray" and (conflicts := [name for name, value in of_ray.items() if value is not None]):
        raise ConfigError(f"{conflicts[0]}: needs --backend ray")
    if options.backend == "ray" and options.workers == 0:
        raise ConfigError("--workers 0: must be at least 1 on Ray")


def _check(options: Options) -> None:
    """Raise ConfigError for conflicting options, and for a run's folder without ``--resume``."""
    from fedcore.sim.experiment import config
    from fedcore.sim.experiment.results import CONFIG

    if options.best and (options.resume or options.scale != "full"):
        raise ConfigError("--best: does not work with --resume and --scale; remove them")
    first = options.presets[0]
    is_run = Path(first, CONFIG).is_file()
    if options.resume:
        conflicts = [name for name in ("out", "sweep") if getattr(options, name)]
        conflicts += ["scale"] if options.scale != "full" else []
        if conflicts or len(options.presets) > 1:
            named = f"--{conflicts[0]}" if conflicts else "several PRESETs"
            raise ConfigError(
                f"--resume: does not work with {named}, since a run resumes in its own folder; remove it "
                "(--rounds, --seeds and --set 'algorithms=[...]' may extend the run)"
            )
        if not is_run:
            raise ConfigError(f"{first}: not the folder of a run; {CONFIG} is missing")
    elif is_run and first not in config.names():
        raise ConfigError(
            f"{first}: this is the folder of a run; resume it with --resume, or show it with `fedcore report {first}`"
        )


def overrides_of(options: Options) -> list[str]:
    """Return the changes of the configuration by ``--set``, ``--rounds``, ``--device`` and ``--server-device``."""
    values = {key: getattr(options, key) for key in ("rounds", "device", "server_device")}
    return [*options.changes, *(f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None)]


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of ``--seeds``: ``"3"`` means 0, 1 and 2, ``"0,4"`` means 0 and 4."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--seeds {text!r}: must be a count, or numbers separated by commas") from None
    if "," in text:
        return numbers
    if not numbers or numbers[0] < 1:
        raise ConfigError(f"--seeds {text!r}: the count must be at least 1; for seed 0 write '0,'")
    if numbers[0] > MOST_SEEDS:
        raise ConfigError(f"--seeds {text!r}: the count must be at most {MOST_SEEDS}; for seed {text} write '{text},'")
    return list(range(numbers[0]))


@contextmanager
def _backend(options: Options, sweep: bool) -> Iterator[dict[str, Any]]:
    """Yield the arguments of the backend. Ray's workers train the clients of a run or run the trials of a sweep."""
    if options.backend == "local":
        yield {"jobs": options.workers}
        return
    from fedcore.cluster.workers import Session
    from fedcore.sim.experiment.executor import RayTrials
    from fedcore.sim.ray_engine import Ray

    count, gpus, address = options.workers or WORKERS, options.gpus_per_worker or 0.0, options.ray_address
    if sweep:
        yield {"runner": RayTrials(count, gpus, address)}
        return
    imports = absolute_imports(options.imports)
    with Session(address, cpus=count):
        yield {"make_engine": partial(Ray, workers=count, gpus=gpus, address=address, imports=imports)}


def absolute_imports(imports: Sequence[str]) -> list[str]:
    """Return the imports with absolute paths, since workers may have a different working folder."""
    folders = [f"{folder}/" for folder in ADDED]
    modules = [name for name in imports if not name.endswith("/")]
    return folders + [str(absolute(name).resolve()) if name.endswith(".py") else name for name in modules]


def import_flags(imports: Sequence[str]) -> list[str]:
    """Return the ``--import`` options for the modules that this process imported."""
    folders = [f"{folder}/" for folder in ADDED if folder != str(Path().resolve())]
    names = [*(name for name in imports if not name.endswith("/")), *folders]
    return [word for name in names for word in ("--import", name)]


@contextmanager
def interruptible(console: "Console", advice: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C or SIGTERM (the time limit of a scheduler), print how to resume, and exit with ``INTERRUPTED``."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if in_main else None
    try:
        yield
    except KeyboardInterrupt:
        terminal.print_plain(console, [f"interrupted; {advice()}"], "yellow")
        sys.exit(terminal.INTERRUPTED)
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


def _run_advice(imports: Sequence[str], folder: Path) -> str:
    from fedcore.sim.experiment.results import CONFIG, started

    if not (folder / CONFIG).is_file():
        return "nothing was written yet; run the same command again"
    resume = shlex.join(["fedcore", "run", str(folder), "--resume", *import_flags(imports)])
    if not any(map(started, (folder / "records").glob("*.jsonl"))):
        return f"no round is finished yet; resume: {resume}"
    return f"the finished rounds are in {folder / 'records'}: fedcore report {folder}, or resume: {resume}"


def _sweep_advice(folder: Path) -> str:
    from fedcore.sim.experiment.results import started

    if any(map(started, folder.rglob("records/*.jsonl"))):
        return f"the same command resumes the sweep; to see the results so far: fedcore report {folder}"
    return "no round is finished yet; run the same command again"
