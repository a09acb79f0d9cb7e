"""Wrong results of other frameworks, next to the expected results and those of fedcore.

    python -m bench.peers.wrong_results --fedml WHEEL --appfl WHEEL --byzfl WHEEL --into bench/peers/wrong_results.md

The frameworks' own functions compute every result, in the versions that the table lists. FedML and APPFL have 60 and
170 dependencies, so the required modules are loaded from the wheels (``pip download --no-deps fedml==0.9.6
appfl==1.12.0 byzfl==0.0.11``) without running the packages' ``__init__``. APPFL's need ``pip install omegaconf``.
"""

import argparse
import logging
import sys
import tempfile
import types
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fedcore import Storage

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402

import fedcore  # noqa: E402
from fedcore.algorithms import SCAFFOLD  # noqa: E402

LR, STEPS = 0.05, 10
USERS = {"0": (1.0, 0.0), "1": (10.0, 1.0)}  # h and a of the loss h/2 (w - a)^2
OPTIMUM = sum(h * a for h, a in USERS.values()) / sum(h for h, _ in USERS.values())


@dataclass
class Row:
    """A row: a framework, a computation, the expected result, the framework's result and fedcore's."""

    peer: str
    what: str
    due: str
    theirs: str
    ours: str


def version(package):
    return f"{package} {metadata.version(package)}"


def shown(number):
    return f"{number:.4g}"


def steps_of(user, x, offset):
    """STEPS local steps of a user from x, along its gradient and the offset."""
    h, a = USERS[user]
    y = float(x)
    for _ in range(STEPS):
        y -= LR * (h * (y - a) + offset)
    return np.float32([y])


def fedcore_scaffold(rounds, cohort=lambda round: list(USERS)):
    server = fedcore.Server(np.zeros(1, np.float32), "SCAFFOLD", list(USERS), lr=LR)
    for number in range(rounds):
        sent = server.broadcast(cohort(number))
        with server.open_round() as opened:
            for user in sent.ids:
                offset = sent.offset(user)
                opened.add(user, steps_of(user, sent.x[0], 0.0 if offset is None else float(offset[0])), steps=STEPS)
    return server


def alternating(round):
    return [list(USERS)[round % 2]]


def rows_mean(server):
    """Return the mean of all c_i."""
    return float(np.mean([server.store.read(user)[0] for user in USERS]))


def control(server):
    """Return c as the next clients receive it: their offset is c - c_i."""
    return float(server.broadcast(["0"]).offset("0")[0] + server.store.read("0")[0])


def restored(server):
    """Return the server, reloaded from a copy on disk."""
    with tempfile.TemporaryDirectory() as folder:
        server.save(Path(folder) / "state")
        return fedcore.Server.load(Path(folder) / "state", storage=Storage(medium="ram"))


def described(value):
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{value.item():g} ({dtype})" if value.shape == () else dtype


def outcome(work):
    """Return the result of a call, or its error."""
    try:
        return work()
    except Exception as error:  # whatever it is, it is the result
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"


def nan_among_two(average):
    models = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([float("nan")])}]
    return f"average {average(models)['w'].item()}", outcome(lambda: str(fedcore.aggregate(models)))


