"""The table of features that do not combine decides which servers are made; those that are made run rounds."""

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Limits, Model, RoundPolicy, Server, Storage, Update, combines
from fedcore.algorithms import MIFA, SCAFFOLD, SCAFFOLDMVR, FedAvgM, optimizers, rates
from fedcore.cluster.placement import LocalThreads
from fedcore.errors import RangeError, UnknownNameError
from fedcore.rules import ClipToMedian, Mean, Median, PrivateMean
from fedcore.secure import Encoding
from fedcore.server.compatibility import CONFLICTS, FEATURES

MODEL = {"w": np.zeros((4, 3), np.float32)}
CLASSES = {"limits": Limits, "storage": Storage, "compute": Compute, "policy": RoundPolicy}
IN_FOLDER = {"folders", "keep_previous", "durability", "journal", "resident"}
NEVER = {"device", "folders", "cached_rows", "medium"}  # without a GPU, or in another folder
WHOLE = type("Whole", (optimizers.Adam,), {"elementwise": False})
HALVES = type("Halves", (MIFA,), {"total_is_whole": False})
MODELS = type("Models", (SCAFFOLDMVR,), {"unit": "model"})


def private(**options):
    return {"aggregation": [PrivateMean(1.0, 1.0, 4, **options)]}


USED = {
    "no shards": {"executor": None},
    "shards": {"executor": LocalThreads()},
    "partial updates": {"model": Model(MODEL | {"b": np.zeros(2, np.float32)}, partial={"one": ["b"]})},
    "device": {"device": "cuda"},
    "counters": {"model": MODEL | {"n": np.array(3)}},
    "float buffers": {"model": MODEL | {"running_mean": np.zeros(2, np.float32)}},
    "folders": {"folders": True, "executor": LocalThreads()},
    "no folder": {"path": None},
    "keep_previous": {"keep_previous": True},
    "durability": {"durability": "round"},
    'durability="checkpoint"': {"durability": "checkpoint"},
    "weak durability": {"durability": "none"},
    "journal": {"journal": True},
    "audit": {"audit": True},
    "resident": {"resident": 1 << 20},
    "cached_rows": {"cached_rows": 3},
    'medium="cuda"': {"medium": "cuda"},
    "exact sums": {"accumulator": "exact"},
    "buffer": {"buffer": 2},
    "min_share": {"min_share": 0.5},
    "grace": {"grace": 1.0},
    "discount": {"discount": 0.5},
    "max_staleness": {"max_staleness": 1},
    "max_norm": {"max_norm": 9.0},
    "server_lr": {"server_lr": 1.0},
    "optimizer": {"optimizer": "Adam"},
    "momentum at the clients": {"algorithm": FedAvgM(placement="client")},
    "whole-vector optimizer": {"optimizer": WHOLE()},
    "rules": {"aggregation": [ClipToMedian()]},
    "robust rule": {"aggregation": [Median()]},
    "robust rule in a buffer": {"aggregation": [Median()], "buffer": 2},
    "Mean(weights)": {"aggregation": [Mean(dict.fromkeys(range(4), 1.0))]},
    "PrivateMean": private(),
    "PrivateMean(rate)": private(rate=0.5),
    "PrivateMean(quantile)": private(quantile=0.5),
    "PrivateMean(seed)": private(seed=0),
    "PrivateMean with max_norm": private() | {"max_norm": 1.0},
    "max_client_lr with gradients": {"max_client_lr": 1.0, "server_lr": 1.0},
    "rate of single steps": {"lr": rates.InverseStep(1.0, 9.0, 2), "server_lr": 1.0},
    "own step length": {"algorithm": "FedExP"},
    "step length of the clients": {"algorithm": "FedAvgM"},
    "start of each client": {"algorithm": "FedAWE"},
    "second vector": {"algorithm": "SCAFFOLDMVR"},
    "second vector beside models": {"algorithm": MODELS()},
    "own weights": {"algorithm": "FedAU"},
    "fractional total": {"algorithm": HALVES()},
    "norms of all updates": {"algorithm": "FedExP"},
    "total": {"algorithm": "MIFA"},
    "fixed groups": {
        "model": Model(MODEL | {"b": np.zeros(2, np.float32)}, partial={"one": ["b"]}),
        "algorithm": SCAFFOLD(placement="client"),
    },
    "ClientStore": {"given": True},
    **{name: {} for name in ("warm_start", "partial sums", "edges", "masked sums")},
    **{name: {} for name in ("no device", "float sums", "no start from gradients")},
    "partial updates on shards": {
        "model": Model({"w": np.zeros(16_384, np.float32), "b": np.zeros(2, np.float32)}, partial={"one": ["b"]}),
        "executor": LocalThreads(),
    },
}
"""Options with which a server has a feature."""
OPTIONS = [name for name, options in USED.items() if any(options.values()) and not NEVER.intersection(options)]
USED |= {name: {"algorithm": "MIFA"} for name in FEATURES if name not in USED}


def make(options, path):
    """A server with some of the options of ``USED``."""
    options = {"model": MODEL, "clients": 4, "lr": 0.1} | options
    if IN_FOLDER.intersection(options):
        options = {"path": path} | options
    if options.get("folders"):
        options["folders"] = [path / "one"]
    if options.pop("given", None):
        options["storage"] = ClientStore(options.pop("clients"), 12)
    for argument, kind in CLASSES.items():
        own = {name: options.pop(name) for name in vars(kind()) if name in options}
        if own and argument not in options:
            options[argument] = kind(**own)
    return Server(**options)


