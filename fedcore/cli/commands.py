"""The table of commands: each with its arguments and the help on them.

Nothing is imported here that does the work, so that the help comes at once.
"""

from fedcore.arguments import expanded
from fedcore.cli import options
from fedcore.cli.parser import Group, Parser, whole

LINES = 40
"""Clients that ``data show`` shows unless it is asked for all."""


def commands() -> Parser:
    """The parser of the whole command line."""
    top = Parser(
        "fedcore",
        """The server side of federated learning: run the papers' experiments and compare the algorithms.

        Start with: fedcore run quickstart
        """,
    )
    group = top.group()
    _run(group)
    _sweep(group)
    words = "List the presets, and the names that a configuration can use."
    listed = group.command("list", words, do="listing.list_names")
    options.imports(listed)
    options.json(listed)
    _data(group)
    _report(group)
    words = "Show versions, compiler, instruction set and threads: what a bug report needs."
    options.json(group.command("info", words, do="info.info", simulates=False))
    _doctor(group)
    _store(group)
    return top


def _run(group: Group) -> None:
    parser = group.command(
        "run",
        """Run an experiment: every algorithm with every seed, on the same clients in the same rounds.

        Shows a table of accuracies and writes it, the curves, the records and the configuration to a folder.

        Examples:

            fedcore run quickstart
            fedcore run mimic/table3-tau20 --scale quick
            fedcore run quickstart --set rate.lr=0.1 --set 'participation={name="Bernoulli", p=0.2}'
            fedcore run quickstart --set 'algorithms=["MimiC", {name="MIFA", wait=false}]'
            fedcore run runs/quickstart-20260101-120000/config.json --out again
            fedcore run runs/quickstart-20260101-120000 --resume
            fedcore run runs/quickstart-20260101-120000 --resume --rounds 200 --seeds 10
            fedcore run quickstart --set 'algorithms=["MimiC", "mine.methods:FedACG"]'
            fedcore run mine.toml --import mine.py
            fedcore run mimic/table3-tau20 --engine ray --workers 8
            fedcore run mimic/table3-tau20 --device cuda
            fedcore run quickstart --out runs/mine --log tensorboard
        """,
        do="run.run",
    )
    options.preset(parser)
    options.size(parser)
    options.changes(parser)
    words = "a new or empty folder; by default runs/PRESET-DATE-TIME"
    parser.add_argument("--out", type=expanded, metavar="DIR", help=words)
    words = (
        "go on with a run that was stopped, or is to have more: PRESET is its folder, --rounds and --seeds are what it "
        "is to have in all, --set 'algorithms=[...]' names algorithms beside its own; nothing else can change"
    )
    parser.add_argument("--resume", action="store_true", help=words)
    options.jobs(parser)
    options.imports(parser)
    words = "threads of each process, for fedcore's kernels and for clients that are trained together"
    parser.add_argument("--threads", type=whole(1), metavar="N", help=words)
    words = (
        "train clients together where the model can be, by torch's batching of functions (vmap), or one by one; by "
        "default what is measured to be faster"
    )
    parser.add_argument("--together", choices=("yes", "no", "vmap"), help=words)
    options.device(parser)
    words = (
        "who trains the clients: the process of a trial, or workers on Ray, which other machines may have; the figures "
        "are the same, and a run may go on with the other one; worth it for models from LeNet's size on"
    )
    options.engine(parser, words, "workers on Ray, for each trial in its turn; by default 2")
    options.log(parser)
    words = "show where the rounds' time went, and write trace.json, which chrome://tracing shows, into the folder"
    parser.add_argument("--profile", action="store_true", help=words)


def _sweep(group: Group) -> None:
    parser = group.command(
        "sweep",
        """Run several presets, each at every point of its grid of rates and betas.

        The same command goes on where it was stopped or killed: what is complete is skipped. Other presets, and more
        seeds, algorithms, rounds and points of a grid may be added to a folder later. Of a grid's points the report
        shows each algorithm's best, under each setting of the problem by itself.

        Examples:

            fedcore sweep mimic/table3-tau20 mimic/table3-tau50 --scale quick
            fedcore sweep flexible/table3-synthetic-niid-t{1,2,3,4} --seeds 5 --out runs/table3
            fedcore sweep momentum/figure5-s10 --set 'grid={"rate.lr"=[0.01, 0.1], "algorithms.beta"=[0.2]}'
            fedcore sweep mimic/table3-tau20 --engine ray --workers 64 --address auto
            fedcore sweep mimic/table3-tau20 --scale quick --log tensorboard --log mlflow=sqlite:///mlflow.db
        """,
        do="sweep.sweep",
    )
    words = "presets (see `fedcore list`), or .toml files"
    parser.add_argument("names", nargs="+", metavar="PRESET", help=words)
    options.size(parser)
    options.changes(parser)
    words = "the folder; by default runs/sweep-SCALE; it may hold a part of the sweep"
    parser.add_argument("--out", type=expanded, metavar="DIR", help=words)
    options.jobs(parser)
    options.device(parser)
    options.imports(parser)
    words = (
        "who runs the trials: processes of this machine, or workers on Ray, which other machines may have, one trial "
        "each at a time; the figures are the same, and a sweep may go on with the other one"
    )
    options.engine(parser, words, "workers on Ray; by default 2")
    options.log(parser)


