"""The accuracy under attack of every method, and of FedAvg with every robust rule.

    export FEDCORE_DATA_DIR=...                                                # the folder of mnist/
    python -m bench.attacks bench/attacks.csv --seeds 3                        # run it again to resume
    python -m bench.attacks bench/attacks.csv --tables bench/attacks.md --into docs/results.md \\
        --picture docs/attacks.png

Softmax regression on 10,000 images of MNIST, from zero (7,850 parameters): ten clients, 40 rounds of 5 steps with
batches of 32 and rate 0.1. All clients take part in every round, and the last one or three attack in every round. Rules
with f know the number of dishonest clients. The results are those of the last round on the 10,000 test images.

In "FedAvg, buffer", updates arrive in random order in a buffer of 10. In each of 40 turns, an honest client sends one
update, and the dishonest one sends its update 15 times. These rows have one seed, and ran on an AMD EPYC.

Columns: ``accuracy`` is a share. ``distance`` is that of x from the x of an honest federation with the same rules, as a
share of the honest x's norm. ``rejected`` counts updates.
"""

import argparse
import csv
import json
import logging
import warnings
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas
import torch

import fedcore
from bench.machine import describe
from bench.markdown import put_into, table
from fedcore import RoundPolicy, Server, algorithms, rules
from fedcore.errors import FedcoreError
from fedcore.sim import data, nets
from fedcore.sim.attacks import (
    ALIE,
    IPM,
    Drift,
    FalseExamples,
    FalseSteps,
    FreeRider,
    Honest,
    LabelFlip,
    Liars,
    Noise,
    Scaling,
    SignFlip,
)
from fedcore.sim.in_process import InProcess

CLIENTS, EXAMPLES, STEPS, BATCH, RATE, ROUNDS, N = 10, 10_000, 5, 32, 0.1, 40, 7850
HONEST = "honest"
ON_VECTORS = {
    "x 1,000": Scaling(1000.0),
    "flipped": SignFlip(),
    "flipped x 10": SignFlip(10.0),
    "noise x 10": Noise(10.0),
    "ALIE": ALIE(1.5),
    "IPM 0.5": IPM(0.5),
    "IPM 9": IPM(9.0),
    "drift": Drift(),
    "labels flipped": LabelFlip(),
    "free rider": FreeRider(),
}
ON_NUMBERS = {
    "1 step": FalseSteps(1.0),
    "1 step, flipped": FalseSteps(-1.0),
    "10^6 steps": FalseSteps(1.0, 10**6),
    "10^9 examples, flipped": FalseExamples(-1.0),
}
ATTACKS = {HONEST: Honest(), **ON_VECTORS, **ON_NUMBERS}
OPTIONS = {"MIFA": {"wait": False}, "FedProx": {"mu": 0.1}, "FlexibleFedAvg": {"local_steps": STEPS}}
OPTIONS |= {f"{name}, sent": {"control": "sent"} for name in ("SCAFFOLD", "SCAFFOLDM")}
METHODS = [*algorithms.REGISTRY, "SCAFFOLD, sent", "SCAFFOLDM, sent"]
METHODS = [name for name in METHODS if name not in ("FedStale", "FedVARP")]
"""If all clients take part in every round, FedStale and FedVARP are MIFA."""
CHAINS = {"mean": None, "open": "open"}
"""The chains that every method can have."""
ROBUST = {
    "ClipNorm": lambda f: [rules.ClipNorm()],
    "Median": lambda f: [rules.Median()],
    "TrimmedMean": lambda f: [rules.TrimmedMean(f)],
    "MeaMed": lambda f: [rules.MeaMed(f)],
    "Krum": lambda f: [rules.Krum(f)],
    "MultiKrum": lambda f: [rules.MultiKrum(f)],
    "Bulyan": lambda f: [rules.Bulyan(f)] if 4 * f + 3 <= CLIENTS else IMPOSSIBLE,
    "GeometricMedian": lambda f: [rules.GeometricMedian()],
    "CentredClipping": lambda f: [rules.CentredClipping(TAU)],
    "NNM, TrimmedMean": lambda f: [rules.NearestNeighborMixing(f), rules.TrimmedMean(f)],
    "ClipToMedian, TrimmedMean": lambda f: [rules.ClipToMedian(), rules.TrimmedMean(f)],
    "Bucketing, Median": lambda f: [rules.Bucketing(2), rules.Median()],
}
"""The chains of FedAvg for f dishonest clients."""
RULES = [*CHAINS, *ROBUST]
TRIMMED = "CapSteps(2), ClipToMedian, TrimmedMean"
BUFFERED, TIMES = "FedAvg, buffer", 15
"""FedAvg with a buffer, to which a dishonest client sends its update so many times while the others send one."""
BUFFER = RoundPolicy(buffer=CLIENTS, max_staleness=8, discount=0.5)
REPEATING = "open without CountOnce"
WITH_OFFSETS = [name for name in METHODS if name in ("FedDyn", "MBSTORM") or name.startswith(("FedAvgM", "SCAFFOLD"))]
"""Methods whose clients add an offset; their tables also have the chain ``TRIMMED``."""
TAU = 0.5
"""A third of an honest update's norm in the first rounds."""
KINDS = {0.5: "different clients", 100.0: "similar clients"}
"""The partitions, by the alpha of their Dirichlet law."""
LIARS = (1, 3)
CELL = ["method", "rule", "alpha", "liars", "attack"]
KEY = [*CELL, "seed"]
COLUMNS = [*KEY, "accuracy", "distance", "rejected"]
MOST = 4
"""The loss in points from which a table marks a cell."""
TITLES = {"accuracy": "Accuracy in %", "distance": "Distance from the honest model"}
IMPOSSIBLE = "needs more clients"


