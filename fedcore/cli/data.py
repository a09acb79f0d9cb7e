"""``fedcore show-data``: each client's examples in an experiment."""

from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser
from fedcore.errors import ConfigError
from fedcore.validation import expand_home

LINES = 40
"""The maximum number of clients in the table without ``--all``."""


def add_arguments(top: Parser) -> None:
    """Add the command."""
    parser = top.add_command("show-data", run, needs=terminal.SIMULATOR)
    parser.add_argument("preset", metavar="PRESET", help="a preset (see `fedcore list presets`) or a file")
    parser.add_argument("--out", type=expand_home, metavar="PNG", help="write a plot of clients x classes to this file")
    parser.add_argument("--seed", type=terminal.whole_number(0), metavar="N", help="seed (default: the preset's first)")
    parser.add_argument("--all", action="store_true", help=f"show all clients, not only the first {LINES}")
    terminal.add_changes(parser)
    terminal.add_imports(parser)
    terminal.add_json(parser)


def run(options: Options) -> None:
    """Show each client's number of examples by class.

    Nothing is trained. `fedcore run` uses the same partition for the same configuration
    and seed.

    Examples:
      fedcore show-data quickstart
      fedcore show-data quickstart --out partition.png --seed 3
      fedcore show-data quickstart --set 'partition={name="dirichlet", clients=30, alpha=0.1}'
      fedcore show-data quickstart --set data.name=mnist --set model.name=lenet --all
    """
    from rich.console import Console

    from fedcore.sim.data import holdings
    from fedcore.sim.experiment import load_preset
    from fedcore.sim.experiment.config import load_and_partition
    from fedcore.sim.reports.report import draw_holdings, holdings_table

    terminal.load_imports(options.imports)
    out, most = options.out, None if options.all else LINES
    if out is not None and out.suffix.lower() != ".png":
        raise ConfigError(f"--out {str(out)!r}: must be a .png file")
    experiment = load_preset(options.preset, options.changes)
    seed = experiment.seeds[0] if options.seed is None else options.seed
    dataset, parts = load_and_partition(experiment, seed)
    counts = holdings(dataset.train_y, parts, dataset.classes)
    values = ", ".join(f"{key}={value}" for key, value in experiment.partition.options.items())
    partition = f"{experiment.partition.name} ({values})" if values else experiment.partition.name
    title = f"{dataset.name}, {partition}, seed {seed}"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        draw_holdings(counts, out, title=title)
    if options.json:
        terminal.print_json({"data": dataset.name, "partition": partition, "seed": seed, "counts": counts.tolist()})
        return
    console = Console()
    names = dataset.clients if experiment.partition.name == "natural" else None
    console.print(holdings_table(counts, title=title, most=most, names=names))
    if most is not None and len(counts) > most:
        terminal.print_plain(console, ["--all shows all clients"])
    if out is not None:
        terminal.print_plain(console, [f"wrote {out}"])
