"""With exact sums the order in which NVFlare's sites answer shows in nothing; else it does."""

import hashlib

import numpy as np
import pytest
from nvflare.app_common.abstract.fl_model import FLModel

from fedcore.adapters.nvflare import Aggregator
from tests.adapters.nvflare.local import LocalController, wired
from tests.adapters.nvflare.sites import NAMES, ROUNDS, sites, x0

MANY = [f"site-{i}" for i in range(8)]


class ShuffledController(LocalController):
    """Sites answer once all were asked, in an order of chance."""

    def __init__(self, seed, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.chance, self.asked, self.arrived = np.random.default_rng(seed), [], []

    def send_model(self, task_name, data, targets, timeout, callback):
        self.asked += [(task_name, data, [name], timeout, callback) for name in targets]

    def get_num_standing_tasks(self):
        asked, self.asked = self.asked, []
        for i in self.chance.permutation(len(asked)):
            self.arrived.append(asked[i][2][0])
            super().send_model(*asked[i])
        return 0


@pytest.mark.parametrize("name", ["FedAvg", "MIFA", "MimiC", "SCAFFOLD"])
def test_sites_in_any_order_give_the_same_bits(name):
    found, orders = set(), set()
    for seed in range(6):
        controller = ShuffledController(
            seed, sites(), x0(), name, lr=0.1, num_rounds=ROUNDS, compute={"accumulator": "exact"}
        )
        controller.run()
        server = controller.server
        rows = [server.store.read(site).tobytes() for site in NAMES if server.algorithm.keeps_rows]
        norms = [report.norms.tobytes() for report in controller.reports]
        found.add(hashlib.sha256(b"".join([server.x.tobytes(), *rows, *norms])).hexdigest())
        orders.add(tuple(controller.arrived))
    assert len(orders) == 6
    assert len(found) == 1


def test_answers_to_an_aggregator_in_any_order_give_the_same_bits_and_in_other_sums_they_do_not():
    def models(accumulate):
        found = set()
        for seed in range(8):
            aggregator = Aggregator("FedAvg", model=x0(), clients=MANY, compute={"accumulator": accumulate})
            for t in range(2):
                aggregator.reset_stats()
                for i in np.random.default_rng([seed, t]).permutation(len(MANY)):
                    rng = np.random.default_rng([t, i])
                    params = {key: rng.normal(size=array.shape).astype(np.float32) for key, array in x0().items()}
                    meta = {"client_name": MANY[i], "NUM_STEPS_CURRENT_ROUND": 5, "fedcore": {"examples": 10 + int(i)}}
                    aggregator.accept_model(wired(FLModel(params=params, meta=meta)))
                result = aggregator.aggregate_model()
            found.add(b"".join(array.tobytes() for array in result.params.values()))
        return len(found)

    assert models("exact") == 1
    assert models("float32") > 1
