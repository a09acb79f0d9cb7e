"""``fedcore run``, ``fedcore tune`` and ``fedcore report``: runs and sweeps, tuned rates, tables and plots."""

import json
import shlex
import signal
import sys
import threading
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser, print_plain
from fedcore.errors import ConfigError, UnknownNameError
from fedcore.profiling import profile
from fedcore.validation import ADDED, absolute, expand_home

if TYPE_CHECKING:
    from rich.console import Console

    from fedcore.sim.experiment import Event, Experiment
    from fedcore.sim.reports import Report

TRACE = "trace.json"
WORKERS = 2
"""The default number of workers on Ray."""
MOST_SEEDS = 1_000_000
RATES = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
"""The rates to try for an experiment without a grid."""
TUNABLE = ("rate", "local", "algorithms")
"""The tables whose keys a grid may have: options of methods."""


def add_arguments(top: Parser) -> None:
    """Add the commands."""
    parser = top.add_command("run", run, needs=terminal.SIMULATOR)
    add = parser.add_argument
    add("presets", nargs="+", metavar="PRESET", help="presets (see `fedcore list presets`), or .toml or .json files")
    add("--seeds", metavar="SEEDS", help="a count (3: seeds 0,1,2) or a list (0,4,7; only seed 4: 4,)")
    add("--sweep", action="store_true", help="run a sweep even for one preset without a grid")
    add("--best", action="store_true", help="run each method with its best settings; PRESET is the folder of a sweep")
    add("--resume", action="store_true", help="resume or extend a run; PRESET is its folder")
    _add_shared(parser, "runs/PRESET-DATE-TIME or runs/sweep-SCALE")
    parser = top.add_command("tune", tune, needs=terminal.SIMULATOR)
    add = parser.add_argument
    add("preset", metavar="PRESET", help="a preset (see `fedcore list presets`), or a .toml or .json file")
    add("--rates", type=terminal.numbers, metavar="R,R,...", help="rates to try (default: the grid, or 0.003 to 1)")
    add("--only", action="append", default=[], metavar="LABEL", help="tune only this method; repeatable")
    add("--seeds", type=terminal.whole_number(1), default=3, metavar="N", help="number of tuning seeds (default: 3)")
    add("--validation", type=terminal.amount, default=0.1, metavar="SHARE", help="share of held-out examples (0.1)")
    _add_shared(parser, "runs/tune-PRESET")
    parser = top.add_command("report", report, needs=terminal.SIMULATOR)
    add = parser.add_argument
    add("folder", type=expand_home, metavar="DIR", help="the folder of a run or sweep, complete or not")
    add("--format", type=_formats, metavar="FORMATS", help="write the plots also as pdf, svg or pdf,svg")
    add("--band", choices=("range", "se", "95%"), help="band of curves: seeds' range, standard error, 95 %% interval")
    add("--smooth", type=terminal.whole_number(1), metavar="N", help="smooth curves over N evaluated rounds")


def _add_shared(parser: Parser, folder: str) -> None:
    """Add the options of commands that run experiments; ``folder`` is the default output folder."""
    add = parser.add_argument
    add("--scale", choices=("full", "quick"), default="full", help="size of the experiment (default: full)")
    add("--rounds", type=terminal.whole_number(1), metavar="N", help="number of rounds")
    terminal.add_changes(parser)
    add("--out", type=expand_home, metavar="DIR", help=f"output folder (default: {folder})")
    add("--backend", choices=("local", "ray"), default="local", help="execution backend; results do not depend on it")
    add("--workers", type=terminal.whole_number(0), metavar="N", help="processes (default: cores), or Ray workers (2)")
    add("--ray-address", metavar="ADDRESS", help="running Ray cluster: auto or HOST:PORT (default: start Ray)")
    add("--gpus-per-worker", type=terminal.amount, metavar="SHARE", help="GPUs per Ray worker; 0.25: four share one")
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
    _require_backend(options)
    _check(options)
    seeds = None if options.seeds is None else parse_seeds(options.seeds)
    overrides = _overrides_of(options) + ([] if seeds is None else [f"seeds={json.dumps(seeds)}"])
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
    if failed := _train(options, experiments, folder, sweep=sweep):
        sys.exit(failed)


def _train(options: Options, experiments: "Sequence[Experiment]", folder: Path, *, sweep: bool) -> int:
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
    with (
        _backend(options, sweep) as backend,
        interruptible(console, lambda: _advice(options.imports, sweep, folder)),
        Loggers(options.loggers, folder, console) as logged,
        Progress(total, console=console) as progress,
        traced or nullcontext(),
    ):

        def on_event(event: "Event") -> None:
            progress.event(event)
            logged.show(event)

        shared = backend | {"imports": _absolute_imports(options.imports), "on_event": on_event}
        if sweep:
            failed = run_sweep(chosen, **shared)
        else:
            failed = run_experiment(experiments[0], folder, resume=options.resume, **shared)
    (_show_sweep if sweep else _show_run)(console, folder)
    if traced is not None:
        traced.save(folder / TRACE)
        print_plain(console, [traced.table(), f"wrote {folder / TRACE}"])
    for event in failed:
        name = event.job.name if sweep else event.trial.name
        console.print(f"{name}: failed: {event.error}", style="red", markup=False, soft_wrap=True)
    return terminal.FAILED if failed else 0