def pfl_scaffold():
    """pfl's SCAFFOLD adds server_c - local_c to the gradient, while both hold minus the gradient."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm import scaffold
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.data.user_state import InMemoryUserStateStorage
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    class Quadratic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def loss(self, h, a, eval=False):
            return (0.5 * h * (self.w - a) ** 2).mean()

        def metrics(self, h, a, eval=False):
            return {}

    def users():
        def user(name):
            return Dataset([np.float32([[number]]) for number in USERS[name]], user_id=name)

        return FederatedDataset(user, get_user_sampler("minimize_reuse", list(USERS)))

    ours = shown(float(fedcore_scaffold(60).x[0]))
    for option, gradients in (("I", True), ("II", False)):
        np.random.seed(0)
        module, algorithm = Quadratic(), scaffold.SCAFFOLD()
        params = scaffold.SCAFFOLDParams(
            central_num_iterations=60,
            evaluation_frequency=1000,
            train_cohort_size=2,
            val_cohort_size=None,
            population=2,
            use_gradient_as_control_variate=gradients,
            user_state_storage=InMemoryUserStateStorage(),
        )
        model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
        train = NNTrainHyperParams(local_num_epochs=STEPS, local_learning_rate=LR, local_batch_size=1)
        algorithm.run(params, SimulatedBackend(users(), users()), model, train, send_metrics_to_platform=False)
        what = f"SCAFFOLD, option {option}: w after 60 rounds of two quadratic users"
        yield Row(version("pfl"), what, f"{OPTIMUM:.4f}", shown(module.w.item()), ours)
    with tempfile.TemporaryDirectory() as folder:
        algorithm.save(folder)
        kept = "".join(file.read_text() for file in Path(folder).iterdir())
        again = scaffold.SCAFFOLD()
        again.load(folder)
    before = fedcore_scaffold(3)
    theirs = f"`{kept}`; server_c is {'present' if hasattr(again, '_server_c') else 'missing'}"
    what = "SCAFFOLD's server control after `save` and `load`"
    yield Row(version("pfl"), what, "unchanged", theirs, f"{control(restored(before)):.6g}, was {control(before):.6g}")


def pfl_storage():
    from pfl.data.user_state import DiskUserStateStorage
    from pfl.internal.ops import pytorch_ops
    from pfl.internal.ops.selector import set_framework_module
    from pfl.stats import MappedVectorStatistics

    from fedcore.adapters.pfl import ClientStoreUserState

    set_framework_module(pytorch_ops)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for storage in (DiskUserStateStorage(folder), ClientStoreUserState(Path(folder) / "rows")):
            storage.save_state(MappedVectorStatistics({"w": torch.ones(2)}), "0", "c")
            found.append(outcome(lambda each=storage: str(each.load_state("0", "c")["w"].tolist())))
    peers = f"{version('pfl')}, {version('torch')}"
    yield Row(peers, "a user's state reloaded from the disk storage", "[1.0, 1.0]", *found)


class Point(torch.nn.Module):
    """A model of one number."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))


class NVFlareScaffold:
    """NVFlare's client helper and server functions with the two users."""

    def __init__(self):
        from nvflare.app_opt.pt.scaffold import PTScaffoldHelper

        self.models = {user: Point() for user in USERS}
        self.helpers = {user: PTScaffoldHelper() for user in USERS}
        for user, helper in self.helpers.items():
            helper.init(self.models[user])
        self.x, self.c = np.zeros(1, np.float32), np.zeros(1, np.float32)

    def train(self, user):
        from nvflare.app_common.abstract.fl_model import FLModel
        from nvflare.app_common.app_constant import AlgorithmConstants

        model, helper, start, (h, a) = self.models[user], self.helpers[user], Point(), USERS[user]
        model.w.data[:] = start.w.data[:] = float(self.x[0])
        helper.load_global_controls({"w": self.c})
        controls = helper.get_params()
        for _ in range(STEPS):
            model.w.data -= LR * h * (model.w.data - a)
            helper.model_update(model, LR, *controls)
        helper.terms_update(model, LR, *controls, start)
        meta = {"client_name": user, AlgorithmConstants.SCAFFOLD_CTRL_DIFF: helper.get_delta_controls()}
        return FLModel(params={"w": model.w.detach().numpy().copy()}, meta=meta)

    def round(self, users):
        from nvflare.app_common.app_constant import AlgorithmConstants
        from nvflare.app_common.workflows.scaffold import _add_control_delta, scaffold_aggregate_fn

        done = scaffold_aggregate_fn([self.train(user) for user in users])
        self.x = done.params["w"]
        self.c = _add_control_delta(self.c, np.asarray(done.meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF]["w"]))

    @property
    def mean(self):
        return float(np.mean([helper.c_local.state_dict()["w"] for helper in self.helpers.values()]))


