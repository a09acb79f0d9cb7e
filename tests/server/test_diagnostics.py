"""Diagnostics of a report: the correction, the diversity, and the bytes sent up and down."""

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Limits, Server, Storage, Update, algorithms
from fedcore.options import Settings
from tests.algorithms import outsiders
from tests.server.rounds import METHODS, N, made, n, steps_of

CORRECTED_AT_SERVER = ["MIFA", "MIFA, at once", "MimiC", "MimiC, update units"]
CORRECTED_AT_CLIENTS = ["SCAFFOLD", "SCAFFOLD, two vectors", "SCAFFOLDM", "SCAFFOLDMVR"]
ONE_OFFSET_FOR_ALL = ["FedAvgM", "FedAvgMVR", "MBSTORM"]


def one_round(server, t):
    """A round whose updates depend on t only: the broadcast, the offsets, the updates, and the report."""
    rng = np.random.default_rng(t)
    cohort = np.flatnonzero(rng.random(N) < 0.6).tolist() if t else list(range(N))
    broadcast, updates = server.broadcast(cohort), []
    for i in cohort:
        y = broadcast.x + rng.normal(size=n).astype(np.float32)
        control = rng.normal(size=n).astype(np.float32) if broadcast.second else None
        updates.append(Update(i, y, steps=steps_of(server, 1 + i % 3), examples=i + 1, control=control))
    offsets = {i: broadcast.offset(i) for i in cohort}
    return broadcast, offsets, updates, server.round(updates)


@pytest.mark.parametrize("method", CORRECTED_AT_SERVER)
def test_the_correction_at_the_server_is_the_distance_of_v_from_the_mean(method):
    server = made(method, diagnostics=True)
    met = []
    for t in range(6):
        broadcast, _, updates, report = one_round(server, t)
        unit = [1 if server.algorithm.averages else broadcast.lr * update.steps for update in updates]
        h = [(broadcast.x.astype(np.float64) - update.value) / u for update, u in zip(updates, unit, strict=True)]
        due = np.linalg.norm(server.v - np.mean(h, axis=0)) if updates else None
        assert report.correction_norm == (due if due is None else pytest.approx(due, rel=1e-4, abs=1e-5))
        met.append(report.correction_norm)
    assert met[0] < 1e-4  # everybody was there
    assert max(met) > 0.1


@pytest.mark.parametrize("method", CORRECTED_AT_CLIENTS + ONE_OFFSET_FOR_ALL)
def test_the_correction_at_the_clients_is_the_mean_offset(method):
    server = made(method, diagnostics=method in CORRECTED_AT_CLIENTS)
    met = []
    for t in range(6):
        _, offsets, updates, report = one_round(server, t)
        due = np.linalg.norm(np.mean([offsets[u.client].astype(np.float64) for u in updates], axis=0))
        assert report.correction_norm == pytest.approx(due, rel=1e-5, abs=1e-6)
        met.append(report.correction_norm)
    assert met[0] == 0  # nothing is known yet
    assert max(met) > 0.1


@pytest.mark.parametrize("method", [method for method in METHODS if method != "FedAWE"])  # it has none
def test_diversity_of_every_method(method):
    """sum q_i |h_i|^2 / |sum q_i h_i|^2 over the cohort, from the updates only."""
    server, plain = made(method, diagnostics=True), made(method)
    unknown = ("MIFA", "MIFA, at once", "MimiC", "MimiC, update units", "MimiC, short history", "FedVARP", "FedStale")
    for t in range(5):
        broadcast, _, updates, report = one_round(server, t)
        assert one_round(plain, t)[-1].diversity == (None if method in unknown else report.diversity)
        weighed = dict.fromkeys(("FedAvg", "FedProx", "FedNova"), lambda u: u.examples)
        weighed["FedAU"] = lambda u, report=report: report.weights[report.accepted.index(u.client)]
        weighed["FlexibleFedAvg"] = lambda u: u.examples / u.steps  # scheme C
        q = np.array([weighed.get(method, lambda u: 1.0)(update) for update in updates])
        unit = [1 if server.algorithm.averages else broadcast.lr * update.steps for update in updates]
        h = [(broadcast.x.astype(np.float64) - update.value) / u for update, u in zip(updates, unit, strict=True)]
        squares, q = np.sum(np.square(h), axis=1), q / q.sum()
        assert report.diversity == pytest.approx(q @ squares / np.sum((q @ h) ** 2), rel=1e-4)


BY_ROWS = ("WeighedMIFA", "Averaged")


@pytest.mark.parametrize("name", outsiders.METHODS)
def test_the_diversity_of_a_custom_method_is_right_or_none(name):
    method = outsiders.METHODS[name]
    server, plain = (
        Server(np.zeros(n, np.float32), method(), clients=N, lr=0.1, compute=Compute(diagnostics=diagnostics))
        for diagnostics in (True, False)
    )
    known = {True: 0, False: 0}
    for t in range(6):
        broadcast, _, updates, report = one_round(server, t)
        reports = {True: report, False: one_round(plain, t)[-1]}
        q = np.array([u.examples if name in ("HeavyBall", "WeighedMIFA") else 1.0 for u in updates])
        unit = [1 if server.averages_models else broadcast.lr * u.steps for u in updates]
        h = [(broadcast.x.astype(np.float64) - u.value) / each for u, each in zip(updates, unit, strict=True)]
        due = (q @ np.sum(np.square(h), axis=1)) * q.sum() / np.sum((q @ h) ** 2)
        for diagnostics, one in reports.items():
            assert one.diversity is None or one.diversity == pytest.approx(due, rel=1e-4)
            known[diagnostics] += one.diversity is not None
        if name in (*BY_ROWS, "Remembered"):
            correction = np.linalg.norm(server.v - q @ h / q.sum())
            assert report.correction_norm == pytest.approx(correction, rel=1e-3, abs=1e-4)
    assert known == {True: 6, False: 0 if name in BY_ROWS else 6}  # the mean needs the rows


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_rows_of_any_codec(codec):
    servers = [
        Server(
            np.zeros(n, np.float32),
            "MimiC",
            lr=0.1,
            storage=ClientStore(N, n, codec=each),
            compute=Compute(diagnostics=True),
        )
        for each in ("f32", codec)
    ]
    for t in range(4):
        exact, coded = (one_round(server, t)[-1].correction_norm for server in servers)
        assert coded == pytest.approx(exact, rel=0.05, abs=0.2)
    assert exact > 1


