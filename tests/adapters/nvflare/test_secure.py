"""Masked sums in NVFlare: the models of unmasked rounds, with sites that drop out."""

from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest
from nvflare.app_common.abstract.fl_model import FLModel

from fedcore import RoundPolicy, Totals
from fedcore.adapters.nvflare import SecureController, SecureSite, reply
from fedcore.adapters.nvflare.secure import SECURE
from fedcore.errors import ArrayError, RangeError, RoundError
from fedcore.rules import PrivateMean
from fedcore.secure import SecureServer, identity_of
from fedcore.secure.messages import MASKED
from tests.adapters.drivers.nvflare import LocalController
from tests.secure.sessions import LIES, Lie

X = {"w": np.arange(12, dtype=np.float32).reshape(3, 4) / 8}
COUNTED = X | {"num_batches_tracked": np.array(3)}
NAMES = [f"site-{i}" for i in range(5)]
OPTIONS = dict(
    lr=0.5,
    num_rounds=1,
    limits={"max_norm": 100.0, "max_examples": 1000, "max_steps": 8},
    compute={"accumulator": "exact"},
)


class LocalSecure(LocalController, SecureController):
    """A SecureController whose clients are functions."""


def train(number):
    """Return updates of short numbers, so that no float operation rounds in the first round."""

    def trained(received):
        params = {"w": received.params["w"] - np.float32((number + 1) / 64)}
        params |= {name: x + 2 for name, x in received.params.items() if name != "w"}
        return reply(params, steps=2, examples=10 + number)

    return trained


def masked(name, dropped=(), **options):
    """Return a site; those in ``dropped`` do not answer with an update."""
    site = SecureSite(train(NAMES.index(name)), **options)
    return lambda received: None if name in dropped and "w" in received.params else site.answer(received)


def signing(**options):
    """Return sites with identities, and their public keys."""
    secrets = {name: bytes([i + 1] * 32) for i, name in enumerate(NAMES)}
    public = {name: identity_of(secret) for name, secret in secrets.items()}
    sites = {name: masked(name, identity=secret, peers=public.values(), **options) for name, secret in secrets.items()}
    return sites, {name: key.hex() for name, key in public.items()}


@pytest.mark.parametrize("dropped", [(), ("site-3",)])
@pytest.mark.parametrize("method", ["FedAvg", "FedNova"])
def test_a_masked_round_gives_the_model_of_an_unmasked_round(method, dropped):
    controller = LocalSecure({name: masked(name, dropped) for name in NAMES}, COUNTED, method, **OPTIONS)
    controller.run()
    left = {name: train(i) for i, name in enumerate(NAMES) if name not in dropped}
    plain = LocalController(left, COUNTED, method, **OPTIONS)
    plain.run()
    assert controller.server.x.tobytes() == plain.server.x.tobytes()
    assert [int(made.server.counters["num_batches_tracked"]) for made in (controller, plain)] == [3, 5]
    assert not np.array_equal(controller.server.x, X["w"].ravel())
    assert set(controller.reports[0].accepted) == set(left)
    assert controller.saved[-1].params["w"].shape == (3, 4)


def test_sites_add_noise():
    sites, identities = signing(noise=1.0)
    options = OPTIONS | {"limits": {"max_steps": 8}, "policy": RoundPolicy(min_clients=4), "identities": identities}
    rule = PrivateMean(clip=3.0, noise=1.0, expected=5.0)
    controller = LocalSecure(sites, X, "FedAvg", aggregation=[rule], colluding=2, **options)
    controller.run()
    assert len(controller.arrived) == 5 * len(NAMES)
    assert controller.reports[0].privacy["rounds"] == 1
    assert len(controller.reports[0].accepted) == len(NAMES)
    assert 0 < np.linalg.norm(controller.server.x - X["w"].ravel()) < 3 + 12 * 3


def test_the_job_ends_after_three_lost_sums():
    sites = {name: masked(name, NAMES[:2]) for name in NAMES}
    controller = LocalSecure(sites, X, "FedAvg", policy=RoundPolicy(min_clients=4), **OPTIONS | {"num_rounds": 9})
    with pytest.raises(RoundError, match=r"in the last 3 rounds.*3 clients are left, but the sum needs 4"):
        controller.run()
    assert controller.server.round_number == 0
    assert sum("the model stays" in warning for warning in controller.warnings) == 3


