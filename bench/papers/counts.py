"""Print how the rounds of recovery and crossing depend on the method and on the round of the shift (Ruan et al. 2021).

    python -m bench.papers.counts bench/papers/flexible-table5.csv                # or flexible-table4.csv
    python -m bench.papers.counts runs/flexible-figure5-mnist 100,150,200         # several arrivals in one run

From a NAME.csv: the differences between methods at each shift, and between shifts of one method, and the slope, the
additional rounds per round of delay; *never* counts as the number of remaining rounds. From the folder of a run or a
NAME-rounds.csv: the rounds that each method needs after each arrival, up to the next one, to reach the accuracy of the
round before, and the differences of accuracy in the round of the arrival and nine rounds later. Values are means over
the seeds with 95 % intervals by Student's t.
"""

import sys
from itertools import combinations

import numpy
import pandas

from bench.papers.pairs import curves, text


def of_table(path):
    """Return the counts in a table by family of presets and method: a row per seed, a column per shift."""
    table, found = pandas.read_csv(path), {}
    table = table[table["figure"].str.contains(": rounds")]
    for row in table.itertuples():
        family, _, shift = row.preset.rpartition("-t")
        seeds = row.spread.removeprefix("seeds: ").split(", ")
        own = [row.rounds - int(shift) if count == "never" else int(count) for count in seeds]
        found.setdefault(family, {}).setdefault(row.figure.partition(":")[0], {})[int(shift)] = own
    return {family: {label: pandas.DataFrame(own) for label, own in of.items()} for family, of in found.items()}


def show(family, of):
    """Print the differences and slopes of one family of presets."""
    for one, other in combinations(of, 2):
        for shift in of[one]:
            print(f"{family}, {shift}: {one} - {other}", text(of[one][shift] - of[other][shift], 1, "+"))
    for label, counts in of.items():
        slopes = pandas.Series(numpy.polyfit(list(counts), counts.T, 1)[0])
        print(f"{family}, {label}: slope", text(slopes, 2, "+"))
        for early, late in combinations(counts, 2):
            print(f"{family}, {label}: {late} minus {early}", text(counts[late] - counts[early], 1, "+"))


def arrivals(source, shifts):
    """Print the recoveries of one run after each arrival."""
    accuracy = curves(source)["accuracy"].unstack(["algorithm", "seed"])
    for shift, end in zip(shifts, [*shifts[1:], len(accuracy)], strict=True):
        reached = accuracy.loc[shift : end - 1] >= accuracy.loc[shift - 1]
        counts = (reached.idxmax() - shift + 1).where(reached.any()).unstack()
        print(f"rounds after {shift}:", counts.to_string(na_rep="never"), sep="\n")
        for one, other in combinations(counts.index, 2):
            for round in (shift, shift + 9):
                points = 100 * (accuracy.loc[round, one] - accuracy.loc[round, other])
                print(f"round {round}, accuracy: {one} - {other}", text(points, 1, "+"))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        for family, of in of_table(sys.argv[1]).items():
            show(family, of)
    elif len(sys.argv) == 3:
        arrivals(sys.argv[1], [int(shift) for shift in sys.argv[2].split(",")])
    else:
        sys.exit(__doc__)
