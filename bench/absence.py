"""The accuracy of methods for absent and slow clients, paired by seed.

    export FEDCORE_DATA_DIR=...                                   # the folder of mnist/, fashion-mnist/ and cifar-10/
    python -m bench.absence bench/absence-rates.csv.xz --tune                # the rates of the presets absence/mnist-*
    python -m bench.absence bench/absence.csv.xz                             # run it again to resume
    python -m bench.absence bench/absence.csv.xz --data fashion --seeds 3
    python -m bench.absence bench/absence.csv.xz --into docs/results.md --pictures docs

The settings are those of the presets absence/*. "FedAvg, known p" is added here: it divides an update by the share of
the run's rounds in which its client takes part. "FedAWE, limited" scales the updates of each round as FedAWE's authors
do. All methods of one seed have the same partition, initial model, durations and availability at each virtual second;
those that do not wait for slow clients have other minibatches and participants.

Columns: ``accuracy`` is a share, ``clock`` the virtual seconds until the end of the round, ``age`` the mean age of the
round's updates in rounds (0 in synchronous rounds), ``rate`` the clients' learning rate, ``clients`` the number of the
round's accepted updates.
"""

import argparse
import json
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
import numpy as np
import pandas
import torch
from scipy.stats import false_discovery_control, ttest_1samp

import fedcore
from bench.machine import describe
from bench.markdown import put_into, table
from fedcore.sim.experiment import Experiment, load_preset
from fedcore.sim.experiment.schema import Trial
from fedcore.sim.experiment.trial import TrialParts, build, rounds
from fedcore.sim.reports.statistics import interval_of

LAWS = {"mnist": ("bernoulli", "markov", "sine", "stragglers"), "fashion": ("bernoulli", "stragglers")}
LAWS["cifar"] = ("bernoulli",)
KNOWN, KNOWN_RATE, FIRST = "FedAvg, known p", 0.3, "FedAvg"
LIMITED, LIMITED_RATE, LIMIT = "FedAWE, limited", 0.3, 0.5
RATES, TUNING_SEED = (0.1, 0.03, 0.3, 0.01, 1.0, 0.003), 100
KEY = ["data", "law", "method", "rate", "seed"]
COLUMNS = [*KEY, "round", "accuracy", "loss", "clock", "age", "clients"]
WINDOW = 10
"""A trial's result is its mean accuracy over this many rounds, as in reports."""


@cache
def experiment(data, law, seed):
    """Return the preset for one seed, with the method that knows the clients' shares of the rounds."""
    preset = load_preset(f"absence/{data}-{law}", [f"seeds=[{seed}]"])
    if data != "mnist":
        return preset
    pattern, count = build(Trial(preset, 0, seed)).pattern, np.zeros(preset.partition.clients)
    for round in range(preset.rounds):
        count[pattern.active(round).clients] += 1
    chances = np.maximum(count, 1) / preset.rounds
    known = {"name": "FedStale", "label": KNOWN, "beta": 0.0, "chances": chances.tolist()}
    tables = preset.tables()
    tables["algorithms"].insert(2, known | {"rate": {"lr": KNOWN_RATE}})
    unlimited = next(at for at, method in enumerate(tables["algorithms"]) if method["label"] == "FedAWE")
    tables["algorithms"].insert(
        unlimited + 1, tables["algorithms"][unlimited] | {"label": LIMITED, "rate": {"lr": LIMITED_RATE}}
    )
    return Experiment.model_validate(tables)


@dataclass(frozen=True)
class LimitedParts(TrialParts):
    """A trial of FedAWE in which the mean of (t - tau_i) (x_(i) - y_i) over a cohort has at most the norm ``LIMIT``."""

    accepted: dict[int, int] = field(default_factory=dict)
    """tau_i of each client: the last round with its update."""

    def updates(self, broadcast, active):
        """See ``TrialParts``."""
        sent = [update._replace(value=update.value.copy()) for update in super().updates(broadcast, active)]
        starts = [broadcast.start(update.client) for update in sent]
        t, mean = broadcast.round, np.zeros(len(broadcast.x))
        for update, start in zip(sent, starts, strict=True):
            mean += (t - self.accepted.get(update.client, -1)) * (start - update.value) / len(sent)
        scale = np.float32(min(1.0, LIMIT / max(np.linalg.norm(mean), 1e-30)))
        self.accepted.update((update.client, t) for update in sent)
        return [
            update._replace(value=start + scale * (update.value - start))
            for update, start in zip(sent, starts, strict=True)
        ]