def test_an_error_of_the_step_ends_the_job(monkeypatch):
    monkeypatch.setattr("fedcore.server.state.State.commit", Mock(side_effect=RangeError("commit: failed")))
    with pytest.raises(RangeError, match=r"^commit: failed"):
        LocalSecure({name: masked(name) for name in NAMES}, X, "FedAvg", **OPTIONS).run()


@pytest.mark.parametrize("lie", LIES)
def test_a_site_that_lies_loses_a_sum_and_not_the_job(lie):
    """Each site trains once for each masked update; a site that is named is left out."""
    trained, words, change = Counter(), Counter(), Lie(lie)

    def site_of(name):
        def train(received):
            trained[name] += 1
            moved = np.random.default_rng().normal(size=(3, 4)).astype(np.float32)  # another update each time
            return reply({"w": received.params["w"] - moved}, steps=2, examples=10)

        site = SecureSite(train)

        def answer(received):
            model = site.answer(received)
            data = model.params[SECURE].tobytes()
            words[name] += data[32] == MASKED
            model.params[SECURE] = np.frombuffer(change(data) if name == "site-0" else data, np.uint8)
            return model

        return answer

    controller = LocalSecure({name: site_of(name) for name in NAMES}, X, "FedAvg", **OPTIONS | {"num_rounds": 4})
    controller.run()
    assert controller.server.round_number == len(controller.reports) == 3
    assert trained == words
    assert {len(report.accepted) for report in controller.reports} == {5 if lie is LIES[0] else 4}


@pytest.mark.parametrize("change", [{"params": {"w": X["w"] * 2}}, {"current_round": 7}, {"meta": {"lr": 1e-9}}])
def test_a_site_leaves_a_sum_for_which_others_got_another_task(change):
    """With other tasks, the others' updates could be zero, and the sum the update of one site."""

    class Lying(LocalSecure):
        def send_model(self, data, targets, **more):
            if "w" in data.params and targets == ["site-2"]:
                data.params = change.get("params", data.params)
                data.current_round = change.get("current_round", data.current_round)
                data.meta["fedcore"] = data.meta["fedcore"] | change.get("meta", {})
            super().send_model(data=data, targets=targets, **more)

    sites, seen = {name: masked(name) for name in NAMES}, []
    honest = sites["site-2"]

    def answer(received):
        try:
            return honest(received)
        except ArrayError as error:
            seen.append(f"{error}")

    controller = Lying(sites | {"site-2": answer}, X, "FedAvg", **OPTIONS)
    controller.run()
    assert len(seen) == 1
    assert "not what the server announced" in seen[0]
    assert set(controller.reports[0].accepted) == set(NAMES) - {"site-2"}


def test_a_malformed_answer_leaves_the_others():
    sites = {name: masked(name) for name in NAMES}
    honest = sites["site-0"]

    def spoiled(received):
        answer = honest(received)
        answer.params[SECURE] = answer.params[SECURE][:-1]
        return answer

    controller = LocalSecure(sites | {"site-0": spoiled}, X, "FedAvg", **OPTIONS)
    controller.run()
    (report,) = controller.reports
    assert set(report.accepted) == set(NAMES[1:])
    assert report.rejected[0][0] == "site-0"


def test_a_site_never_trains_without_masks():
    def never(received):
        raise AssertionError("it trained")

    site, seen = SecureSite(never), []
    invitation = SecureServer(NAMES, Totals({"n": 0}, NAMES).encoding(), min_clients=2).messages["site-0"]
    with pytest.raises(RoundError, match=r"^encoding: .* TotalsForm"):
        site.answer(FLModel(params={SECURE: np.zeros(1, np.uint8)}, meta={SECURE: invitation}))

    def answer(received):
        with pytest.raises(ArrayError, match="without masks"):
            site.answer(received)
        seen.append(received)

    LocalController(dict.fromkeys(NAMES, answer), X, "FedAvg", abort_after=None, **OPTIONS).run()
    assert len(seen) == len(NAMES)
