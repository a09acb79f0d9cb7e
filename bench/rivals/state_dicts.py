"""Averages of state_dicts as the frameworks make them, and as one would write them in torch."""

import torch

from bench.rivals.aggregate import models_and_weights, resnet18


def state_dicts(k, distinct):
    """k ResNet-18s of 62 tensors, of which ``distinct`` lie apart in memory and come again in turn, and k weights."""
    models, _ = models_and_weights(distinct, resnet18())
    named = [{f"t{i}": torch.from_numpy(layer) for i, layer in enumerate(model)} for model in models]
    return [named[i % distinct] for i in range(k)], [10 + i for i in range(k)]


def torch_loop(models, weights):
    """The careful loop: one in-place addition a tensor."""
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
    """The line in most tutorials."""
    total = sum(weights)

    def run():
        pairs = [(model, weight / total) for model, weight in zip(models, weights, strict=True)]
        return [sum(model[name] * weight for model, weight in pairs) for name in models[0]]

    return run


def nvflare_helper(models, weights):
    """NVFlare 2.9's WeightedAggregationHelper, torch tensors."""
    from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

    def run():
        helper = WeightedAggregationHelper()
        for i, (model, weight) in enumerate(zip(models, weights, strict=True)):
            helper.add(model, weight, f"site-{i}", 0)
        return list(helper.get_result().values())

    return run


def fedlab_aggregate(models, weights):
    """FedLab 1.3's Aggregators.fedavg_aggregate, whose models come flat."""
    from bench.peers.torchvision_ops import declare

    declare()
    from fedlab.utils.aggregator import Aggregators

    flat = {id(model): torch.cat([tensor.reshape(-1) for tensor in model.values()]) for model in models}
    rows = [flat[id(model)] for model in models]
    sizes = [tensor.numel() for tensor in models[0].values()]

    def run():
        return list(Aggregators.fedavg_aggregate(rows, weights).split(sizes))

    return run
