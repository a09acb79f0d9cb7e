from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from model import make_module

from fedcore.adapters.flower import MimiC

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = MimiC(lr=0.3, store="mmap:state")  # was: flwr.serverapp.strategy.FedAvg()
    result = strategy.start(grid, ArrayRecord(make_module().state_dict()), num_rounds=20)
    print(strategy.reports[-1].heard, strategy.reports[-1].refused, result.arrays.count_bytes())
