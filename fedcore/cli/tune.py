"""``fedcore tune``: the rates of methods, tuned on validation data."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcore.cli import terminal
from fedcore.cli.run import add_shared, overrides_of, require_backend, train
from fedcore.cli.terminal import Options, Parser
from fedcore.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from fedcore.sim.experiment import Experiment

RATES = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
"""The rates to try for an experiment without a grid."""
TUNABLE = ("rate", "local", "algorithms")
"""The tables whose keys a grid may have: options of methods."""


def add_arguments(top: Parser) -> None:
    """Add the command."""
    parser = top.add_command("tune", run, needs=terminal.SIMULATOR)
    add = parser.add_argument
    add("preset", metavar="PRESET", help="a preset (see `fedcore list presets`), or a .toml or .json file")
    add("--rates", type=terminal.numbers, metavar="R,R,...", help="rates to try (default: the grid, or 0.003 to 1)")
    add("--only", action="append", default=[], metavar="LABEL", help="tune only this method; repeatable")
    add("--seeds", type=terminal.whole_number(1), default=3, metavar="N", help="number of tuning seeds (default: 3)")
    add("--validation", type=terminal.share, default=0.1, metavar="SHARE", help="share of held-out examples (0.1)")
    add_shared(parser, "runs/tune-PRESET")


def run(options: Options) -> None:
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
    require_backend(options)
    experiment = load_preset(options.preset, overrides_of(options), scale=options.scale)
    tuning = _tuning(experiment, options)
    folder = options.out or Path("runs", f"tune-{experiment.name.replace('/', '-')}")
    status = train(options, [tuning], folder, sweep=True)
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
    terminal.print_plain(console, [*lines, "algorithms = [", *(f"    {_toml(method)}," for method in methods), "]"])
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