def nvflare():
    """The server adds the cohort's mean of c_i+ - c_i without the factor S/N, and loses c at the end of the job."""
    from nvflare.app_common.abstract.fl_model import FLModel
    from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
    from nvflare.app_common.workflows.scaffold import Scaffold

    name, theirs = version("nvflare"), NVFlareScaffold()
    theirs.round(["1"])
    first, ours = float(theirs.c[0]), fedcore_scaffold(1, lambda round: ["1"])
    what = "SCAFFOLD's c after a round with 1 of 2 clients; expected: the mean of c_1 and 0"
    yield Row(name, what, shown(theirs.mean), shown(first), shown(control(ours)))

    theirs = NVFlareScaffold()
    for number in range(4):
        theirs.round(alternating(number))
    ours = fedcore_scaffold(4, alternating)
    what = "SCAFFOLD's c minus the mean of all c_i, after 4 rounds with one client each"
    yield Row(name, what, "0", shown(float(theirs.c[0]) - theirs.mean), shown(control(ours) - rows_mean(ours)))

    class SecondJob(Scaffold):
        def start_controller(self, fl_ctx):
            pass  # nothing of it but the engine's components

        def load_model(self):
            return FLModel(params={"w": theirs.x.copy()})  # what the first job's persistor kept

    job = SecondJob(num_clients=2)
    job.initialize(types.SimpleNamespace(get_engine=object))
    again = restored(ours)
    what = "SCAFFOLD's c in the resumed job"
    kept = f"{shown(float(job._global_ctrl_weights['w'][0]))}, was {shown(float(theirs.c[0]))}"
    yield Row(name, what, "unchanged", kept, f"{shown(control(again))}, was {shown(control(ours))}")

    helper = WeightedAggregationHelper()
    for site, seen in (("a", 3), ("b", 5)):
        helper.add({"seen": torch.tensor(seen)}, 10.0, site, 0)
    their_seen = helper.get_result()["seen"]
    ours = fedcore.aggregate([{"seen": torch.tensor(seen)} for seen in (3, 5)])["seen"]
    yield Row(name, "the average of int64 counters 3 and 5", "int64", described(their_seen), described(ours))
    yield Row(name, "two models, one with a NaN", "rejected", *nan_among_two(nvflare_average))
    for what, due, buffers in (FRESH, STILL):
        yield Row(name, f"`BuffModelManager`, {what}", due, nvflare_buffers(buffers), ours_of(buffers))


FIRST = [("a", 0, 1.0), ("b", 0, 3.0)]
FRESH = "FedBuff with K = 2: two fresh updates move x = 0 to 1 and to 3", "2", [FIRST]
STILL = (
    "FedBuff with K = 2: of two updates that move x = 0 to 1, one is late by a round; s = (1 + tau)^-1/2",
    shown((2**-0.5 + 1) / 2),
    [[("a", 0, 0.0), ("b", 0, 0.0)], [("a", 0, 1.0), ("b", 1, 1.0)]],
)
LATE = (
    "FedBuff with K = 2: a late update moves x = 0 to 1, a fresh one x = 2 to 4; s = (1 + tau)^-1/2",
    shown(2 + (2**-0.5 + 2) / 2),
    [FIRST, [("a", 0, 1.0), ("b", 1, 4.0)]],
)
"""Cases of FedBuff: the text, the expected x, and buffers of updates (client, start round, model)."""


def ours_of(buffers):
    policy = fedcore.RoundPolicy(buffer=2, max_staleness=1, discount=0.5)
    server = fedcore.Server(np.zeros(1, np.float32), "FedAvg", ["a", "b"], lr=1.0, policy=policy)
    for buffer in buffers:
        server.push([fedcore.Update(client, np.float32([y]), 1, round=start) for client, start, y in buffer])
    return shown(server.x[0])


def nvflare_buffers(buffers):
    """NVFlare counts the new version before it computes ages, and weights an update by 1 / (1 + sqrt(age))."""
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.fl_context import FLContext
    from nvflare.edge.assessors.buff_model_manager import BuffModelManager
    from nvflare.edge.mud import ModelUpdate

    manager, context = BuffModelManager(2, staleness_weight=True), FLContext()
    manager.fire_event = lambda *_: None  # no engine
    manager.initialize_model(DXO(DataKind.WEIGHTS, data={"w": np.zeros(1)}), context)
    manager.generate_new_model(context)  # version 1 has the first weights
    xs = [0.0]
    for buffer in buffers:
        for client, start, y in buffer:
            update = DXO(DataKind.WEIGHT_DIFF, data={"dict": {"w": np.array([y - xs[start]])}}).to_shareable()
            manager.process_updates({start + 1: ModelUpdate(start + 1, update, {client: 0.0})}, context)
        xs.append(float(manager.current_model.data["w"][0]))
    return shown(xs[-1])


def loaded(wheel, package, *modules):
    """Let modules be imported from a wheel without the ``__init__`` of their packages."""
    for name in (package, *(f"{package}.{module}" for module in modules)):
        module = types.ModuleType(name)
        module.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
        sys.modules[name] = module


