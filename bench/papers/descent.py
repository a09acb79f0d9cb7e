"""Measure the bounds of Haddadpour and Mahdavi 2019 on least squares, and write a figure and its numbers.

    python -m bench.papers.descent bench/papers/descent

writes ``descent.png`` and ``descent.csv`` in about a minute on one core. Clients are
f_i(y) = (1/2) sum_j a_ij (y_j - o_ij)^2 with a_ij ~ U[.5, 2], as in tests/theory, which tests the same statements.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import fedcore
from bench.papers.theory.local_sgd import largest_full_gradient_rate
from fedcore import Network, Update, algorithms
from fedcore.algorithms.rates import InverseStep
from fedcore.sim.network.topology import Topology
from tests.sim.network.kit import LeastSquares
from tests.theory.local_descent import DRAWN, E, N, descend, diversity, hear, n
from tests.theory.quadratics import Clients, server_of

SEEDS = 8
CLIENTS = 16
"""N, the number of clients in LFSGD's problem."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def eq_20(rounds=400):
    """Return T, f(x_T) - f* with a shared minimiser, its bound exp(-mu eta T) (f(x_0) - f*), and constants."""
    clients = Clients(N, n, seed=3, shared=True)
    L, mu = float(clients.a.max()), float(clients.a.mean(axis=0).min())
    bound = 1.0
    for _ in range(3):  # lambda is the largest Lambda measured at the rate that lambda allows
        eta = largest_full_gradient_rate(L, mu, E, bound)
        runs = [descend(clients, eta, rounds, seed) for seed in range(SEEDS)]
        bound = max(bound, *(float(met.max()) for _, met in runs))
    T = E * np.arange(rounds + 1)
    mean = np.mean([values for values, _ in runs], axis=0)
    return T, mean, np.exp(-mu * eta * T) * mean[0], {"eta": eta, "lambda": bound}


def different_minimisers(rounds=400):
    """Return T, f(x_T) - f* with all and with drawn clients, and Lambda, for clients with different minimisers."""
    clients = Clients(N, n, seed=3)
    best = clients.value(clients.optimum())
    server = server_of(algorithms.LocalDescent(full_gradient=True), clients, 0.05)
    error, met = [], []
    for _ in range(rounds):
        broadcast = server.broadcast(range(N))
        server.round(clients.updates(broadcast, E))
        error.append(clients.value(server.x) - best)
        met.append(diversity(clients, server.x))
    drawn = np.mean([descend(clients, 0.05, rounds, seed)[0][1:] - best for seed in range(SEEDS)], axis=0)
    return E * np.arange(1, rounds + 1), np.array(error), drawn, np.array(met)


