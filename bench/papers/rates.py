"""Print the paired differences of each two methods at each rate, and with each method at its best rate and beta.

    python -m bench.papers.rates bench/papers/momentum-mnist-trials.csv

The best has the highest mean accuracy of the points that have every seed. Differences are in points of accuracy, with
95 % intervals by Student's t over the seeds. For two presets, the last lines are the first one's difference minus the
second one's.
"""

import sys

import pandas

from bench.papers.pairs import differences, text


def best_of(trials):
    """Return the accuracy in percent of each method at its best point: a row per seed, a column per method."""
    wide = 100 * trials.pivot(index="seed", columns=["algorithm", "point"], values="accuracy").dropna(axis="columns")
    return pandas.DataFrame({one: wide[one][wide[one].mean().idxmax()] for one in sorted(wide.columns.unique(0))})


def show(title, columns):
    """Print each difference."""
    for pair, values in columns.items():
        print(f"{title}: {pair}", text(values, 2, "+"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trials, best = pandas.read_csv(sys.argv[1]), []
    for preset, own in trials.groupby("preset", sort=False):
        for rate, at_rate in own.groupby(own["point"].str.extract(r"rate\.lr=([^,]*)")[0].astype(float)):
            show(f"{preset}, {rate:g}", differences(best_of(at_rate)))
        best.append(best_of(own))
        show(f"{preset}, best", differences(best[-1]))
    if len(best) == 2:
        first, second = map(differences, best)
        show("first minus second, best", {pair: first[pair] - second[pair] for pair in first if pair in second})
