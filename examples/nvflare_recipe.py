"""The FedAvg recipe of NVFlare with MimiC; a second run resumes: python nvflare_recipe.py FOLDER ROUNDS"""

import sys
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from fedcore.adapters.nvflare import Aggregator

folder, rounds = Path(sys.argv[1]).absolute(), int(sys.argv[2])
recipe = FedAvgRecipe(
    name="digits",
    model={"class_path": "fedcore.sim.nets.build", "args": {"name": "mlp", "seed": 0}},
    min_clients=3,
    num_rounds=rounds,
    train_script=str(Path(__file__).with_name("nvflare_stock_client.py")),
    aggregator=Aggregator("MimiC", lr=0.1, storage={"path": str(folder / "rows"), "audit": True}),
)
run = recipe.execute(SimEnv(num_clients=3, workspace_root=str(folder / "workspace")))
print(run.get_status(), run.get_result())
