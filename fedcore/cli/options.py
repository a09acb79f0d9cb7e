"""Options that several commands have."""

from fedcore.cli.parser import Parser, real, whole


def preset(parser: Parser) -> None:
    """The experiment."""
    words = "a preset (see `fedcore list`), or a .toml or .json file"
    parser.add_argument("preset", metavar="PRESET", help=words)


def size(parser: Parser) -> None:
    """The size of an experiment."""
    words = "`quick` is the preset's small size, for two cores"
    parser.add_argument("--scale", choices=("full", "quick"), default="full", help=words)
    parser.add_argument("--rounds", type=whole(1), metavar="N", help="communication rounds")
    words = "a count (`3` is 0,1,2), or a list (`0,4,7`; `4,` is the seed 4 alone)"
    parser.add_argument("--seeds", metavar="SEEDS", help=words)


def changes(parser: Parser) -> None:
    """Changes of its configuration."""
    words = "change one key of the configuration; may be repeated"
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help=words)


def jobs(parser: Parser) -> None:
    """The number of processes."""
    words = "processes; by default as many as there are cores, on a GPU one; 0 runs all in this one"
    parser.add_argument("--jobs", type=whole(0), metavar="N", help=words)


def device(parser: Parser) -> None:
    """The devices of clients and server."""
    words = (
        "where clients are trained: cpu, or a GPU's cuda or cuda:1; figures differ in rounding between the two, so a "
        "run that was begun on one kind goes on there"
    )
    parser.add_argument("--device", metavar="NAME", help=words)
    words = "where the server's vectors lie: cpu, or a GPU's cuda or cuda:1; the figures are the same"
    parser.add_argument("--server-device", metavar="NAME", help=words)


def engine(parser: Parser, words: str, workers: str) -> None:
    """The engine, and its workers."""
    parser.add_argument("--engine", choices=("process", "ray"), default="process", help=words)
    parser.add_argument("--workers", type=whole(1), metavar="N", help=workers)
    words = "GPUs that a worker asks for; four workers with 0.25 share one"
    parser.add_argument("--gpus", type=real("[0, inf)"), metavar="SHARE", help=words)
    words = "a Ray cluster: `auto`, or HOST:PORT, on a trusted network only; by default one is begun here, and ended"
    parser.add_argument("--address", metavar="ADDRESS", help=words)


def imports(parser: Parser) -> None:
    """Modules with parts of one's own."""
    words = (
        "import a module, or a .py file, that adds methods, data, ... of your own, or find modules in a folder (DIR/); "
        "may be repeated"
    )
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=words)


def log(parser: Parser) -> None:
    """Loggers that are told of each round."""
    words = (
        "log every round as it is done; may be repeated. tensorboard[=FOLDER]: event files, by default in the output "
        "folder's `tensorboard`; wandb[=PROJECT]: offline files in its `wandb`, which `wandb sync` sends; "
        "mlflow[=ADDRESS]: a tracking server or store such as sqlite:///mlflow.db, by default MLflow's own; each needs "
        "the extra of its name"
    )
    parser.add_argument("--log", dest="loggers", action="append", default=[], metavar="KIND[=WHERE]", help=words)


def json(parser: Parser) -> None:
    """JSON in the place of a table."""
    words = "print JSON, for other programs"
    parser.add_argument("--json", dest="as_json", action="store_true", help=words)
