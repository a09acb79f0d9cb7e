"""Extension points of the frameworks: a module for each framework runs its own loop with a user's code in it."""


def _named(sides, names):
    return dict.fromkeys(names.split(", "), sides)


CASES = {
    "nvflare": _named(
        ("aggregator", "controller"),
        "nothing, Checkpoint, Sampling, Drawn, Config, ChangedModel, ChangedInPlace, ChangedUpdate, "
        "AFTER_AGGREGATION, IntimeModelSelector, MetricsArtifactWriter, PercentilePrivacy, SVTPrivacy, filter of tasks",
    )
    | _named(
        ("aggregator",),
        "OwnRun, stop_cond, patience, model, subclass of the aggregator, ScatterAndGather, late results, "
        "shareable generator",
    ),
    "pfl": _named(
        ("method",),
        "nothing, evaluation, callback that changes the model, early stopping, restored run, "
        "schedule of the rate, schedule of the cohort, postprocessor of users, postprocessor of the sum, "
        "WeightByDatapoints, local privacy, central privacy, central privacy of weights, "
        "subclass of the algorithm, FedProx, central SGD, central Adam",
    ),
    "fedlab": _named(
        ("handler",),
        "Plain, ChangedModel, ChangedParameters, GlobalUpdate, ReadsBuffer, FilteredBuffer, ChangedBuffer, Load, "
        "OwnLoad, Sampling, Filtered, Stops, Downlink, ChangedDownlink, Optim, Powerofchoice, trainer",
    ),
    "appfl": _named(
        ("aggregator",), "nothing, equal weights, Changes, Filters, First, Logs, scheduler, send_gradient: false"
    ),
}
"""By framework and extension point: fedcore's classes that have it. The module has a run for each in ``RUNS``."""