def stochastic_error(clients, drawn, steps, seed, *, replacement=True):
    """Return f - f* of LFSGD with gradient noise 1 and eta_t = 4 / (mu (t + 40)) in step t (Thm 3.2)."""
    rng, mu = np.random.default_rng(seed), float(clients.a.min())
    server = server_of(algorithms.LocalDescent(), clients, lr=InverseStep(mu, 36 / E, E))
    for t in range(steps // E):
        if replacement:
            draws = fedcore.sampling.with_replacement([1.0] * clients.N, drawn, seed=seed, round=t)
        else:
            draws = fedcore.sampling.without_replacement(clients.N, drawn, seed=seed, round=t)
        hear(server, clients, draws, noise=lambda shape: (1, rng.normal(size=shape)))
    return clients.value(server.x)


def errors(coordinates=2000, shorter=1):
    """Return LFSGD's error over K (400 steps), drawn with and without replacement, and over T (K = 1).

    Algorithm 1 draws with replacement. Each coordinate is a separate problem, so that one run averages many problems.
    """
    clients = Clients(CLIENTS, coordinates, seed=4, shared=True)

    def mean(K, T, replacement):
        return np.mean([stochastic_error(clients, K, T, seed, replacement=replacement) for seed in range(2)])

    Ks, Ts = [1, 2, 4, 8, 16], [T // shorter for T in (200, 400, 800, 1600, 3200)]
    drawn, different = ([mean(K, Ts[1], replacement) for K in Ks] for replacement in (True, False))
    return (Ks, drawn, different), (Ts, [mean(1, T, True) for T in Ts])


def slope(x, y):
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def over_zeta(nodes=9, rounds=150, lr=0.05):
    """Return (zeta, distance) pairs of NFSGD's limit, for mixing matrices between a ring's and the complete graph's."""
    problem, found = LeastSquares(nodes, 4, seed=5), []
    ring, flat = Topology.named("ring", nodes).W, np.full((nodes, nodes), 1 / nodes)
    for part in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.01):
        network = Network([np.zeros(problem.n, np.float32)] * nodes, part * ring + (1 - part) * flat, lr=lr)
        for _ in range(rounds):
            report = network.round(
                Update(j, problem.steps(j, network.models[j], E, lr).astype(np.float32), E) for j in range(nodes)
            )
        found.append((report.zeta, float(np.linalg.norm(network.output() - problem.optimum))))
    return np.array(found)


def main(stem, *, shorter=1):
    """Write the figure and its numbers; ``shorter`` divides the lengths of all runs, for a quick test."""
    T, mean, bound, numbers = eq_20(400 // shorter)
    T2, error, drawn, met = different_minimisers(400 // shorter)
    (Ks, over_K, different_K), (Ts, over_T) = errors(2000 // shorter, shorter)
    slope_K, slope_different, slope_T = slope(Ks, over_K), slope(Ks, different_K), slope(Ts, over_T)
    zetas = over_zeta(rounds=150 // shorter)
    rows = [
        *(("eq. 20: f - f*", x, y) for x, y in zip(T[::20], mean[::20], strict=True)),
        *(("eq. 20: bound", x, y) for x, y in zip(T[::20], bound[::20], strict=True)),
        *(("different minimisers: f - f*, all clients", x, y) for x, y in zip(T2[::20], error[::20], strict=True)),
        *(("different minimisers: f - f*, 3 drawn", x, y) for x, y in zip(T2[::20], drawn[::20], strict=True)),
        *(("different minimisers: Lambda", x, y) for x, y in zip(T2[::20], met[::20], strict=True)),
        *(("LFSGD: f - f* over K", x, y) for x, y in zip(Ks, over_K, strict=True)),
        *(("LFSGD: f - f* over K, without replacement", x, y) for x, y in zip(Ks, different_K, strict=True)),
        *(("LFSGD: f - f* over T", x, y) for x, y in zip(Ts, over_T, strict=True)),
        *(("NFSGD: distance over zeta", x, y) for x, y in zetas),
    ]
    with Path(f"{stem}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["curve", "x", "y"])
        writer.writerows((name, f"{x:.6g}", f"{y:.6g}") for name, x, y in rows)

    figure = Figure(figsize=(11, 7.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    shared, other, noise, mixing = figure.subplots(2, 2).flat
    shared.semilogy(T, mean, color=COLOURS[0], label=f"LFGD, mean of {SEEDS} draws")
    shared.semilogy(T, bound, color=COLOURS[1], linestyle="--", label="bound, eq. 20")
    shared.set(
        title=f"A shared minimiser: eta = {numbers['eta']:.2g}, lambda = {numbers['lambda']:.2g}", xlabel="T, steps"
    )
    other.semilogy(T2, error, color=COLOURS[0], label="f - f*, all clients")
    other.semilogy(T2, drawn, color=COLOURS[2], label=f"f - f*, {DRAWN} of {N} drawn")
    other.semilogy(T2, met, color=COLOURS[1], linestyle="--", label="Lambda, all clients")
    other.set(title="Different minimisers: no eq. 20, Lambda diverges", xlabel="T, steps")
    noise.loglog(Ks, over_K, "o-", color=COLOURS[0], label=f"over K, drawn with replacement: slope {slope_K:.2f}")
    noise.loglog(Ks, different_K, "^:", color=COLOURS[2], label=f"over K, without: slope {slope_different:.2f}")
    noise.loglog(Ts, over_T, "s-", color=COLOURS[1], label=f"over T, K = 1: slope {slope_T:.2f}")
    noise.set(title=f"LFSGD: f - f* over K of {CLIENTS} clients (T = 400), and over T", xlabel="K, or T")
    noise.set_ylim(top=400)  # leave space for the legend
    mixing.plot(*zetas.T, "o-", color=COLOURS[0], label="ring to complete graph, 9 nodes")
    mixing.set(title="NFSGD: the distance to the optimum over zeta", xlabel="zeta")
    for axes in (shared, other, noise, mixing):
        axes.legend(frameon=False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(f"{stem}.png")
    ratio = float((mean / bound).max())
    print(f"eq. 20: f over its bound at most {ratio:.4f}; lambda {numbers['lambda']:.3f}, eta {numbers['eta']:.4f}")
    print(
        f"different minimisers: f - f* {error[-1]:.3g} with all clients, {drawn[-100:].mean():.3g} with draws; "
        f"Lambda {met[0]:.3g} at first, {met.max():.3g} at most"
    )
    print(f"LFSGD: slope {slope_K:.3f} over K, {slope_different:.3f} without replacement, {slope_T:.3f} over T")
    print(
        "LFSGD: K error(K) / error(1), drawn with replacement:", np.round(np.array(Ks) * over_K / over_K[0], 2).tolist()
    )
    print(f"NFSGD: distance {zetas[0, 1]:.4g} at zeta {zetas[0, 0]:.3f}, {zetas[-1, 1]:.4g} at {zetas[-1, 0]:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "bench/papers/descent")
