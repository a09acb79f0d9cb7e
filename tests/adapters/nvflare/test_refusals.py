"""What a site sends is refused by name, and the round goes on with the others."""

import numpy as np
import pytest
from nvflare.app_common.abstract.fl_model import FLModel

from fedcore import errors
from fedcore.algorithms import SCAFFOLD
from fedcore.rules import RejectLong
from tests.adapters.nvflare.local import LocalController
from tests.adapters.nvflare.sites import (
    WITHOUT_SIZES,
    lie,
    sites,
    straight,
    x0,
)
from tests.refusals import refused_arguments

LIES = {
    "steps-negative": (lie(steps=-3), "steps"),
    "steps-zero": (lie(steps=0), "steps"),
    "steps-huge": (lie(steps=10**18), "steps"),
    "steps-text": (lie(steps="many"), "steps"),
    "examples-negative": (lie(examples=-1), "examples"),
    "examples-zero": (lie(examples=0), "examples"),
    "examples-huge": (lie(examples=10**18), "examples"),
    "rate": (lie(lr=float("nan")), "lr"),
    "nan": (lie(params=lambda p: {k: v * np.float32("nan") for k, v in p.items()}), "update"),
    "huge": (lie(params=lambda p: {k: np.full_like(v, 3e38) for k, v in p.items()}), "update"),
    "names": (lie(params=lambda p: {f"x{k}": v for k, v in p.items()}), "model"),
    "missing": (lie(params=lambda p: dict(list(p.items())[1:])), "model"),
    "shape": (lie(params=lambda p: {k: v.reshape(-1)[:-1] for k, v in p.items()}), "0.weight"),
    "dtype": (lie(params=lambda p: {k: v.astype(np.complex64) for k, v in p.items()}), "0.weight"),
    "text": (lie(params=lambda p: dict.fromkeys(p, "weights")), "0.weight"),
    "no-steps": (lambda got: FLModel(params=got.params), "steps"),
    "junk-meta": (lambda got: FLModel(params=got.params, meta={"NUM_STEPS_CURRENT_ROUND": [], "fedcore": 7}), "steps"),
}


@pytest.mark.parametrize("method", ["FedAvg", "MimiC", "SCAFFOLD"])
def test_lying_clients_are_refused_by_name_and_the_round_goes_on(method):
    clients = {name: liar for name, (liar, _) in LIES.items()} | {"honest-1": lie(), "honest-2": lie(steps=2)}
    controller = LocalController(clients, x0(), method, lr=0.1, num_rounds=1)
    controller.run()
    [report] = controller.reports
    assert set(report.accepted) == {"honest-1", "honest-2"}
    reasons = dict(report.rejected)
    # A float64 sum holds 3e38; such an update is far off, and finite.
    due = {name: about for name, (_, about) in LIES.items() if name in reasons or name != "huge"}
    assert {name: reason.split(":")[0] for name, reason in reasons.items()} == due
    [line] = [w for w in controller.warnings if "refused" in w]  # one a round, however many they are
    assert line.startswith(f"round 0: refused {len(reasons)} (")
    assert f"heard {len(report.accepted)}: " in line
    assert np.isfinite(controller.server.x).all()


def test_a_second_vector_that_is_none_is_refused():
    clients = {
        "good": lie(control=np.zeros(38 + 5, np.float32)),
        "none": lie(),
        "short": lie(control=np.zeros(3, np.float32)),
        "nan": lie(control=np.full(43, np.nan, np.float32)),
    }
    controller = LocalController(clients, x0(), SCAFFOLD(control="sent"), lr=0.1, num_rounds=1)
    controller.run()
    [report] = controller.reports
    assert report.accepted == ("good",)
    assert {name for name, _ in report.rejected} == {"none", "short", "nan"}


@pytest.mark.parametrize("name", WITHOUT_SIZES)
def test_a_site_that_scales_its_update_is_refused_by_name_and_the_others_result_stands(name):
    def scaled(received):
        answer = honest(received)
        x = received.params
        answer.params = {key: x[key] + np.float32(1000) * (y - x[key]) for key, y in answer.params.items()}
        return answer

    clients = sites()
    honest, clients["site-1"] = clients["site-1"], scaled
    controller = LocalController(clients, x0(), name, lr=0.1, num_rounds=3, aggregation=RejectLong(30))
    controller.run()
    assert [[site for site, _ in report.rejected] for report in controller.reports] == [["site-1"]] * 3
    assert "(RejectLong)" in controller.reports[0].rejected[0][1]
    # FedExP's rate follows from lengths, which of tensors and of one vector are not added up alike.
    loose = 1e-6 if name == "FedExP" else 0
    np.testing.assert_allclose(controller.server.x, straight(name, 3, [[1, 2]] * 3).x, rtol=loose, atol=0)
    rejected = "refused 1 ('site-1') and heard 2: 1 x update: its length"
    assert [f"round {t}: {rejected}" in line for t, line in enumerate(controller.warnings)] == [True] * 3


def test_a_limit_that_nobody_knows_is_refused_by_name():
    with pytest.raises(errors.UnknownNameError, match=r"Limits.*'max_norm'"):
        LocalController(sites(), x0(), "MIFA", limits={"max_nrom": 3})


def test_a_round_that_heard_nobody_shouts():
    controller = LocalController({"a": lie(steps=-3), "b": lie(steps=0)}, x0(), "MimiC", lr=0.1, num_rounds=1)
    controller.run()
    [line] = controller.warnings
    assert line.startswith("round 0: refused 2 ('a', 'b') and HEARD NOBODY: 2 x steps: expected")


def test_a_site_says_no_more_steps_than_it_was_asked_for():
    controller = LocalController({"a": lie(steps=3), "b": lie(steps=4)}, x0(), "MIFA", limits={"max_steps": 3})
    controller.num_rounds = 1
    controller.run()
    assert refused_arguments(controller.reports[0]) == [("b", "steps")]