def lines_of(data, law, order, seed, rate):
    """Run one method; yield the line of each evaluated round."""
    own = experiment(data, law, seed)
    if rate is not None:
        tables = own.tables()
        tables["algorithms"][order]["rate"] = {"lr": rate}
        own = Experiment.model_validate(tables)
    trial = Trial(own, order, seed)
    parts = build(trial)
    if own.algorithms[order].label == LIMITED:
        parts = LimitedParts(**vars(parts))
    for line in rounds(parts, count=own.rounds, evaluate=own.evaluate):
        if line.accuracy is not None:
            age, loss = fmean(line.ages or [0]), "" if line.loss is None else f"{line.loss:.4f}"
            yield line.round, f"{line.accuracy:.4f}", loss, f"{line.clock:.3f}", f"{age:.2f}", line.accepted


def run(path, data, laws, seeds, rates):
    """Add the missing runs to the results, seed by seed."""
    runs = pandas.read_csv(path)[KEY].astype(str) if path.exists() else pandas.DataFrame(columns=KEY)
    known = set(runs.itertuples(index=False, name=None))
    path.with_name(f"{path.name.partition('.')[0]}.json").write_text(json.dumps(describe(), indent=1) + "\n")
    for seed, law, rate in product(seeds, laws, rates):
        own = experiment(data, law, seed)
        for order, method in enumerate(own.algorithms):
            used = Trial(own, order, seed).rate.lr.options["value"] if rate is None else rate
            key = (data, law, method.label, str(float(used)), str(seed))
            if key not in known:
                lines = [[*key, *line] for line in lines_of(data, law, order, seed, rate)]
                frame = pandas.DataFrame(lines, columns=COLUMNS)
                frame.to_csv(path, mode="a", header=not path.exists(), index=False)


def results(frame, until=None):
    """Return the accuracy in % of each run: the mean over its last rounds, or at a virtual time of its law.

    Between two evaluations, the accuracy is a straight line.
    """
    if until is None:
        frame = frame[frame["round"] > frame["round"].max() - WINDOW]
        return 100 * frame.groupby(["law", "method", "seed"], sort=False)["accuracy"].mean()
    runs = frame.groupby(["law", "method", "seed"], sort=False)[["clock", "accuracy"]]
    return 100 * runs.apply(lambda own: np.interp(until[own.name[0], own.name[2]], own["clock"], own["accuracy"]))


def shared_time(frame):
    """Return the virtual time at which the first method of a law and seed ends its last round."""
    return frame.groupby(["law", "method", "seed"])["clock"].max().groupby(["law", "seed"]).min()


def compared(found):
    """Return a table of means over the seeds, with the differences from ``FIRST`` and their 95 % intervals.

    Bold: the interval is above zero. A star: the difference, of either sign, is also found if Benjamini and Hochberg's
    rule allows 5 % false ones among all that the table would find.
    """
    laws, methods = (found.index.unique(level).tolist() for level in ("law", "method"))
    by_seed = found.unstack("seed")
    gaps = {(law, method): by_seed.loc[(law, method)] - by_seed.loc[(law, FIRST)] for law in laws for method in methods}
    gaps = {cell: gap for cell, gap in gaps.items() if cell[1] != FIRST}
    chances = false_discovery_control([ttest_1samp(gap, 0).pvalue for gap in gaps.values()])
    stars = {cell: r" \*" * bool(chance <= 0.05) for cell, chance in zip(gaps, chances, strict=True)}
    rows = []
    for method in methods:
        cells = [method]
        for law in laws:
            text = f"{by_seed.loc[(law, method)].mean():.1f}"
            if (gap := gaps.get((law, method))) is not None:
                low, high = interval_of(gap.tolist())
                text += f" ({gap.mean():+.1f}: {low:+.1f} .. {high:+.1f}{stars[law, method]})"
                text = f"**{text}**" if low > 0 else text
            cells.append(text)
        rows.append(cells)
    return table(["method", *laws], rows)


