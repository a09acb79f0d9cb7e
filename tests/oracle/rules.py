"""Reference implementations of the robust rules: float64, straight from the papers, without inner products."""

import numpy as np

from fedcore.arrays import F64


def trimmed_mean(h: F64, f: int) -> F64:
    """Return the mean of each column without its f smallest and f largest values."""
    return np.asarray(np.sort(h, axis=0)[f : len(h) - f].mean(axis=0))


def median(h: F64) -> F64:
    """Return the median of each column."""
    return np.asarray(np.median(h, axis=0))


def near_median(h: F64, m: int) -> F64:
    """Return the mean of the m values of each column nearest the median; of ties, the mean of both choices."""
    orders = (np.lexsort((sign * h, abs(h - median(h))), axis=0) for sign in (1, -1))
    return np.asarray(np.mean([np.take_along_axis(h, order[:m], axis=0).mean(axis=0) for order in orders], axis=0))


def distances(h: F64) -> F64:
    """Return |h_i - h_j|^2."""
    return np.asarray(((h[:, None] - h[None]) ** 2).sum(axis=-1))


def krum(h: F64, f: int, m: int = 1) -> F64:
    """Return the mean of the m vectors with the least sum of squared distances to k - f - 2 others."""
    return np.asarray(h[ranking(h, f)[:m]].mean(axis=0))


def ranking(h: F64, f: int) -> list[int]:
    """Return the vectors in the order of Krum's scores."""
    others = [np.sort(np.delete(row, i))[: max(1, len(h) - f - 2)] for i, row in enumerate(distances(h))]
    return sorted(range(len(h)), key=lambda i: others[i].sum())


def bulyan(h: F64, f: int) -> F64:
    """Choose k - 2 f vectors by repeated Krum; return the mean of the k - 4 f values nearest the median."""
    left, chosen = list(range(len(h))), []
    while len(chosen) < len(h) - 2 * f:
        chosen.append(left.pop(ranking(h[left], f)[0]))
    return near_median(h[sorted(chosen)], len(h) - 4 * f)


def geometric_median(h: F64, passes: int, nu: float) -> F64:
    """Return z after some passes of Weiszfeld from the mean."""
    z = h.mean(axis=0)
    for _ in range(passes):
        far = np.linalg.norm(h - z, axis=1)
        w = 1 / np.maximum(far, nu * np.sort(far)[(len(h) - 1) // 2])
        z = (w[:, None] * h).sum(axis=0) / w.sum()
    return np.asarray(z)


def clipped(h: F64, most: float) -> F64:
    """Return the vectors, scaled to a norm of at most ``most``."""
    return h * np.minimum(1, most / np.maximum(np.linalg.norm(h, axis=1), 1e-300))[:, None]


def centred_clipping(h: F64, tau: float, passes: int, z: F64) -> F64:
    """Return z after some passes of centred clipping."""
    for _ in range(passes):
        z = z + clipped(h - z, tau).mean(axis=0)
    return z


def clip_norm(h: F64) -> F64:
    """Return the mean of the vectors, clipped to their lower median norm."""
    norms = np.sort(np.linalg.norm(h, axis=1))
    return np.asarray(clipped(h, norms[(len(h) - 1) // 2]).mean(axis=0))


def nearest_neighbor_mixing(h: F64, f: int) -> F64:
    """Return the mean of each vector's k - f nearest ones."""
    return np.array([h[np.argsort(row, kind="stable")[: len(h) - f]].mean(axis=0) for row in distances(h)])