@cache
def problem(alpha, seed):
    """Return the data set and its parts."""
    dataset = data.load("mnist")
    dataset = replace(dataset, train_x=dataset.train_x[:EXAMPLES], train_y=dataset.train_y[:EXAMPLES])
    return dataset, data.divide(dataset, "dirichlet", CLIENTS, seed=seed, alpha=alpha)


@cache
def engine(alpha, seed, liars):
    """Return the engine that trains the clients, of which the last train on flipped labels."""
    dataset, parts = problem(alpha, seed)
    dataset = Liars(LabelFlip(), range(CLIENTS - liars, CLIENTS)).poisoned(dataset, parts)
    module = nets.build("mlp-mnist", seed=0, hidden=())
    made = InProcess(module, dataset, parts, batch=BATCH, steps=STEPS, seed=seed)
    made.parts.table = cache(made.parts.table)  # all runs of a seed have the same minibatches
    return made


def method_of(name):
    """Return a method with its options."""
    return algorithms.named(name.partition(",")[0], **OPTIONS.get(name, {}))


def trained(method, chain, alpha, seed, attack, liars):
    """Return the last model and the number of rejected updates."""
    is_buffered, (_, parts) = method == BUFFERED, problem(alpha, seed)
    method, policy = method_of(method), BUFFER if is_buffered else RoundPolicy()
    clients = dict(enumerate(map(len, parts))) if method.needs_shares else CLIENTS
    server = Server(np.zeros(N, np.float32), method, clients, lr=RATE, aggregation=chain, policy=policy)
    false = Liars(attack, range(CLIENTS - liars, CLIENTS), seed)
    train, rng = engine(alpha, seed, liars if isinstance(attack, LabelFlip) else 0), np.random.default_rng(seed)
    rejected = 0
    for _ in range(ROUNDS):
        broadcast = server.broadcast(range(CLIENTS))
        try:
            updates = false.updates(broadcast, train.updates(broadcast))
            if is_buffered:
                reports = list(arrived(server, broadcast, [in_memory(one) for one in updates], liars, rng))
            else:
                reports = [server.round(updates)]
            rejected += sum(len(report.rejected) for report in reports)
        except FedcoreError:  # such as a model that would overflow
            rejected += CLIENTS
    return np.array(server.x), rejected


