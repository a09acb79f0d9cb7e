"""Weighted sums of clients' models without fedcore."""

import numpy as np
import torch


def rows_and_weights(k, n):
    """Return k separate rows float32[n], and weights float32[k]."""
    rng = np.random.default_rng(0)
    return [rng.random(n, dtype=np.float32) for _ in range(k)], rng.random(k, dtype=np.float32)


def models_and_weights(k, sizes):
    """Return k models with one array per size, and weights float32[k]."""
    rng = np.random.default_rng(0)
    return [[rng.random(n, dtype=np.float32) for n in sizes] for _ in range(k)], rng.random(k, dtype=np.float32)


def resnet18():
    """Return the sizes of a ResNet-18's 62 tensors: 11,689,512 parameters."""
    sizes = [3 * 64 * 49, 64, 64]
    for before, width in ((64, 64), (64, 128), (128, 256), (256, 512)):
        for into in (before, width):
            sizes += [9 * into * width, width, width, 9 * width * width, width, width]
            if into != width:
                sizes += [into * width, width, width]
    return [*sizes, 512 * 1000, 1000]


def torch_add(rows, weights):
    """Return a function that adds rows in place, one by one, as a careful torch loop does."""
    tensors, factors = [torch.from_numpy(row) for row in rows], weights.tolist()
    total = torch.empty(len(rows[0]))

    def run():
        total.zero_()
        for tensor, factor in zip(tensors, factors, strict=True):
            total.add_(tensor, alpha=factor)
        return total

    return run


def torch_add_tensors(models, weights):
    """Return a function that adds models of many tensors in place, tensor by tensor."""
    tensors, factors = [[torch.from_numpy(layer) for layer in model] for model in models], weights.tolist()
    totals = [torch.empty(len(layer)) for layer in models[0]]

    def run():
        for layer, total in enumerate(totals):
            total.zero_()
            for model, factor in zip(tensors, factors, strict=True):
                total.add_(model[layer], alpha=factor)
        return totals

    return run