def _data(group: Group) -> None:
    data = group.command(
        "data",
        """Look at the data: what there is, and who holds what in an experiment.

        Start with: fedcore data show quickstart
        """,
    ).group()
    listed = data.command(
        "list",
        """List the data sets and the ways to divide them, with the options of each.

        Every name can be written into a configuration, or set from the command line:

            fedcore run quickstart --set 'partition={name="dirichlet", clients=30, alpha=0.3}'

        Files are read from $FEDCORE_DATA_DIR/NAME where that variable is set, and are downloaded once where it is not.
        """,
        do="data.list_data",
    )
    options.imports(listed)
    options.json(listed)
    show = data.command(
        "show",
        """Show who holds what in an experiment: each client's examples, class by class.

        Nothing is trained. What you see is what `fedcore run` deals with the same configuration and seed.

        Examples:

            fedcore data show quickstart
            fedcore data show quickstart --out who.png --seed 3
            fedcore data show quickstart --set 'partition={name="dirichlet", clients=30, alpha=0.1}'
            fedcore data show quickstart --set data.name=mnist --set model.name=lenet --all
        """,
        do="data.show",
    )
    options.preset(show)
    words = "also draw clients x classes as a picture, into this file"
    show.add_argument("--out", type=expanded, metavar="PNG", help=words)
    words = "the trial's seed; by default the first of the experiment"
    show.add_argument("--seed", type=whole(0), metavar="N", help=words)
    options.changes(show)
    words = f"show all clients, not only the first {LINES}"
    show.add_argument("--all", dest="most", action="store_const", const=None, default=LINES, help=words)
    options.imports(show)
    options.json(show)


def _report(group: Group) -> None:
    parser = group.command(
        "report",
        """Make the tables, curves and the page of a run or a sweep anew from its records, the papers' figures beside.

        Of a sweep it takes each algorithm's best point: the highest accuracy, the mean over the last 10 evaluated
        rounds and over the seeds, among the points that are complete.

        Examples:

            fedcore report runs/quickstart-20260101-120000
            fedcore report runs/sweep-quick
        """,
        do="report.report",
    )
    words = "a folder that `fedcore run` or `sweep` wrote, finished or not"
    parser.add_argument("folder", type=expanded, metavar="DIR", help=words)


def _doctor(group: Group) -> None:
    parser = group.command(
        "doctor",
        """Say what is missing for what, and the way out of it: packages and their versions, the kernels, a GPU, data.

        Without a WHAT it looks at everything. Ends with status 1 if the core is at fault, or something that was named
        is missing; what was not named may be.

        Examples:

            fedcore doctor
            fedcore doctor sim flower
        """,
        do="doctor.doctor",
        simulates=False,
    )
    words = "core, gpu, data, build, or an extra of the package, such as sim or flower"
    parser.add_argument("names", nargs="*", metavar="WHAT", help=words)
    options.json(parser)