@pytest.mark.parametrize("method", METHODS)
def test_no_rows_are_read_without_diagnostics(method):
    server = made(method)
    for t in range(3):
        *_, report = one_round(server, t)
        assert (report.correction_norm is not None) == (method in ONE_OFFSET_FOR_ALL)


@pytest.mark.parametrize("method", METHODS)
def test_diagnostics_change_no_bits_and_are_saved(method, tmp_path):
    plain, measured = made(method), made(method, diagnostics=True)
    for t in range(4):
        one_round(plain, t)
        one_round(measured, t)
    np.testing.assert_array_equal(measured.x, plain.x)
    measured.save(tmp_path / "copy")
    again = one_round(Server.load(tmp_path / "copy"), 4)[-1]
    assert again.correction_norm == one_round(measured, 4)[-1].correction_norm


def test_the_old_name_of_diagnostics_is_read(tmp_path):
    state = made("MIFA", diagnostics=True).settings.to_state()
    state["correction_norms"] = state.pop("diagnostics")
    none = dict.fromkeys(("algorithm", "lr", "server_lr", "optimizer"))
    assert Settings.from_state(state, none).diagnostics
    del state["correction_norms"]
    assert not Settings.from_state(state, none).diagnostics


def test_a_round_without_updates_has_no_correction():
    server = made("MIFA, at once", diagnostics=True)
    one_round(server, 0)
    assert server.round([]).correction_norm is None


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_the_vectors_that_are_sent(method):
    server = made(method)
    for t in range(3):
        broadcast, offsets, updates, report = one_round(server, t)
        down = [broadcast.x, *([] if broadcast.x_prev is None else [broadcast.x_prev])]
        sent = sum(vector.nbytes for vector in down) * len(updates)
        sent += sum(offset.nbytes for offset in offsets.values() if broadcast.has_offset)
        assert broadcast.bytes == sent
        assert report.bytes == 4 * n * server.algorithm.uploads * len(updates)
        vectors = [v for update in updates for v in (update.value, update.control) if v is not None]
        assert report.bytes == sum(vector.nbytes for vector in vectors)


SENT = {"flat": lambda flat: flat, "named": lambda flat: {"w": flat[:8], "b": flat[8:]}, "list": lambda flat: [flat]}


@pytest.mark.parametrize("size", [10, 70_000])
@pytest.mark.parametrize("form", SENT)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_bytes_of_every_door_are_those_of_the_dtype(form, dtype, size, tmp_path):
    """A plain update, one with a step count of NumPy's, a difference, and one that is rejected; one in a journal."""
    value, x = SENT[form](np.ones(size, dtype)), SENT[form](np.ones(size, np.float32))
    server = Server(x, "FedAvg", clients=4, lr=0.1, limits=Limits(max_steps=9))
    with server.open_round() as opened:
        opened.add(0, value, steps=1)
        opened.add(1, value, steps=np.int64(1))
        opened.add(2, value, steps=1, kind="delta")
        assert not opened.add(3, value, steps=10)
    assert opened.report.bytes == 4 * size * np.dtype(dtype).itemsize
    with Server(x, "FedAvg", 4, lr=0.1, storage=Storage(tmp_path / "s", journal=True)) as server:
        server.open_round().add(0, value, steps=1)
    with Server.load(tmp_path / "s") as server:
        assert server.open_round().finish().bytes == size * np.dtype(dtype).itemsize


VECTORS = dict.fromkeys(["FedAvgM", "FedDyn", "SCAFFOLD", "SCAFFOLDM"], (1, 2))
VECTORS |= dict.fromkeys(["FedAvgMVR", "MBSTORM"], (1, 3)) | {"SCAFFOLDMVR": (2, 3)}
VECTORS |= dict.fromkeys(["SCAFFOLD, two vectors", "SCAFFOLDM, on clients"], (2, 2))


@pytest.mark.parametrize("method", METHODS)
def test_vectors_a_client_sends_and_gets(method):
    """SCAFFOLD has FedAvg's uplink here; as published it needs twice that."""
    server = made(method)
    assert (server.algorithm.uploads, server.broadcast([0]).bytes / (4 * n)) == VECTORS.get(method, (1, 1))
    assert server.broadcast([0, 3]).bytes == 2 * server.broadcast([0]).bytes


def test_float_buffers_are_sent_and_offsets_have_none():
    x0 = {"w": np.zeros(5, np.float32), "bn.running_mean": np.zeros(3, np.float32)}
    broadcast = Server(x0, algorithms.SCAFFOLD(), clients=2, lr=0.1).broadcast([0, 1])
    assert broadcast.bytes == 2 * 4 * (8 + 5)