def _require_backend(options: Options) -> None:
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
            f"{first}: this is the folder of a run; add --resume, or see `{shlex.join(['fedcore', 'report', first])}`"
        )


def _overrides_of(options: Options) -> list[str]:
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
    imports = _absolute_imports(options.imports)
    with Session(address, cpus=count):
        yield {"make_engine": partial(Ray, workers=count, gpus=gpus, address=address, imports=imports)}


def _absolute_imports(imports: Sequence[str]) -> list[str]:
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
        print_plain(console, [f"interrupted; {advice()}"], "yellow")
        sys.exit(terminal.INTERRUPTED)
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


def _advice(imports: Sequence[str], sweep: bool, folder: Path) -> str:
    """Return how to continue an interrupted run or sweep."""
    from fedcore.sim.experiment.results import CONFIG, RECORDS, started

    again, own = "run the same command again", str(folder)
    if not sweep:
        if not (folder / CONFIG).is_file():
            return f"nothing was written yet; {again}"
        again = f"resume: {shlex.join(['fedcore', 'run', own, '--resume', *import_flags(imports)])}"
    if not any(map(started, folder.rglob(f"{RECORDS}/*.jsonl"))):
        return f"no round is finished yet; {again}"
    return f"the finished rounds are in {folder}: {shlex.join(['fedcore', 'report', own])}, or {again}"


def tune(options: Options) -> None:
    """Tune the rate of each method on validation data, and print the settings.

    Each method runs at each of these rates, with the same rounds and seeds. The
    seeds follow those of the experiment. Models are evaluated on training examples that are
    held out, not on the test set. The best rate has the highest mean accuracy over the last
    rounds (report.window) and the seeds. Put the printed lines into the experiment's file;
    its report then says how the methods were tuned.

    The same command resumes. A method or a rate that you add later is run beside the others.
    The [grid] of a file may have other options of methods, such as rate.server_lr, local.clip
    or algorithms.beta. `fedcore run DIR --best --seeds 5` runs each method at its best point.

    Examples:
      fedcore tune quickstart --rates 0.05,0.1,0.2,0.4
      fedcore tune mine.toml --only "My method" --seeds 5 --out runs/tune-mine
      fedcore tune quickstart --set 'grid={"rate.lr"=[0.1, 0.2], "algorithms.beta"=[0.5, 0.9]}'
    """
    from rich.console import Console

    from fedcore.sim.experiment import load_preset
    from fedcore.sim.experiment.changes import NO_RESULT, differences
    from fedcore.sim.reports import tried, tuned
    from fedcore.sim.reports.report import Bold, terminal_table

    terminal.load_imports(options.imports)
    _require_backend(options)
    experiment = load_preset(options.preset, _overrides_of(options), scale=options.scale)
    tuning = _tuning(experiment, options)
    folder = options.out or Path("runs", f"tune-{experiment.name.replace('/', '-')}")
    status = _train(options, [tuning], folder, sweep=True)
    table, console = tried(folder, tuning.name), Console()
    console.print(terminal_table(table, [isinstance(cell, Bold) for cell in table[table.columns[2]]]))
    (found,) = (one.tables() for one in tuned(folder) if one.name == tuning.name)
    plain = load_preset(options.preset).tables()
    keys = *(change.key for change in differences(plain, experiment.tables())), *tuning.grid
    changed = {key.partition(".")[0] for key in keys}
    changed -= {*NO_RESULT, "algorithms", "grid", "seeds", "validation", "report"}
    lines = [f"{key} = {_toml(found[key])}" for key in ("note", *sorted(changed & found.keys()))]
    unset: Any = ("warm_start", False), ("rate", {}), ("local", {})
    methods = (dict(pair for pair in method.items() if pair not in unset) for method in found["algorithms"])
    print_plain(console, [*lines, "algorithms = [", *(f"    {_toml(method)}," for method in methods), "]"])
    sys.exit(status)