def cohorts(frame):
    """Return a table of the mean number of clients in a synchronous and an asynchronous round of each condition."""
    means = frame.groupby(["law", "method"])["clients"].mean().unstack()
    names = [name for name in (FIRST, "FedBuff") if name in means]
    rows = [[law, *(f"{means.loc[law, name]:.1f}" for name in names)] for law in frame["law"].unique()]
    return table(["condition", *names], rows)


def best_rates(path, data):
    """Return each method's rate with the highest accuracy, a mean over the laws."""
    frame = pandas.read_csv(path)
    frame = frame[frame["data"] == data]
    frame = frame[frame["round"] > frame["round"].max() - WINDOW]
    means = 100 * frame.groupby(["method", "rate"], sort=False)["accuracy"].mean().unstack()
    return means.assign(best=means.idxmax(axis=1))


def read(path, data):
    """Return the results of one data set, of the seeds with all methods and laws."""
    frame = pandas.read_csv(path)
    frame = frame[frame["data"] == data]
    runs = frame.groupby("seed")["law"].transform("size")
    return frame[runs == runs.max()]


def pages(path, data):
    """Return the tables of one data set: after all rounds, at the time at which the first method ends, and cohorts."""
    frame = read(path, data)
    return [compared(results(frame)), compared(results(frame, shared_time(frame))), cohorts(frame)]


def draw(path, data, picture):
    """Plot the mean accuracy of each method over rounds, and over virtual seconds."""
    frame = read(path, data)
    laws, methods = frame["law"].unique(), frame["method"].unique()
    figure, panels = plt.subplots(2, len(laws), figsize=(3.4 * len(laws), 6.4), layout="constrained", squeeze=False)
    looks = {name: (f"C{number % 10}", ("-", "--")[number // 10]) for number, name in enumerate(methods)}
    for column, law in enumerate(laws):
        for name, own in frame[frame["law"] == law].groupby("method", sort=False):
            color, style = looks[name]
            own = own[(own["round"] + 1) % 10 == 0]
            means = own.groupby("round")[["accuracy", "clock"]].mean()
            label = name if not column else None
            panels[0, column].plot(means.index + 1, 100 * means["accuracy"], style, color=color, label=label)
            panels[1, column].plot(means["clock"], 100 * means["accuracy"], style, color=color)
        panels[0, column].set(title=law, xlabel="rounds")
        panels[1, column].set(xlabel="virtual seconds")
        for axes in panels[:, column]:
            axes.set_ylim(bottom=max(0, 100 * frame["accuracy"].max() - 50))
            axes.grid(alpha=0.3)
    figure.supylabel("test accuracy, %")
    figure.legend(loc="outside lower center", ncols=min(6, 3 * len(laws)), fontsize=9)
    figure.savefig(picture, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the CSV of all runs")
    parser.add_argument("--data", choices=LAWS, default="mnist")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tune", action="store_true", help=f"try {RATES} with seed {TUNING_SEED} of the first law")
    parser.add_argument("--into", type=Path, help="put the tables into this page, without new runs")
    parser.add_argument("--pictures", type=Path, help="the folder for the pictures")
    chosen = parser.parse_args()
    if not (chosen.into or chosen.pictures):
        torch.set_num_threads(1)
        fedcore.set_threads(1)
        laws, seeds, rates = LAWS[chosen.data], range(chosen.seeds), [None]
        if chosen.tune:
            laws, seeds, rates = laws[:1], [TUNING_SEED], RATES
        run(chosen.results, chosen.data, laws, seeds, rates)
        if chosen.tune:
            print(best_rates(chosen.results, chosen.data).round(1).to_string())
        return
    for data in pandas.read_csv(chosen.results)["data"].unique():
        if chosen.into:
            for kind, text in zip(("rounds", "seconds", "clients"), pages(chosen.results, data), strict=True):
                put_into(chosen.into, text, f"<!-- {data}: {kind} -->")
        if chosen.pictures:
            draw(chosen.results, data, chosen.pictures / f"absence-{data}.png")


if __name__ == "__main__":
    main()