def act(server, features):
    """Use the features that are no options."""
    if "warm_start" in features:
        server.warm_start({0: np.ones(server.layout.n_parameters, np.float32)})
    if {"edges", "partial sums"}.intersection(features):
        server.require_partial_sums()
    if "masked sums" in features:
        Encoding.of(server, clients=2)


def named(row):
    return f"{row.a}, {row.b}"


@pytest.mark.parametrize("row", [row for row in CONFLICTS if "device" not in (row.a, row.b)], ids=named)
def test_a_pair_of_the_table_is_refused_with_the_reason(row, tmp_path):
    with pytest.raises(RangeError) as error:
        act(make(USED[row.a] | USED[row.b], tmp_path / "s"), (row.a, row.b))
    assert row.because in str(error.value)
    assert row.instead in str(error.value)
    assert not combines(row.a, row.b)


@pytest.mark.parametrize("feature", OPTIONS)
def test_other_pairs_run_rounds(feature, tmp_path):
    made = 0
    for other in OPTIONS[: OPTIONS.index(feature)]:
        a, b, path = USED[other], USED[feature], tmp_path / str(made)
        if not combines(other, feature) or any(a[name] is not b[name] for name in a.keys() & b.keys()):
            continue
        try:
            server = make(a | b, path)
        except RangeError as error:
            if "does not combine with" not in str(error):  # a third feature that the options have
                raise
            continue
        made += 1
        with server:
            control = np.ones(server.layout.n_parameters, np.float32) if server.algorithm.second_vector else None
            sent = [Update(i, server.tensors(), 1, 2, control=control, round=0) for i in range(4)]
            assert len(server.round(sent).accepted) == 4
        if path.exists():
            own = {name: (a | b)[name] for name in ("algorithm", "optimizer") if name in a | b}
            own |= {"aggregation": server.aggregation} if "Mean(weights)" in (other, feature) else {}
            Server.load(path, **own).close()
    assert made or feature in OPTIONS[:2]


CHANGES = ("buffer", "min_share", "grace", "discount", "max_staleness", "max_norm", "robust rule", "Mean(weights)")


@pytest.mark.parametrize("row", [row for row in CONFLICTS if row.a in CHANGES and row.b in OPTIONS], ids=named)
def test_a_change_and_a_load_are_refused_too(row, tmp_path):
    options, change = {"path": tmp_path / "s"} | USED[row.b], USED[row.a]
    for argument in ("policy", "limits"):
        if change.keys() & (known := vars(CLASSES[argument]()).keys()):
            change = {
                argument: CLASSES[argument](
                    **{name: (options | change)[name] for name in known & (options | change).keys()}
                )
            }
    with make(options, tmp_path / "s") as server:
        with pytest.raises(RangeError) as changed:
            server.change(**change)
        assert server.transactions == 0
    assert row.because in str(changed.value)
    with pytest.raises(RangeError) as loaded:
        Server.load(tmp_path / "s", algorithm=options.get("algorithm"), **change)
    assert row.because in str(loaded.value)


def test_a_folder_is_loaded_with_one_of_two(tmp_path):
    with make(USED["keep_previous"], tmp_path / "s"):
        pass
    checkpoint = Storage(durability="checkpoint")
    with pytest.raises(RangeError, match="keep_previous: does not combine with durability"):
        Server.load(tmp_path / "s", storage=checkpoint)
    rows = ClientStore.open(tmp_path / "s", keep_previous=True, durability="checkpoint")
    with pytest.raises(RangeError, match="keep_previous: does not combine with durability"), rows:
        Server.load(rows)
    Server.load(tmp_path / "s", storage=Storage(keep_previous=False, durability="checkpoint")).close()


def test_combines(monkeypatch):
    assert combines("MIFA", "Median", "resident").conflicts == combines("unbounded sums", "robust rule").conflicts
    with monkeypatch.context() as without:  # the metadata of installed packages are read for other names only
        without.setattr("importlib.metadata.entry_points", None)
        assert combines("MIFA", "ClipToMedian", "resident")
    assert combines("MIFA", "Bucketing", "robust rule", Median(), "ClipToMedian")
    assert combines("FedAvgM", "PrivateMean", "server_lr")
    assert not combines("masked sums", "journal")
    assert not combines("FedAvg", "warm_start")
    assert combines().features == tuple(FEATURES)
    assert {(row.a, row.b) for row in combines("resident").conflicts} == {
        (row.a, row.b) for row in combines().conflicts if "resident" in (row.a, row.b)
    }
    assert all(f"{row.a}: " in str(combines(row.a, row.b)) for row in CONFLICTS)
    with pytest.raises(UnknownNameError, match="shards"):
        combines("shard")
    with pytest.raises(UnknownNameError, match="must be"):
        combines(3)


@pytest.mark.parametrize(
    "pair",
    [
        *(("Krum", "PrivateMean"), ("Median", "Krum"), ("edges", "Median"), ("Mean(weights)", "Median")),
        *(("ClipToMedian", "PrivateMean"), ("Bucketing", "PrivateMean"), ("Bucketing", "Mean(weights)")),
        *(("Bucketing", "exact sums"), ("masked sums", "Krum"), ("PrivateMean(rate)", "buffer"), ("edges", HALVES())),
        *((Median(), MIFA()), (Median, "MIFA"), ("fedcore.rules:Median", "fedcore.algorithms:MIFA")),
        (Mean({0: 1.0}), "MIFA"),
    ],
)
def test_pairs_that_a_server_refuses_do_not_combine(pair):
    assert "does not combine" in str(combines(*pair))