def appfl(wheel):
    """APPFL takes the difference to the present x, and divides by the number of all clients, not by K."""
    from omegaconf import DictConfig

    loaded(wheel, "appfl", "algorithm", "algorithm.aggregator", "misc")
    sys.path.append(str(wheel))
    package = sys.modules["appfl.algorithm.aggregator"]
    from appfl.algorithm.aggregator.base_aggregator import BaseAggregator

    package.BaseAggregator = BaseAggregator
    from appfl.algorithm.aggregator.fedasync_aggregator import FedAsyncAggregator

    package.FedAsyncAggregator = FedAsyncAggregator
    from appfl.algorithm.aggregator.fedbuff_aggregator import FedBuffAggregator

    name = Path(wheel).name.split("-py")[0].replace("-", " ")
    for clients, (what, due, buffers) in ((10, FRESH), (2, LATE)):
        law = {"staleness_fn": "polynomial", "staleness_fn_kwargs": {"a": 0.5}}
        aggregator = FedBuffAggregator(Point(), DictConfig({"K": 2, "alpha": 1.0, "num_clients": clients} | law))
        for buffer in buffers:
            for client, _, y in buffer:
                found = aggregator.aggregate(client, {"w": torch.tensor([y])})
        what = f"`FedBuffAggregator` with {clients} clients, {what}"
        yield Row(name, what, due, shown(found["w"].item()), ours_of(buffers))


def nvflare_average(models):
    from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

    helper = WeightedAggregationHelper()
    for site, model in enumerate(models):
        helper.add(model, 1.0, str(site), 0)
    return helper.get_result()


def flower():
    """Flower multiplies everything by a Python float, and cannot send dtypes that NumPy does not have."""
    from flwr.app import ArrayRecord
    from flwr.server.strategy.aggregate import aggregate

    name = version("flwr")
    [theirs] = aggregate([([np.array(3)], 10), ([np.array(5)], 10)])
    ours = fedcore.aggregate([{"seen": np.array(seen)} for seen in (3, 5)])["seen"]
    yield Row(name, "`aggregate` of int64 counters 3 and 5", "int64", described(theirs), described(ours))
    big = [np.array(2**53 + 1), np.array(2**53 + 1)]
    [theirs] = aggregate([([array], 1) for array in big])
    ours = fedcore.aggregate([{"seen": array} for array in big])["seen"]
    yield Row(name, "the average of two counters of 2^53 + 1", str(2**53 + 1), str(int(theirs)), str(int(ours)))
    half = {"w": torch.ones(2, dtype=torch.bfloat16)}
    theirs = outcome(lambda: described(ArrayRecord(half)["w"].numpy()))
    ours = fedcore.aggregate([half, half])["w"]
    yield Row(name, "a bfloat16 state_dict in a message, averaged", "bfloat16", theirs, described(ours))

    def average(models):
        [mean] = aggregate([([model["w"].numpy()], 1) for model in models])
        return {"w": mean}

    yield Row(name, "two models, one with a NaN", "rejected", *nan_among_two(average))
    yield Row(name, *krum_of_close_models())


def krum_of_close_models():
    """Flower computes |a|^2 + |b|^2 - 2 ab in float32, where close models far from zero cancel."""
    from flwr.app import ArrayRecord, RecordDict
    from flwr.serverapp.strategy.multikrum import select_multikrum

    rng = np.random.default_rng(11)
    models = [np.float32(100 + 1e-3 * rng.normal(size=10_000)) for _ in range(10)]
    models[9] += np.float32(0.02)
    [chosen] = select_multikrum([RecordDict({"x": ArrayRecord([model])}) for model in models], 1, 1)
    server = fedcore.Server(np.zeros(10_000, np.float32), "FedAvg", 10, lr=1.0, aggregation="Krum")
    server.round([fedcore.Update(client, model, 1) for client, model in enumerate(models)])
    found = [
        next(f"client {i}" for i, model in enumerate(models) if np.allclose(model, x, rtol=0, atol=1e-4))
        for x in (chosen["x"].to_numpy_ndarrays()[0], server.x)
    ]
    return "Krum of ten models near 100: client 9 differs by 0.02, the others by 0.001", "not client 9", *found


def fedlab():
    from bench.peers.torchvision_ops import declare

    declare()
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler

    handler = SyncServerHandler(torch.nn.Linear(1, 1, bias=False), 1, 1.0)
    handler.num_clients = 2
    for value, examples in ((0.0, 1), (1.0, 99)):
        handler.load([torch.tensor([value]), torch.tensor([examples])])
    ours = fedcore.aggregate([{"w": torch.tensor([0.0])}, {"w": torch.tensor([1.0])}], [1, 99])["w"]
    theirs = handler.model_parameters.item()
    what = "`SyncServerHandler`: models 0 and 1 of clients that report 1 and 99 examples"
    yield Row(version("fedlab"), what, "0.99", shown(theirs), shown(ours.item()))


