"""More transcriptions, as in ``papers.py``, of the other papers."""

import numpy as np

from tests.server.papers import N, n


def plain(clients, x, lr, t, steps, S):
    """h_i and eta K_i of plain local steps."""
    return {i: ((x - clients.train(i, x, lr(t), steps[i])[0]) / (lr(t) * steps[i]), lr(t) * steps[i]) for i in S}


def fedstale(clients, x, lr, course, beta, chances=None):
    """v = sum_S (a_i / p_i)(h_i - beta r_i) + beta sum_all a_j r_j, a = 1/N; p = S/N where it is not known."""
    r, K = np.zeros((N, n)), 0.0
    for t, S, steps, forgotten, registered in course.rounds():
        r[forgotten] = 0
        sent = plain(clients, x, lr, t, steps, S)
        if S:
            K = np.mean([steps[i] for i in S])
        if S or chances is not None:
            p = np.full(N, len(S) / registered) if chances is None else np.broadcast_to(chances, N)
            v = beta * r.sum(axis=0) / registered
            v = v + sum((h - beta * r[i]) / (registered * p[i]) for i, (h, _) in sent.items())
            for i, (h, _) in sent.items():
                r[i] = h
            x = x - lr(t) * K * v
        yield x


def fedvarp(clients, x, lr, course):
    """v = (1/S) sum_S (h_i - r_i) + (1/N) sum_all r_j."""
    r = np.zeros((N, n))
    for t, S, steps, forgotten, registered in course.rounds():
        r[forgotten] = 0
        if S:
            sent, remembered = plain(clients, x, lr, t, steps, S), r.sum(axis=0) / registered
            x = x - np.mean([g for _, g in sent.values()]) * (
                np.mean([h - r[i] for i, (h, _) in sent.items()], axis=0) + remembered
            )
            for i, (h, _) in sent.items():
                r[i] = h
        yield x


def feddyn(clients, x, lr, course, alpha):
    """Algorithm 1 of Acar et al. with gradient steps in place of the exact minimiser; l_i and H as in the paper."""
    lagrange, H = np.zeros((N, n)), np.zeros(n)
    for t, S, steps, *_ in course.rounds():
        if S:
            ys, start = {}, x
            for i in S:

                def direction(y, gradient, i=i, start=start):
                    return gradient - lagrange[i] + alpha * (y - start)

                ys[i], _ = clients.train(i, x, lr(t), steps[i], direction)
            for i, y in ys.items():
                lagrange[i] = lagrange[i] - alpha * (y - x)
            H = H - (alpha / N) * sum(y - x for y in ys.values())
            x = sum(ys.values()) / len(S) - H / alpha
        yield x


def accumulated(steps, rho):
    """|a|_1 of heavy-ball steps by its definition: the weights of the gradients in the sum."""
    return sum(sum(rho**j for j in range(steps - k)) for k in range(steps))


def fednova(clients, x, lr, course, rho=0.0):
    """Eq. 4 and 5 of Wang et al., with heavy-ball local steps."""
    for t, S, steps, *_ in course.rounds():
        if S:
            total, v, gamma = sum(clients.examples[i] for i in S), 0.0, 0.0
            for i in S:
                y, m = x, 0.0
                for _ in range(steps[i]):
                    m = rho * m + clients.gradient(i, y)
                    y = y - lr(t) * m
                p, length = clients.examples[i] / total, lr(t) * accumulated(steps[i], rho)
                v, gamma = v + p * (x - y) / length, gamma + p * length
            x = x - gamma * v
        yield x


def fedexp(clients, x, lr, course, epsilon=1e-3):
    """Algorithm 1 of Jhunjhunwala et al.: the rate follows from the moves' lengths and that of their mean."""
    for t, S, steps, *_ in course.rounds():
        if S:
            moves = [x - clients.train(i, x, lr(t), steps[i])[0] for i in S]
            D = np.mean(moves, axis=0)
            rate = sum(move @ move for move in moves) / (2 * len(S) * (D @ D + epsilon))
            x = x - max(1, rate) * D
        yield x


def fedacg(clients, x, lr, course, lam, beta):
    """Kim, Kim, Han: clients start from z = x + lam m, and are held to it; m' = lam m + mean (y - z); x' = x + m'."""
    m = np.zeros(n)
    for t, S, steps, *_ in course.rounds():
        if S:
            z = x + lam * m
            ys = [clients.train(i, z, lr(t), steps[i], lambda y, g, z=z: g + beta * (y - z))[0] for i in S]
            m = lam * m + np.mean([y - z for y in ys], axis=0)
            x = x + m
        yield x


def qfedavg(clients, x, lr, course, q):
    """Algorithm 2 of Li et al., with L = 1 / eta."""
    for t, S, steps, *_ in course.rounds():
        if S:
            L, D, c = 1 / lr(t), 0.0, 0.0
            for i in S:
                F, move = clients.loss(i, x), L * (x - clients.train(i, x, lr(t), steps[i])[0])
                D, c = D + F**q * move, c + q * F ** (q - 1) * move @ move + L * F**q
            x = x - D / c
        yield x


def fedau(clients, x, lr, course, cutoff):
    """Algorithms 1 and 2 of Wang and Ji; M, S and w of a client start when it joins."""
    M, S_n, w, here = np.zeros(N), np.zeros(N), np.ones(N), set(course.start)
    for t, S, steps, _, registered in course.rounds():
        for what, i in course.changes.get(t, ()):
            (here.add if what == "arrive" else here.remove)(i)
            M[i], S_n[i], w[i] = 0, 0, 1
        if S:
            sent = plain(clients, x, lr, t, steps, S)
            x = x - np.mean([g for _, g in sent.values()]) * sum(w[i] * h for i, (h, _) in sent.items()) / registered
        for i in here:
            S_n[i] += 1
            if i in S or S_n[i] == cutoff:
                w[i] = (M[i] * w[i] + S_n[i]) / (M[i] + 1)
                M[i], S_n[i] = M[i] + 1, 0
        yield x


def fedawe(clients, x, lr, course, eta):
    """Algorithm 1 of Xiang et al.; a client that joins starts from the present model."""
    own, tau = np.tile(x, (N, 1)), np.full(N, -1)
    for t, S, steps, *_ in course.rounds():
        for what, i in course.changes.get(t, ()):
            own[i], tau[i] = (x, t - 1) if what == "arrive" else (np.nan, t)
        if S:
            moves = {i: own[i] - clients.train(i, own[i], lr(t), steps[i])[0] for i in S}
            x = sum(own[i] - eta * (t - tau[i]) * move for i, move in moves.items()) / len(S)
            own[S], tau[S] = x, t
        yield x
