from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp

from digits_app.model import make_module
from fedcore.adapters.flower import MimiC

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    strategy = MimiC(  # instead of flwr.serverapp.strategy.FedAvg(min_available_nodes=config["nodes"])
        lr=config["lr"], storage=config["state"], min_available_nodes=config["nodes"]
    )
    result = strategy.start(grid, ArrayRecord(make_module().state_dict()), num_rounds=config["rounds"])
    for report in strategy.reports[-1:]:  # empty if an earlier run has finished all rounds
        print("accepted", sorted(report.accepted), "rejected", report.rejected)
        print("on the nodes", result.evaluate_metrics_clientapp[config["rounds"]])
