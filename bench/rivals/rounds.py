"""A round in torch: the step, the norms of all updates, and the check of every number."""

import torch


def torch_round(rows, weights):
    """Return a function that computes the mean of the models, their distances from x, and the finite check."""
    tensors, x = [torch.from_numpy(row) for row in rows], torch.zeros(len(rows[0]))

    def run():
        acc = torch.zeros_like(x)
        for y, weight in zip(tensors, weights.tolist(), strict=True):
            acc.add_(y, alpha=weight)
        norms = [y.norm() for y in tensors]
        finite = torch.isfinite(acc).all().item()
        return acc, norms, finite, (acc - x).norm()

    return run


def torch_round_with_rows(rows, weights):
    """Return such a function for a method with a row per client: x moves by a running sum of the rows' changes."""
    tensors, x = [torch.from_numpy(row) for row in rows], torch.zeros(len(rows[0]))
    kept, total = [torch.zeros_like(x) for _ in rows], torch.zeros_like(x, dtype=torch.float64)

    def run():
        norms = []
        for y, row in zip(tensors, kept, strict=True):
            h = x - y
            norms.append(h.norm())
            total.add_(h).sub_(row)
            row.copy_(h)
        moved = x - (total / len(kept)).float()
        finite = torch.isfinite(moved).all().item()
        return moved, norms, finite, (moved - x).norm()

    return run
