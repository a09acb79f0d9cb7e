"""The numbers in ``papers.toml`` equal those of the papers' tables, typed here a second time."""

import tomllib
from itertools import product
from pathlib import Path

from fedcore.sim.reports import statistics as papers
from fedcore.sim.reports.statistics import figures

METHODS = ("FedAvg", "FedProx", "SCAFFOLD", "MIFA", "MimiC")
TYPED = tomllib.loads(Path(__file__).with_name("paper_figures.toml").read_text())
MIMIC, SAME, FIGURES = TYPED["mimic"], TYPED["same"], set(TYPED["figures"]["mimic"])
GAINS = {kind: {int(T): gains for T, gains in row.items()} for kind, row in TYPED["gains"].items()}
GAINS["synthetic-00"] = GAINS["synthetic-iid"]
RECOVERIES, CROSSINGS = TYPED["recoveries"], TYPED["crossings"]


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
