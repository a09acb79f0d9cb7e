"""A job in NVFlare's simulator with a user's workflow, persistor's locator, filter, sites' settings and ModelLearner.

``python -m tests.adapters.nvflare.override_job SIDE FOLDER`` writes the last model. As a script of a site, its
argument is the site's setting.
"""

import sys
import time
from pathlib import Path

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model_learner import ModelLearner
from nvflare.app_common.workflows.fedavg import FedAvg

from fedcore.adapters.nvflare import Controller

ROUNDS = 3


class Overrides:
    """The model is changed after each round; a site is left out in each round; checkpoints of the user."""

    def sample_clients(self, num_clients=None):
        while len(names := sorted(client.name for client in self.engine.get_clients())) < 3:
            time.sleep(0.2)
        return [name for k, name in enumerate(names) if k != self.current_round % 3]

    def update_model(self, model, aggr_result):
        model = super().update_model(model, aggr_result)
        model.params = {name: (0.5 * x + 0.25).astype(np.float32) for name, x in model.params.items()}
        return model

    def save_model(self, model):
        np.save(Path(self.get_run_dir()) / f"round{model.current_round}.npy", next(iter(model.params.values())))
        super().save_model(model)


class OwnFedAvg(Overrides, FedAvg):
    pass


class OwnController(Overrides, Controller):
    pass


class Learner(ModelLearner):
    def train(self, model):
        return difference(model, 3.0)


def difference(received, setting):
    """A site's result: its setting decides the difference and the weight."""
    step = {name: np.float32(setting) * (np.arange(x.size, dtype=np.float32).reshape(x.shape) - x) / 10
            for name, x in received.params.items()}  # fmt: skip
    return FLModel(ParamsType.DIFF, step, meta={"NUM_STEPS_CURRENT_ROUND": int(setting)})


def play(side, folder):
    from nvflare.app_common.executors.model_learner_executor import ModelLearnerExecutor
    from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
    from nvflare.app_common.np.np_model_persistor import NPModelPersistor
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.defs import FilterType
    from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

    from fedcore.adapters.nvflare import Aggregator

    job = FedJob("overrides")
    persistor = job.to_server(NPModelPersistor(), id="persistor")
    how = {"num_rounds": ROUNDS, "persistor_id": persistor}
    if side == "controller":
        job.to_server(OwnController("FedAvg", **how))
    else:
        job.to_server(
            OwnFedAvg(num_clients=3, aggregator=Aggregator("FedAvg") if side == "aggregator" else None, **how)
        )
    for number in (1, 2):
        job.to(ScriptRunner(__file__, str(number), framework=FrameworkType.NUMPY), f"site-{number}")
    job.to(Learner(), "site-3", id="learner")
    job.to(ModelLearnerExecutor(learner_id="learner"), "site-3", tasks=["train"])
    for number in (1, 2, 3):
        job.to(PercentilePrivacy(30, 0.2), f"site-{number}", filter_type=FilterType.TASK_RESULT, tasks=["train"])
    job.simulator_run(str(folder / "workspace"), n_clients=None, threads=3)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        play(sys.argv[1], Path(sys.argv[2]))
    else:
        import nvflare.client as flare

        flare.init()
        while flare.is_running() and (received := flare.receive()) is not None:
            flare.send(difference(received, float(sys.argv[1])))
