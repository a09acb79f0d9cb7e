"""Print each method's level, and the paired difference of each two methods, over a range of rounds.

    python -m bench.papers.pairs runs/mimic-table3-tau20 190-199                  # the window of a report
    python -m bench.papers.pairs runs/mimic-table3-tau20 199-199 SCAFFOLD=99-99   # one round, of SCAFFOLD another one
    python -m bench.papers.pairs bench/papers/mimic-table4-rounds.csv 190-199
    python -m bench.papers.pairs runs/mimic-table3-tau20 runs/mimic-table3-tau50 190-199    # two sweeps

A source is the folder of a run or of a sweep with one condition, or a NAME-rounds.csv, which has no losses. Each value
is a mean over the evaluated rounds, then over the seeds, with its 95 % interval by Student's t. The oscillation is the
standard deviation of the accuracy over the rounds. For two sources, ' marks the methods of the second one. The
differences are then between the sources, and (A - B) - (A - B)' is the change of a lead.
"""

import sys
from itertools import combinations, product

import pandas

from fedcore.sim.experiment import load_results
from fedcore.sim.reports.statistics import interval_of

INDEX = ["algorithm", "seed", "round"]
MEASURES = {"accuracy %": ("accuracy", "mean", 100, 2), "oscillation": ("accuracy", "std", 100, 2)}
MEASURES |= {"test loss": ("loss", "mean", 1, 4)}


def curves(source):
    """Return the accuracy and the loss of each evaluated round, by algorithm, seed and round."""
    if not source.endswith(".csv"):
        return load_results(source)[[*INDEX, "accuracy", "loss"]].dropna(subset="accuracy").set_index(INDEX)
    wide = pandas.read_csv(source).melt("round", value_name="accuracy")  # a column "METHOD seed N" per trial
    names = wide.pop("variable").str.rsplit(" seed ", n=1, expand=True)
    return wide.assign(algorithm=names[0], seed=names[1].astype(int), loss=float("nan")).set_index(INDEX)


def by_seed(frame, ranges, column, how, scale):
    """Return one number per seed (rows) and algorithm (columns)."""
    found = {}
    for label, own in frame.groupby("algorithm"):
        chosen = own[own.index.get_level_values("round").isin(ranges.get(label, ranges[""]))]
        found[label] = scale * getattr(chosen.groupby("seed")[column], how)()
    return pandas.DataFrame(found)


def differences(values, second=None):
    """Return the differences of each two methods, or those between two sources, one column each."""
    if second is None:
        return {f"{a} - {b}": values[a] - values[b] for a, b in combinations(values, 2)}
    found = {f"{a} - {b}'": values[a] - second[b] for a, b in product(values, second)}
    leads, others = differences(values), differences(second)
    return found | {f"({pair}) - ({pair})'": leads[pair] - others[pair] for pair in leads if pair in others}


def text(values, digits, sign=""):
    """Return a mean and its interval."""
    values = values.dropna()
    low, high = interval_of(values.tolist()) or (float("nan"), float("nan"))
    return f"{values.mean():{sign}.{digits}f} ({low:{sign}.{digits}f} .. {high:{sign}.{digits}f})"


if __name__ == "__main__":
    sources = [argument for argument in sys.argv[1:3] if "/" in argument]
    if not sources or len(sys.argv) <= 1 + len(sources):
        sys.exit(__doc__)
    pairs = [argument.rpartition("=") for argument in sys.argv[1 + len(sources) :]]
    ends = {label: map(int, rounds.split("-")) for label, _, rounds in pairs}
    ranges = {label: range(first, last + 1) for label, (first, last) in ends.items()}
    frames, columns = [curves(source) for source in sources], {}
    for name, (column, how, scale, digits) in MEASURES.items():
        values = [by_seed(frame, ranges, column, how, scale) for frame in frames]
        marked = values[0] if len(values) == 1 else values[0].join(values[1].add_suffix("'"))
        columns[name] = {label: text(marked[label], digits) for label in marked}
        columns[name] |= {pair: text(own, digits, "+") for pair, own in differences(*values).items()}
    print(pandas.DataFrame(columns).to_string())
