"""MimiC with four sites in NVFlare's simulator, three per round; run it again with more rounds to resume.

python nvflare_job.py METHOD ROUNDS FOLDER [ACCUMULATOR]
"""

import sys
from pathlib import Path

from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner

from fedcore.adapters.nvflare import Controller

method, rounds, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).absolute()
job = FedJob(name="digits")
model = {"class_path": "fedcore.sim.nets.build", "args": {"name": "mlp", "seed": 0}}
persistor = job.to_server(PTFileModelPersistor(model=model), id="persistor")
rows = str(folder / "rows")
options = {"compute": {"accumulator": sys.argv[4]}} if len(sys.argv) > 4 else {}
server = Controller(method, lr=0.1, num_rounds=rounds, num_clients=3, storage=rows, persistor_id=persistor, **options)
job.to_server(server)
job.to_clients(ScriptRunner(str(Path(__file__).with_name("nvflare_client.py")), "4"))
job.simulator_run(str(folder / "workspace"), n_clients=4, threads=4)