def in_memory(update):
    """Return an update that owns its value."""
    return update._replace(value=np.array(update.value))


def arrived(server, broadcast, updates, liars, rng):
    """Push a turn's updates in random order, those of dishonest clients ``TIMES`` times; yield the reports."""
    x, honest = np.array(broadcast.x), CLIENTS - liars
    updates = [one for one in updates for _ in range(TIMES if one.client >= honest else 1)]
    for i in rng.permutation(len(updates)):
        update = updates[i]._replace(round=broadcast.round)
        if update.client >= honest:  # it claims to have started just now
            value = update.value if update.kind == "delta" else update.value - x
            update = update._replace(value=value, kind="delta", round=server.round_number)
        yield from server.push([update])


def cells(alphas, seeds):
    """Yield the runs: method, alpha, seed, name of the rules, their chain by f, the liars and the attacks."""
    on_vectors = {HONEST: ATTACKS[HONEST], **ON_VECTORS}
    shared = {name: lambda _, chain=chain: chain for name, chain in CHAINS.items()}
    shared[TRIMMED] = lambda f: [rules.CapSteps(2), rules.ClipToMedian(), rules.TrimmedMean(f)]
    for alpha, seed in product(alphas, range(seeds)):
        for rule in RULES:
            make = ROBUST.get(rule) or shared[rule]
            yield "FedAvg", alpha, seed, rule, make, LIARS, on_vectors if rule in ROBUST else ATTACKS
    shared[REPEATING] = lambda _: [rule for rule in rules.OPEN if not isinstance(rule, rules.CountOnce)]
    for seed, rule in product(range(seeds) if 0.5 in alphas else (), ("mean", REPEATING, "open")):
        yield BUFFERED, 0.5, seed, rule, shared[rule], (1,), ATTACKS
    others = [("open", METHODS), (TRIMMED, WITH_OFFSETS), ("mean", METHODS)]
    for (rule, methods), seed in product(others if 0.5 in alphas else (), range(seeds)):
        for method in methods:
            if method != "FedAvg":
                yield method, 0.5, seed, rule, shared[rule], (1,), ATTACKS


