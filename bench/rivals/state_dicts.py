"""Averages of state_dicts by the frameworks and by torch loops."""

import torch

from bench.rivals.aggregate import models_and_weights, resnet18


def state_dicts(k, distinct):
    """Return k ResNet-18s of 62 tensors that cycle through ``distinct`` models in memory, and k weights."""
    models, _ = models_and_weights(distinct, resnet18())
    named = [{f"t{i}": torch.from_numpy(layer) for i, layer in enumerate(model)} for model in models]
    return [named[i % distinct] for i in range(k)], [10 + i for i in range(k)]


def torch_loop(models, weights):
    """Return a careful loop with one in-place addition per tensor."""
    total = sum(weights)

    def run():
        average = {}
        for name, first in models[0].items():
            average[name] = first * (weights[0] / total)
            for model, weight in zip(models[1:], weights[1:], strict=True):
                average[name].add_(model[name], alpha=weight / total)
        return list(average.values())

    return run


def usual_loop(models, weights):
    """Return the usual line of tutorials."""
    total = sum(weights)

    def run():
        pairs = [(model, weight / total) for model, weight in zip(models, weights, strict=True)]
        return [sum(model[name] * weight for model, weight in pairs) for name in models[0]]

    return run


def nvflare_helper(models, weights):
    """Return NVFlare 2.9's WeightedAggregationHelper on torch tensors."""
    from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

    def run():
        helper = WeightedAggregationHelper()
        for i, (model, weight) in enumerate(zip(models, weights, strict=True)):
            helper.add(model, weight, f"site-{i}", 0)
        return list(helper.get_result().values())

    return run


def fedlab_aggregate(models, weights):
    """Return FedLab 1.3's Aggregators.fedavg_aggregate on flat models."""
    from bench.peers.torchvision_ops import declare

    declare()
    from fedlab.utils.aggregator import Aggregators

    flat = {id(model): torch.cat([tensor.reshape(-1) for tensor in model.values()]) for model in models}
    rows = [flat[id(model)] for model in models]
    sizes = [tensor.numel() for tensor in models[0].values()]

    def run():
        return list(Aggregators.fedavg_aggregate(rows, weights).split(sizes))

    return run