def _store(group: Group) -> None:
    store = group.command(
        "store",
        """Look after the folder of a client store: the clients' rows and the server's vectors.

        Start with: fedcore store info PATH
        """,
    ).group()
    for name, words in (
        (
            "info",
            """Show what a store holds: clients, rows, vectors, the last round, and what it takes of the disk.

            It only reads, and may be used while a server writes to the store.
            """,
        ),
        (
            "verify",
            """Read everything and compare it with its checksums; each damaged row is named with its client.

            Of a server's folder it also says whether the running total is the sum of the rows.

            Ends with status 0 if all is sound, and 1 if not. It only reads, and may be used while a server writes.
            """,
        ),
        (
            "compact",
            """Give back free slots: rows move down to fill them, and the files become shorter.

            No server may write to the store meanwhile. It is a transaction: interrupted, the store is as before.
            """,
        ),
        (
            "undo",
            """Take back the last transaction of a store that was opened with undoable=True, and say which that was.

            Of a server's folder, that is its last round, arrival, departure or warm start: the model, the sums, the
            rows and the clients are what they were before it, and Server.load goes on from there as if it had never
            been. With durability="checkpoint" it is all since the checkpoint before. `fedcore store info PATH` says
            what it would be, and changes nothing.

            One transaction is kept, so this can be done once, until the next is written; it cannot itself be taken
            back. No server may write to the store meanwhile; readers go on seeing what they look at. Interrupted, the
            store is as before, or as after.

            Example:

                fedcore store info PATH
                fedcore store undo PATH
            """,
        ),
        (
            "recover",
            """Open a store that lost commits again, at the last commit that is there.

            Says which commit that is and which are lost, reads everything, and changes nothing: --accept-loss gives
            the lost commits up. What the last commit had and a lost one wrote over is damaged; then only a copy helps.

            Example:

                fedcore store recover PATH --accept-loss
            """,
        ),
    ):
        parser = store.command(name, words, do=f"store.{name}", simulates=False)
        parser.add_argument("path", type=expanded, metavar="PATH", help="the folder of a store, or a cluster's")
        if name in ("info", "verify"):
            words = "the folders of a cluster's shards, one for each, where they do not lie beside the manifest"
            parser.add_argument("--folders", nargs="+", type=expanded, metavar="FOLDER", help=words)
            options.json(parser)
    words = "give the lost commits up; without it, nothing is changed"
    parser.add_argument("--accept-loss", action="store_true", help=words)
    _export(store)
    _depart(store)
    _reshard(store)


def _export(store: Group) -> None:
    parser = store.command(
        "export",
        """Write the model of a server's folder, after its last finished round, into a file for other programs.

        It only reads, and may be used while a server writes to the folder. The file's ending says its form:
        .safetensors, .pt (a state_dict, which needs torch) or .npz (NumPy's). A file that is there is replaced at once,
        when the new one is whole.

        Examples:

            fedcore store export state model.safetensors
            fedcore store export runs/mine/checkpoints/0-mimic-seed0 model.pt

        The second is of a trial that was stopped; one that is complete has models if its run was begun with
        --set evaluate.keep=N.
        """,
        do="store.export",
        simulates=False,
    )
    parser.add_argument("path", type=expanded, metavar="STATE", help="the folder of a server, or of Server.save")
    words = "the file: .safetensors, .pt, .pth or .npz"
    parser.add_argument("file", type=expanded, metavar="FILE", help=words)


def _depart(store: Group) -> None:
    parser = store.command(
        "depart",
        """Have a client depart from a server's folder: its row leaves every running sum, and nobody waits for it.

        No server may write to the folder meanwhile; one that runs does it by Server.depart. It is a transaction, which
        `fedcore store undo` takes back where the folder keeps the last.

        Example:

            fedcore store depart state 6718209338712947
        """,
        do="store.depart",
        simulates=False,
    )
    parser.add_argument("path", type=expanded, metavar="STATE", help="the folder of a server on an mmap store")
    parser.add_argument("client", metavar="ID", help="the client's id")
    words = "leave the other clients' shares as they are (where they have shares, they grow otherwise)"
    parser.add_argument("--include", action="store_true", help=words)
    options.imports(parser)


def _reshard(store: Group) -> None:
    parser = store.command(
        "reshard",
        """Cut a cluster into another number of shards, or a server's folder into the shards of a cluster.

        Rounds then go on with the bits that they would have had: no row is rounded. All folders must lie on this
        machine, and no server may have them. Old and new shards are on the disks together until the new ones are whole;
        killed, it leaves the one or the other, and may be started again.

        Examples:

            fedcore store reshard run/cluster.json --shards 4
            fedcore store reshard run --shards 2 --folders /disk0/run /disk1/run
            fedcore store reshard state --shards 2 --to run      (state: the folder of a fedcore.Server)
        """,
        do="cluster_store.reshard",
        simulates=False,
    )
    parser.add_argument(
        "path", type=expanded, metavar="PATH", help="a cluster's manifest or folder, or a server's folder"
    )
    parser.add_argument("--shards", type=whole(1), required=True, metavar="N", help="how many there will be")
    words = "put the new cluster there, and leave what is at PATH as it is"
    parser.add_argument("--to", type=expanded, metavar="FOLDER", help=words)
    words = "the new shards' folders, on a disk each, say; by default they are beside the manifest"
    parser.add_argument("--folders", nargs="+", type=expanded, metavar="FOLDER", help=words)
    words = "the present shards' folders, where they do not lie beside the manifest"
    parser.add_argument("--current-folders", nargs="+", type=expanded, metavar="FOLDER", help=words)