def run(path, alphas, seeds):
    """Add the missing runs to the results."""
    known = pandas.read_csv(path)[KEY].astype(str).itertuples(index=False, name=None) if path.exists() else ()
    known = set(known)
    path.with_suffix(".json").write_text(json.dumps(describe(), indent=1) + "\n")
    with path.open("a", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        if not known:
            lines.writerow(COLUMNS)
        for method, alpha, seed, rule, make, numbers, attacks in cells(alphas, seeds):
            bases = {}
            for liars, (name, attack) in product(numbers, attacks.items()):
                key, chain = (method, rule, str(alpha), str(liars), name, str(seed)), make(liars)
                if key in known or chain == IMPOSSIBLE:
                    continue
                if str(chain) not in bases:
                    bases[str(chain)] = trained(method, chain, alpha, seed, Honest(), 0)
                base = bases[str(chain)]
                x, rejected = base if name == HONEST else trained(method, chain, alpha, seed, attack, liars)
                accuracy = engine(alpha, seed, 0).evaluate(x).accuracy
                distance = np.linalg.norm(x - base[0]) / np.linalg.norm(base[0])
                lines.writerow([*key, f"{accuracy:.4f}", f"{distance:.4g}", rejected])
            file.flush()


def costs(frame):
    """Return a row per cell with the mean, the lowest and the highest seed; all but distances are in points.

    ``loss`` is the difference to the honest federation with the same rules, ``price`` that of these honest federations:
    with the plain mean, and with the rules.
    """
    frame = frame.assign(accuracy=100 * frame["accuracy"])
    honest = frame[frame["attack"] == HONEST]
    plain = honest[honest["rule"] == "mean"].set_index(["method", "alpha", "liars", "seed"])["accuracy"]
    group = ["method", "rule", "alpha", "liars", "seed"]
    frame = frame.join(honest.set_index(group)["accuracy"].rename("honest"), on=group)
    frame = frame.join(plain.rename("plain"), on=list(plain.index.names))
    frame = frame.assign(loss=frame["honest"] - frame["accuracy"], price=frame["plain"] - frame["honest"])
    rows = []
    for key, own in frame.groupby(CELL, sort=False):
        row = dict(zip(CELL, key, strict=True)) | {"distance": own["distance"].mean(), "seeds": len(own)}
        for name in ("accuracy", "loss", "price"):
            row |= {name: own[name].mean(), f"{name}_low": own[name].min(), f"{name}_high": own[name].max()}
        rows.append(row)
    return pandas.DataFrame(rows)


def of(row, name):
    """Return a difference with its lowest and highest seed."""
    return f"{row[name]:.1f} ({row[name + '_low']:.1f} .. {row[name + '_high']:.1f})"


def worst(cell):
    """Return the attack with the greatest loss."""
    row = cell.loc[cell["loss"].idxmax()]
    text = f"{of(row, 'loss')}, {row['attack']}"
    return f"**{text}**" if row["loss"] > MOST else text


def by_rule(found):
    """Return a table of FedAvg with a row per rule: its price, and its greatest losses."""
    found = found[(found["method"] == "FedAvg") & found["attack"].isin([HONEST, *ON_VECTORS])]
    columns, rows = ["rule"], [[name] for name in RULES]
    for (alpha, liars), own in found.groupby(["alpha", "liars"]):
        kind = f"{KINDS[alpha]}, f = {liars}"
        columns += [f"{kind}: all honest", "price", f"greatest loss, {liars} of {CLIENTS}"]
        for row in rows:
            cell = own[own["rule"] == row[0]]
            honest = cell[cell["attack"] == HONEST]
            for _, one in honest.iterrows():
                row += [f"{one['accuracy']:.1f}", of(one, "price"), worst(cell)]
            row += [""] * (3 * (not len(honest)))
    return table(columns, rows)


def by_method(found):
    """Return a table with a row per method and rule, for one dishonest client."""
    found = found[(found["alpha"] == 0.5) & (found["liars"] == 1)]
    chains = dict.fromkeys(METHODS, ("mean", "open"))
    chains |= {name: (*chains[name], TRIMMED) for name in WITH_OFFSETS}
    chains[BUFFERED] = ("mean", REPEATING, "open")
    rows = []
    for method, rule in ((method, rule) for method, rules_ in chains.items() for rule in rules_):
        cell = found[(found["method"] == method) & (found["rule"] == rule)]
        if not len(cell):
            continue  # not measured yet
        honest, others = cell[cell["attack"] == HONEST].iloc[0], cell[cell["loss"] > MOST]["attack"]
        rows.append([method, rule, f"{honest['seeds']}", f"{honest['accuracy']:.1f}", worst(cell), str(len(others))])
    return table(
        ["method", "rule", "seeds", "all honest", "greatest loss", f"attacks that cost more than {MOST} points"], rows
    )


def _place(column):
    order = {"rule": [*RULES, TRIMMED, REPEATING], "method": [*METHODS, BUFFERED]}.get(column.name)
    return column if order is None else column.map(order.index)


def whole(found, liars, value):
    """Return a table with a row per method and rule, and a column per attack."""
    names = [name for name in ATTACKS if name in set(found["attack"])]
    rows = []
    for (method, rule, alpha), own in found[found["liars"] == liars].groupby(["method", "rule", "alpha"], sort=False):
        own = own.set_index("attack")
        texts = {name: f"{own[value][name]:.{1 if value == 'accuracy' else 2}f}" for name in names if name in own.index}
        bold = {name: f"**{text}**" for name, text in texts.items() if own["loss"][name] > MOST}
        rows.append([method, rule, f"{alpha:g}", *((texts | bold).get(name, "") for name in names)])
    return table(["method", "rule", "alpha", *names], rows)


def pages(path):
    """Return the text of the page of all results, and the two tables of the page about rules."""
    frame, machine = pandas.read_csv(path), json.loads(path.with_suffix(".json").read_text())
    found = costs(frame)
    seeds = " to ".join(map(str, sorted({found["seeds"].min(), found["seeds"].max()})))
    blocks = [
        f"# Attacks on every method\n\n<!-- Made by bench/attacks.py. -->\n\n```text\n{__doc__.strip()}\n```",
        f"Means over {seeds} seeds, on {machine['cpu']}, one thread, torch {machine['torch']}. "
        f"[{path.name}]({path.name}) has every run. alpha is that of the clients' Dirichlet partition. Bold: more than "
        f"{MOST} points below the honest federation with the same rules.",
    ]
    found = found.sort_values(["alpha", "rule", "method"], kind="stable", key=_place)
    for liars, (value, title) in product(LIARS, TITLES.items()):
        blocks.append(f"## {title}, {liars} of {CLIENTS} dishonest\n\n{whole(found, liars, value)}")
    return "\n\n".join(blocks) + "\n", by_rule(found), by_method(found)


def draw(path, picture):
    """Plot the honest accuracy, and that under the worst attack: of FedAvg by rule, and of each method."""
    found = costs(pandas.read_csv(path))
    found = found[found["alpha"] == 0.5]
    vectors = found[(found["method"] == "FedAvg") & found["attack"].isin([HONEST, *ON_VECTORS])]
    panels = (
        (vectors, "rule", "FedAvg with each rule, attacks on vectors"),
        (found[found["rule"] == "open"], "method", 'each method with aggregation="open", all attacks'),
    )
    figure, both = plt.subplots(1, 2, figsize=(11, 5.5), layout="constrained")
    for axes, (part, by, title) in zip(both, panels, strict=True):
        names = [name for name in (RULES if by == "rule" else [*METHODS, BUFFERED]) if name in set(part[by])][::-1]
        for liars, mark, color, up in ((1, "o", "C0", 0.12), (3, "s", "C3", -0.12)):
            own = part[part["liars"] == liars]
            own = own.loc[own.groupby(by)["loss"].idxmax()]
            at, mean = [names.index(name) + up for name in own[by]], own["accuracy"]
            spread = [mean - own["accuracy_low"], own["accuracy_high"] - mean]
            label = f"worst attack by {liars} of {CLIENTS}"
            axes.errorbar(mean, at, xerr=spread, fmt=mark, color=color, capsize=2, label=label)
        honest = part[(part["attack"] == HONEST) & (part["liars"] == 1)]
        at = [names.index(name) for name in honest[by]]
        axes.plot(honest["accuracy"], at, "|", color="black", markersize=14, label="all honest")
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="test accuracy, %", xlim=(0, 100))
        axes.set_title(title, fontsize=10)
        axes.grid(axis="x", alpha=0.3)
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(picture, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the CSV of all runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.5], choices=KINDS, help="of the partition")
    parser.add_argument("--tables", type=Path, help="write all tables, without new runs")
    parser.add_argument("--into", type=Path, help="put the short tables into this page")
    parser.add_argument("--picture", type=Path)
    chosen = parser.parse_args()
    if not (chosen.tables or chosen.into or chosen.picture):
        logging.disable(logging.CRITICAL)  # the server logs each rejected update
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        fedcore.set_threads(1)
        run(chosen.results, chosen.alphas, chosen.seeds)
        return
    everything, *short = pages(chosen.results)
    if chosen.tables:
        chosen.tables.write_text(everything, encoding="utf-8")
    if chosen.into:
        for kind, text in zip(("rules", "methods"), short, strict=True):
            put_into(chosen.into, text, f"<!-- {kind} under attack -->")
    if chosen.picture:
        draw(chosen.results, chosen.picture)


if __name__ == "__main__":
    main()