def fedml(wheel):
    """For SCAFFOLD, ``FedMLAggOperator`` of the wheel returns the last client's difference."""
    loaded(wheel, "fedml", "core", "core.common", "ml", "ml.aggregator")
    from fedml.ml.aggregator.agg_operator import FedMLAggOperator

    args = types.SimpleNamespace(federated_optimizer="SCAFFOLD", client_num_in_total=2, ml_engine="torch")
    sent = [(10, {"w": torch.tensor([value])}, {"w": torch.tensor([value])}) for value in (1.0, 3.0)]
    x, c = FedMLAggOperator.agg(args, sent)
    server = fedcore.Server(np.zeros(1, np.float32), SCAFFOLD(control="sent"), 2, lr=1.0)
    with server.open_round() as opened:
        for client, value in enumerate((1.0, 3.0)):
            opened.add(client, np.float32([value]), steps=1, control=np.float32([value]))
    name = Path(wheel).name.split("-py")[0].replace("-", " ")
    what = "SCAFFOLD: clients move by 1 and 3, with control changes 1 and 3"
    ours = f"x + {server.x[0]:g}, c + {(server.store.read(0) + server.store.read(1))[0] / 2:g}"
    yield Row(name, what, "x + 2, c + 2", f"x + {x['w'].item():g}, c + {c['w'].item():g}", ours)


def byzfl(wheel):
    """byzfl takes tensors to float32, in which ``torch.cdist`` of more than 25 close models far from zero cancels."""
    loaded(wheel, "byzfl", "aggregators", "utils")
    from byzfl.aggregators.aggregators import Krum

    rng = np.random.default_rng(11)
    models = [100 + 1e-3 * rng.normal(size=10_000) for _ in range(30)]
    server = fedcore.Server(np.zeros(10_000, np.float32), "FedAvg", 30, lr=1.0, aggregation=fedcore.rules.Krum(0))
    server.round([fedcore.Update(client, np.float32(model), 1) for client, model in enumerate(models)])
    chosen = [Krum(1)(models), Krum(1)(list(map(torch.from_numpy, models))).numpy(), server.x]
    due, theirs, ours = (f"client {np.argmin([np.abs(model - one).max() for model in models])}" for one in chosen)
    what = "Krum over the 28 nearest of 30 models near 100, float64 tensors that differ by 0.001"
    yield Row(Path(wheel).name.split("-py")[0].replace("-", " "), what, f"{due}, as for NumPy arrays", theirs, ours)


def table(of_fedml, of_appfl, of_byzfl):
    rows = [*pfl_scaffold(), *pfl_storage(), *nvflare(), *flower(), *fedlab()]
    for peer, wheel in ((fedml, of_fedml), (appfl, of_appfl), (byzfl, of_byzfl)):
        rows += peer(wheel) if wheel else []
    lines = ["| framework | computation | expected | result | fedcore |", "|---|---|---:|---:|---:|"]
    for row in rows:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in vars(row).values()) + " |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fedml", metavar="WHEEL", help="pip download --no-deps fedml==0.9.6")
    parser.add_argument("--appfl", metavar="WHEEL", help="pip download --no-deps appfl==1.12.0")
    parser.add_argument("--byzfl", metavar="WHEEL", help="pip download --no-deps byzfl==0.0.11")
    parser.add_argument("--into", metavar="FILE")
    asked = parser.parse_args()
    wheels = "".join(f" --{name} WHEEL" for name in ("fedml", "appfl", "byzfl") if getattr(asked, name))
    command = f"python -m bench.peers.wrong_results{wheels}"
    ran = f"`{command}`, which runs the frameworks' own code, gave these results."
    text = (
        f"# Wrong results of other frameworks\n\n{ran}\n\n"
        + "\n".join(table(asked.fedml, asked.appfl, asked.byzfl))
        + NOT_RUN
    )
    print(text)
    if asked.into:
        Path(asked.into).write_text(text)


NOT_RUN = """

Flower's niid_bench baseline was not tested, because it is not on a package registry.
"""

if __name__ == "__main__":
    main()
