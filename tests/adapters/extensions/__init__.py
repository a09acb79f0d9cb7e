"""Extension points of the frameworks: a module for each framework runs its own loop with a user's code in it."""

BOTH, AGGREGATOR, CONTROLLER = ("aggregator", "controller"), ("aggregator",), ("controller",)
CASES = {
    "nvflare": {
        "nothing": BOTH,
        "Checkpoint": BOTH,
        "Sampling": BOTH,
        "Drawn": BOTH,
        "Config": BOTH,
        "OwnRun": AGGREGATOR,
        "ChangedModel": BOTH,
        "ChangedInPlace": BOTH,
        "ChangedUpdate": BOTH,
        "stop_cond": AGGREGATOR,
        "patience": AGGREGATOR,
        "model": AGGREGATOR,
        "AFTER_AGGREGATION": BOTH,
        "IntimeModelSelector": BOTH,
        "subclass of the aggregator": AGGREGATOR,
        "ScatterAndGather": AGGREGATOR,
        "shareable generator": AGGREGATOR,
        "PercentilePrivacy": BOTH,
        "SVTPrivacy": BOTH,
        "filter of tasks": BOTH,
    },
}
"""By framework and extension point: fedcore's classes that have it. The module has a run for each in ``RUNS``."""
