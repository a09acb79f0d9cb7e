"""The parts that a job of NVFlare loads: its workflow, and a site's script without fedcore."""

import nvflare.client as flare
from nvflare.app_common.workflows.fedavg import FedAvg

from tests.conformance.clients import STEPS, trained_tensors


class FromDisk(FedAvg):
    """NVFlare's workflow, which stops if a result's tensors are not on the disk."""

    def _aggregate_one_result(self, result):
        if not all(hasattr(tensor, "materialize") for tensor in result.params.values()):
            self.system_panic("expected tensors on the disk", self.fl_ctx)
        return super()._aggregate_one_result(result)


if __name__ == "__main__":
    flare.init()
    number = int(flare.get_site_name().removeprefix("site-")) - 1
    while flare.is_running() and (received := flare.receive()) is not None:
        y = trained_tensors(received.params, number)
        flare.send(flare.FLModel(params=y, meta={"NUM_STEPS_CURRENT_ROUND": STEPS[number]}))
