"""Print each method's level, and the paired difference of each two methods, over a range of rounds.

    python -m bench.papers.pairs runs/mimic-table3-tau20 190-199                  # the window of a report
    python -m bench.papers.pairs runs/mimic-table3-tau20 199-199 SCAFFOLD=99-99   # one round, of SCAFFOLD another one
    python -m bench.papers.pairs bench/papers/mimic-table4-rounds.csv 190-199

The first argument is the folder of a run or of a sweep with one condition, or a NAME-rounds.csv, which has no losses.
Each value is a mean over the evaluated rounds, then over the seeds, with its 95 % interval by Student's t. The
oscillation is the standard deviation of the accuracy over the rounds.
"""

import sys
from itertools import combinations

import pandas

from fedcore.experiment import load_results
from fedcore.reports.statistics import interval_of

INDEX = ["algorithm", "seed", "round"]
MEASURES = {"accuracy %": ("accuracy", "mean", 100, 2), "oscillation": ("accuracy", "std", 100, 2)}
MEASURES |= {"test loss": ("loss", "mean", 1, 4)}


def curves(source):
    """Return the accuracy and the loss of each evaluated round, by algorithm, seed and round."""
    if not source.endswith(".csv"):
        return load_results(source)[[*INDEX, "accuracy", "loss"]].dropna(subset="accuracy").set_index(INDEX)
    wide = pandas.read_csv(source).melt("round", value_name="accuracy")  # a column "METHOD seed N" per trial
    names = wide.pop("variable").str.rsplit(" seed ", n=1, expand=True)
    return wide.assign(algorithm=names[0], seed=names[1], loss=float("nan")).set_index(INDEX)


def by_seed(frame, ranges, column, how, scale):
    """Return one number per seed (rows) and algorithm (columns)."""
    found = {}
    for label, own in frame.groupby("algorithm"):
        chosen = own[own.index.get_level_values("round").isin(ranges.get(label, ranges[""]))]
        found[label] = scale * getattr(chosen.groupby("seed")[column], how)()
    return pandas.DataFrame(found)


def text(values, digits, sign=""):
    """Return a mean and its interval."""
    low, high = interval_of(values.dropna().tolist()) or (float("nan"), float("nan"))
    return f"{values.mean():{sign}.{digits}f} ({low:{sign}.{digits}f} .. {high:{sign}.{digits}f})"


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    pairs = [argument.rpartition("=") for argument in sys.argv[2:]]
    ends = {label: map(int, rounds.split("-")) for label, _, rounds in pairs}
    ranges = {label: range(first, last + 1) for label, (first, last) in ends.items()}
    frame, columns = curves(sys.argv[1]), {}
    for name, (column, how, scale, digits) in MEASURES.items():
        values = by_seed(frame, ranges, column, how, scale)
        columns[name] = {label: text(values[label], digits) for label in values}
        for one, other in combinations(values, 2):
            columns[name][f"{one} - {other}"] = text(values[one] - values[other], digits, "+")
    print(pandas.DataFrame(columns).to_string())
