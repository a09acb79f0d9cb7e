from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp

from digits_app.model import make_module
from fedcore.adapters.flower import MimiC

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    strategy = MimiC(  # was: flwr.serverapp.strategy.FedAvg(min_available_nodes=config["nodes"])
        lr=config["lr"], storage=config["state"], min_available_nodes=config["nodes"]
    )
    result = strategy.start(grid, ArrayRecord(make_module().state_dict()), num_rounds=config["rounds"])
    for report in strategy.reports[-1:]:  # none where an earlier run has done all rounds
        print("heard", sorted(report.accepted), "refused", report.rejected)
        print("on the nodes", result.evaluate_metrics_clientapp[config["rounds"]])
