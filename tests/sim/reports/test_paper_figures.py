"""The numbers in ``papers.toml`` equal those of the papers' tables, typed here a second time."""

from itertools import product

from fedcore.sim.reports import papers
from fedcore.sim.reports.papers import figures

METHODS = ("FedAvg", "FedProx", "SCAFFOLD", "MIFA", "MimiC")
MIMIC = {  # Sun, Mao, Zhang: Tables 3 to 5, and the text beside them
    "table3-tau20": (69.39, 72.67, 73.46, 72.92, 75.89),
    "table3-tau50": (68.42, 67.44, 72.30, 72.82, 74.86),
    "table3-tau100": (68.21, 64.74, 68.70, 72.20, 74.71),
    "table4-fmnist-p10": (64.71, 66.91, 63.77, 68.58, 72.22),
    "table4-fmnist-p30": (69.22, 69.43, 73.18, 73.43, 74.86),
    "table4-fmnist-p50": (71.31, 72.91, 71.88, 73.24, 74.24),
    "table4-cifar-p10": (42.03, 48.12, 38.88, 52.69, 56.21),
    "table4-cifar-p30": (51.63, 50.08, 56.21, 55.62, 60.07),
    "table4-cifar-p50": (52.21, 59.23, 53.59, 56.14, 60.59),
    "table5-c2": (30.52, 36.66, 37.75, 50.37, 52.91),
    "table5-c5": (77.76, 77.74, 78.15, 77.06, 78.44),
    "table5-c8": (81.59, 81.22, 82.00, 81.84, 82.16),
    "table5-c10": (82.10, 81.96, 82.74, 82.04, 82.93),
    "no-dropout-fmnist": (76.82,),
    "no-dropout-cifar": (62.48,),
}
SAME = {  # presets of one column, or of some rows of it
    "figure4": "table3-tau20",
    "fmnist-tau50": "table3-tau50",
    "readings-code-tau": "table3-tau50",
    "readings-random-phase": "table3-tau50",
    **{f"table3-scaffold-tau{tau}": f"table3-tau{tau}" for tau in (20, 50, 100)},
    **{f"readings-{one}": "table4-fmnist-p10" for one in ("default", "literal", "constant", "batch64")},
    **{f"random-shards-table3-tau{tau}": f"table3-tau{tau}" for tau in (20, 50)},
    **{f"random-shards-scaffold-tau{tau}": f"table3-tau{tau}" for tau in (20, 50)},
    "random-shards-table4-p10": "table4-fmnist-p10",
    "random-shards-code-tau": "table3-tau50",
    "random-shards-no-dropout": "no-dropout-fmnist",
}
FIGURES = {"figure7"} | {f"figure6-p{p}" for p in (10, 30, 50, 70, 90)}
FIGURES |= {f"random-shards-figure6-p{p}" for p in (10, 30, 50, 70)}
GAINS = {  # Ruan et al., Table 3: B over A, C over B, by |T|
    "mnist-iid": {1: (-0.6, 0.3), 2: (1.9, 0.1), 3: (5.6, 0.1), 4: (8.3, 0.7), 7: (5.8, 1.9), 8: (11.8, 2.4)},
    "mnist-niid": {1: (0.2, -0.3), 2: (9.5, 1.8), 3: (19.3, 1.6), 4: (33.8, 3.3)},
    "synthetic-iid": {
        **{1: (-0.6, 0.5), 2: (2.1, 0.1), 3: (6.6, 0), 4: (9.0, 0.7)},
        **{5: (11.6, 3.0), 6: (16.4, 2.5), 7: (6.3, 1.9), 8: (14.4, 2.8)},
    },
    "synthetic-niid": {1: (0.1, -0.4), 2: (9.6, 1.5), 3: (22.2, 1.8), 4: (38.2, 3.2)},
    "emnist-iid": {1: (0.7, -0.6), 2: (0.9, 0.1), 3: (4.2, 0.7), 4: (4.8, 1.0), 7: (4.0, 1.5)},
    "emnist-niid": {1: (-0.1, -0.7), 2: (17.0, -2.0), 3: (34.2, 1.8), 4: (37.9, 4.8)},
}
GAINS["synthetic-00"] = GAINS["synthetic-iid"]
RECOVERIES = {  # Table 4: fast, vanilla, after an arrival at 10, 30, 50, 70
    "mnist": ((4, 4), (22, 27), (55, 63), (59, 66)),
    "emnist": ((4, 3), (11, 12), (14, 19), (21, 24)),
    "synthetic": ((1, 1), (4, 6), (7, 12), (3, 8)),
}
CROSSINGS = {  # Table 5: a departure at 10, 15, ..., 50
    "0.1": (2, 5, 3, 3, 9, 3, 10, 26, 40),
    "0.5": (1, 3, 9, 14, 13, 7, 12, 36, 34),
    "1": (10, 9, 27, 18, 34, 17, 28, 62, 77),
}


def of(paper):
    return {name.partition("/")[2]: figures(name) for name in papers._papers() if name.startswith(f"{paper}/")}


def test_mimics_tables():
    found = of("mimic")
    assert found.keys() == MIMIC.keys() | SAME.keys() | FIGURES
    for name in FIGURES:  # Sec. 7.2: MimiC is above FedAvg and MIFA
        assert (found[name].better, found[name].accuracy) == (["MimiC - FedAvg", "MimiC - MIFA"], {}), name
    for name in found.keys() - FIGURES:
        given, column = found[name], dict(zip(METHODS, MIMIC[SAME.get(name, name)], strict=False))
        assert given.accuracy == {label: column[label] for label in given.accuracy}, name
        if name not in SAME:  # SCAFFOLD has half as many rounds in the paper
            assert given.accuracy.keys() == column.keys() - {"SCAFFOLD"}, name
        assert ("SCAFFOLD" in given.accuracy) == ("scaffold" in name), name
        cifar = "cifar" in name or "table5" in name
        assert (given.rounds, given.seeds) == (400 if cifar else 100 if "scaffold" in name else 200, 3), name
    assert {(found[name].rounds, found[name].seeds) for name in FIGURES} == {(200, 3)}


def test_ruans_tables():
    found = of("flexible")
    expected = {f"table3-{kind}-t{T}" for kind, row in GAINS.items() for T in row}
    expected |= {f"table4-{kind}-t{t}" for kind, t in product(RECOVERIES, (10, 30, 50, 70))}
    expected |= {f"table5-{kind}-t{t}" for kind, t in product(CROSSINGS, range(10, 51, 5))}
    assert found.keys() == expected
    for kind, row in GAINS.items():
        for T, (b_a, c_b) in row.items():
            assert found[f"table3-{kind}-t{T}"].gain == {"B - A": b_a, "C - B": c_b}, (kind, T)
    for kind, row in RECOVERIES.items():
        for t, (fast, vanilla) in zip((10, 30, 50, 70), row, strict=True):
            given = found[f"table4-{kind}-t{t}"]
            assert (given.shift, given.recovery) == (t, {"fast": fast, "vanilla": vanilla}), (kind, t)
    for kind, row in CROSSINGS.items():
        for t, count in zip(range(10, 51, 5), row, strict=True):
            given = found[f"table5-{kind}-t{t}"]
            assert (given.shift, given.crossing) == (t, {"exclude - include": count}), (kind, t)
    assert {given.rounds for given in found.values()} == {200}
