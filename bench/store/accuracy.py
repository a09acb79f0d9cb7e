"""The loss of accuracy by a codec: the same experiment with rows in f32, bf16 and int8, on the same active sets.

python -m bench.store.accuracy mimic/fmnist-tau50 rounds=40 local.epochs=1 "seeds=[0,1]" --out accuracy.jsonl

The first model, partition, active sets and minibatches of a trial depend on its seed, not on the codec, so only the
rows differ. Every evaluated round is a line of the file. A trial in the file is not repeated.
"""

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from fedcore import ClientStore, Server
from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment.schema import Trial
from fedcore.sim.experiment.trial import build, rounds

CODECS = ("f32", "bf16", "int8")
METHODS = ("MIFA", "MimiC", "SCAFFOLD")
LAST = 5
"""The number of last evaluations whose mean is a trial's accuracy; single rounds vary by several points."""


def run(trial, codec):
    """Run a trial with rows in a codec, and yield (round, accuracy, loss)."""
    parts = build(trial)
    store = ClientStore(trial.experiment.partition.clients, parts.server.layout.n_parameters, codec=codec)
    server = Server(parts.server.tensors(), trial.method.make(), storage=store, lr=trial.experiment.rate.lr.make())
    experiment = trial.experiment
    for line in rounds(replace(parts, server=server), count=experiment.rounds, evaluate=experiment.evaluate):
        if line.accuracy is not None:
            yield line.round, line.accuracy, line.loss


def read(out):
    """Read the file, and return {(method, codec, seed): [(round, accuracy, loss)]}."""
    found = {}
    for line in out.read_text().splitlines() if out.exists() else ():
        method, codec, seed, *figures = json.loads(line)
        found.setdefault((method, codec, seed), []).append(figures)
    return found


def table(found, seeds):
    """Return the accuracy of the last evaluations by method and codec, and the loss against f32, paired by seed."""
    lines = ["| method | codec | accuracy, % | against f32 on the same seed, points |", "|---|---|---:|---:|"]
    for method, codec in product(METHODS, CODECS):
        if not all((method, one, seed) in found for one, seed in product((codec, "f32"), seeds)):
            continue
        mine, plain = ([end(found[method, one, seed]) for seed in seeds] for one in (codec, "f32"))
        lost = ", ".join(f"{100 * (a - b):+.2f}" for a, b in zip(mine, plain, strict=True))
        lines.append(f"| {method} | {codec} | {100 * np.mean(mine):.2f} | {lost if codec != 'f32' else ''} |")
    return "\n".join(lines)


def end(figures):
    """Return the mean accuracy of the last evaluations."""
    return float(np.mean([accuracy for _, accuracy, _ in figures[-LAST:]]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    methods = json.dumps(METHODS)
    experiment = load_preset(options.preset, [*options.overrides, f"algorithms={methods}"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for seed, order, codec in product(experiment.seeds, range(len(METHODS)), CODECS):
        key = METHODS[order], codec, seed
        if len(read(options.out).get(key, [])) == 0:
            lines = [json.dumps([*key, *figures]) + "\n" for figures in run(Trial(experiment, order, seed), codec)]
            with options.out.open("a") as file:
                file.writelines(lines)
            print(*key, f"{100 * end(read(options.out)[key]):.2f} %", flush=True)
    print(table(read(options.out), experiment.seeds))


if __name__ == "__main__":
    main()