def _tuning(experiment: "Experiment", options: Options) -> "Experiment":
    """Return the sweep of an experiment: other seeds, the grid, and its methods without own values of the grid."""
    from fedcore.sim.experiment.config import with_overrides
    from fedcore.sim.experiment.schema import Method

    if not 0 < options.validation < 1:
        raise ConfigError(f"--validation {options.validation:g}: must be a share between 0 and 1, such as 0.1")
    if options.rates and (min(options.rates) <= 0 or len({*options.rates}) < len(options.rates)):
        raise ConfigError("--rates: must be different numbers above 0")
    grid = {"rate.lr": options.rates} if options.rates else dict(experiment.grid) or {"rate.lr": RATES}
    if other := [key for key in grid if key.partition(".")[0] not in TUNABLE]:
        raise ConfigError(f"grid: {other[0]}: is no option of a method; `fedcore run` sweeps over any key")
    methods = {method["label"]: method for method in experiment.tables()["algorithms"]}
    if unknown := [label for label in options.only if label not in methods]:
        raise UnknownNameError.of("--only", unknown[0], methods)
    for label, method in methods.items():
        if Method.model_validate({key: own for key, own in method.items() if key != "label"}).label == label:
            del method["label"]  # it may contain the rate
        for table, _, key in (key.partition(".") for key in grid):
            method.get(table, {}).pop(key, None)
    first = max(experiment.seeds) + 1
    values = {"algorithms": [methods[label] for label in options.only or methods], "grid": grid, "note": None}
    values |= {"seeds": [*range(first, first + options.seeds)], "validation": options.validation}
    return with_overrides(experiment, values)


def _toml(value: Any) -> str:
    """Return a value of a configuration as TOML."""
    from fedcore.sim.experiment.changes import number_of

    value = number_of(value)
    if isinstance(value, Mapping):
        value = {key: own for key, own in value.items() if own is not None}
        keys = [key if key.isascii() and key.isidentifier() else json.dumps(key) for key in value]
        return f"{{ {', '.join(f'{key} = {_toml(own)}' for key, own in zip(keys, value.values(), strict=True))} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _formats(text: str) -> tuple[str, ...]:
    """Parse ``--format``."""
    formats = tuple(dict.fromkeys(filter(None, text.split(","))))
    if not formats or set(formats) - {"pdf", "svg"}:
        raise ArgumentTypeError(f"{text!r}: must be pdf, svg or pdf,svg")
    return formats


def report(options: Options) -> None:
    """Regenerate tables, plots and the HTML report of a run or sweep.

    The report of a sweep shows each algorithm at its best complete point. This is the point
    with the highest accuracy (mean over the last rounds, then over seeds). A trial's result
    is the mean over its last 10 rounds (report.window), as far as they were evaluated.
    --format, --band and --smooth override the table report of the configuration.

    Examples:
      fedcore report runs/quickstart-20260101-120000
      fedcore report runs/sweep-quick
      fedcore report runs/mine --format pdf --band 95% --smooth 5
    """
    from rich.console import Console

    from fedcore.sim.reports import is_sweep

    show = _show_sweep if is_sweep(options.folder) else _show_run
    settings = {"formats": options.format, "band": options.band, "smooth": options.smooth}
    show(Console(), options.folder, **{key: value for key, value in settings.items() if value is not None})


def _show_run(console: "Console", folder: Path, **settings: Any) -> None:
    """Write a run's report, and print its tables and files."""
    from fedcore.sim.reports import write_report
    from fedcore.sim.reports.statistics import legend

    written = write_report(folder, **settings)
    _print(console, written, legend(written.summary))
    print_plain(console, (f"wrote {file}" for file in written.files))


def _show_sweep(console: "Console", folder: Path, **settings: Any) -> None:
    """Write a sweep's reports, and print their tables and files."""
    from fedcore.sim.reports import write_overview
    from fedcore.sim.reports.statistics import legend
    from fedcore.sim.reports.sweeps import size

    written = write_overview(folder, **settings)
    for name, report in written.reports.items():
        print_plain(console, [f"{name}, {size(report)}"], "dim")
        _print(console, report)
        print_plain(console, [f"wrote {report.page}"])
    print_plain(console, [legend(*(report.summary for report in written.reports.values()))], "dim", soft_wrap=False)
    print_plain(console, (f"note: {note}" for note in written.notes), "yellow")
    print_plain(console, (f"wrote {file}" for file in written.files))


def _print(console: "Console", report: "Report", legend: str = "") -> None:
    from fedcore.sim.reports.report import summary_for_terminal, terminal_table

    summary, paper = report.summary, report.paper
    print_plain(console, [summary.title], "bold", soft_wrap=False)
    print_plain(console, [f"changed: {summary.changed}"] if summary.changed else [], "yellow", soft_wrap=False)
    print_plain(console, [summary.inherited] if summary.inherited else [], "dim", soft_wrap=False)
    if legend or not report.has_accuracies:
        console.print(summary_for_terminal(summary))
    print_plain(console, [legend] if legend else [], "dim", soft_wrap=False)
    if paper:
        if paper.lines:
            console.print(terminal_table(paper.table(), right=False))
        print_plain(console, [paper.remark()], "bold yellow" if paper.is_warning else "dim italic", soft_wrap=False)
    print_plain(console, (f"note: {note}" for note in summary.notes), "yellow", soft_wrap=False)
