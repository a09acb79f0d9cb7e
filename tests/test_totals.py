"""Rounds of totals: exact in any order, also under masks, and no client's values can spoil those of the others."""

import copy
import json
import math
import pickle
import sqlite3
from collections import Counter
from contextlib import suppress
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore import ClientStore, Server, Storage, Totals, errors
from fedcore.callbacks import of_report
from fedcore.rules import Median, PrivateMean
from fedcore.rules.private import Ledger
from fedcore.server.folder import read_audit
from fedcore.server.update import digest_of_text
from fedcore.store.files import disk
from fedcore.totals import LARGEST, LARGEST_COUNT, TotalsForm
from tests.cli.command import invoke, output_of
from tests.kills import calls_of, die_at, killed
from tests.store.kit import full

SITES = [f"site-{i}" for i in range(10)]
FORM = {"count": 0, "sum": np.zeros(3), "histogram": np.zeros((2, 4), np.int64)}
BOUNDS = {"sum": (-100.0, 50.0)}
GOOD = {"count": 7, "sum": np.array([1.5, -2.0, 0.1]), "histogram": np.arange(8).reshape(2, 4)}


def values_of(site, rng):
    return {
        "count": int(rng.integers(1000)),
        "sum": rng.uniform(-100, 50, 3),
        "histogram": rng.integers(0, 2**40, (2, 4)),
    }


def all_values(seed=0):
    rng = np.random.default_rng(seed)
    return {site: values_of(site, rng) for site in SITES}


def totals_of(sent, form=FORM, clients=SITES, **options):
    totals = Totals(form, clients, **options)
    with totals.open_round() as round:
        for client, values in sent.items():
            assert round.add(client, values)
    return round.report.totals


def exact(arrays, number=Fraction):
    """The sum of arrays by exact arithmetic: Python integers, or one correct rounding of the fractions' sum."""
    rows = [np.ravel(array).tolist() for array in arrays]
    out = int if number is int else float
    return np.reshape([out(sum(map(number, column))) for column in zip(*rows, strict=True)], np.shape(arrays[0]))


def require_exact(found, sent):
    for name, total in found.items():
        arrays = [values[name] for values in sent]
        expected = exact(arrays, Fraction if name == "sum" else int)
        np.testing.assert_array_equal(total, expected, strict=isinstance(total, np.ndarray))
        assert total.dtype == (np.float64 if name == "sum" else np.int64)


def test_totals_are_those_of_exact_arithmetic():
    sent = all_values()
    require_exact(totals_of(sent), sent.values())


FLOATS = st.floats(-LARGEST, LARGEST, width=64)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(FLOATS, st.integers(-LARGEST_COUNT, LARGEST_COUNT)), max_size=12), st.randoms())
def test_the_order_has_no_effect_and_one_rounding_is_all(sent, random):
    bounds = {"n": (-LARGEST_COUNT, LARGEST_COUNT)}
    listed = [(i, {"x": x, "n": n}) for i, (x, n) in enumerate(sent)]
    first = totals_of(dict(listed), {"x": 0.0, "n": 0}, 12, bounds=bounds)
    random.shuffle(listed)
    again = totals_of(dict(listed), {"x": 0.0, "n": 0}, 12, bounds=bounds)
    assert first["x"].tobytes() == again["x"].tobytes()
    assert first["x"] == float(sum(Fraction(x) for x, _ in sent))
    assert int(first["n"]) == int(again["n"]) == sum(n for _, n in sent)


def test_the_greatest_counts_of_all_clients_are_exact():
    for count in (3, 2**12):
        most = min(LARGEST_COUNT, 2**62 // count)
        sent = {i: {"n": most - i} for i in range(count)}
        assert int(totals_of(sent, {"n": 0}, count)["n"]) == sum(one["n"] for one in sent.values())


def test_a_thread_that_flushes_subnormal_numbers_gets_the_same_bits():
    sent, bounds = {i: {"x": i * 5e-324} for i in range(5)}, {"x": (0, 1e-308)}
    before = totals_of(sent, {"x": 0.0}, 5, bounds=bounds)["x"].tobytes()
    torch.set_flush_denormal(True)
    try:
        totals = Totals({"x": 0.0}, 5, bounds=bounds)
        with totals.open_round() as round:
            replies = [round.add(client, values) for client, values in sent.items()]
            below = round.add(0, {"x": -5e-324})
    finally:
        torch.set_flush_denormal(False)
    assert all(replies)
    assert "x:" in below.reason
    assert round.report.totals["x"].tobytes() == before


def with_value(name, value):
    return GOOD | {name: value}


class Hostile(dict):
    def items(self):
        raise RuntimeError("no items")


HOSTILE = {
    "nothing": {},
    "a missing name": {name: GOOD[name] for name in ("count", "sum")},
    "a further name": GOOD | {"more": 1},
    "no mapping": 5,
    "a list": [1, 2, 3],
    "a hostile class": Hostile(GOOD),
    "a shape": with_value("sum", np.zeros((3, 1))),
    "a dtype": with_value("histogram", np.zeros((2, 4))),
    "unsigned": with_value("histogram", np.zeros((2, 4), np.uint64)),
    "a float count": with_value("count", 7.0),
    "a bool": with_value("count", True),
    "an int that is too large": with_value("count", 2**70),
    "a text": with_value("count", "7"),
    "an object array": with_value("sum", np.array([1, 2, None])),
    "NaN": with_value("sum", np.array([1, np.nan, 0])),
    "infinity": with_value("sum", np.array([1, 0, -np.inf])),
    "a long float": with_value("sum", np.zeros(3, np.longdouble)),
    "complex": with_value("sum", np.zeros(3, complex)),
    "a negative count": with_value("count", -1),
    "a negative bin": with_value("histogram", GOOD["histogram"] - 1),
    "above the bound": with_value("sum", np.array([0, 50.5, 0])),
    "below the bound": with_value("sum", np.array([0, -100.5, 0])),
    "a count above the default": with_value("count", 2**53),
    "the least int64": with_value("count", np.int64(-(2**63))),
    "masked": with_value("sum", np.ma.masked_less(np.zeros(3), 1)),
    "sparse": with_value("sum", torch.zeros(3).to_sparse()),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_values_are_rejected_with_a_reason_and_count_nothing(kind):
    totals, sent = Totals(FORM, SITES, bounds=BOUNDS), dict.fromkeys(SITES[1:], GOOD)
    with totals.open_round() as round:
        round.add("site-1", GOOD)
        reply = round.add("site-0", HOSTILE[kind])
        assert not reply
        for site in SITES[2:]:
            round.add(site, GOOD)
    assert round.report.rejected == (("site-0", reply.reason),) == round.rejected
    assert reply.reason.split(":")[0] in (*FORM, "values", "update")
    require_exact(round.report.totals, sent.values())


def test_a_rejected_client_may_send_again_and_an_accepted_one_may_not():
    totals = Totals(FORM, SITES)
    with totals.open_round() as round:
        assert not round.add("site-2", HOSTILE["NaN"])
        assert round.add("site-2", GOOD, round=0)
        assert not round.add("site-2", GOOD)
        assert not round.add("site-3", GOOD, round=1)
    assert round.report.accepted == ("site-2",)
    assert [client for client, _ in round.report.rejected] == ["site-2", "site-2", "site-3"]
    assert (round.report.round, round.report.bytes, totals.round_number) == (0, 96, 1)


def test_values_are_copied_and_tensors_of_torch_keep_their_numbers():
    form = {"n": np.zeros(2, np.int64), "x": np.zeros(2)}
    forms = [np.array, torch.tensor, lambda x: torch.tensor(x).to(torch.bfloat16), np.float16, np.float32]
    totals = Totals(form, len(forms))
    with totals.open_round() as round:
        for client, make in enumerate(forms):
            sent = {"n": torch.tensor([client, 2**50]), "x": make([0.5, 2.0])}
            assert round.add(client, sent)
            sent["n"][:] = 0
            sent["x"][:] = 0
    assert round.report.totals["n"].tolist() == [10, 5 * 2**50]
    assert round.report.totals["x"].tolist() == [2.5, 10.0]


def test_errors_of_the_caller_raise_and_leave_the_totals():
    totals = Totals(FORM, SITES, min_clients=2)
    with pytest.raises(errors.UnknownClientError), totals.open_round() as round:
        round.add("site-77", GOOD)
    with pytest.raises(errors.RoundError, match="min_clients"), totals.open_round() as round:
        round.add("site-1", GOOD)
    with pytest.raises(errors.RoundError):
        round.add("site-2", GOOD)
    open_round = totals.open_round()
    with pytest.raises(errors.RoundError, match="open already"):
        totals.open_round()
    open_round.abort()
    assert (totals.round_number, round.report, open_round.is_open) == (0, None, False)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (({"n": np.zeros(2, bool)}, 2), errors.DtypeError),
        (({"n": 0}, 2, {}, 0, bytes(32)), errors.RangeError),
        (({"n": -np.inf}, 2), errors.DtypeError),
        (({}, 2), errors.FedcoreError),
        ((FORM, 0), errors.RangeError),
        ((FORM, 2, {"mean": (0, 1)}), errors.ArrayError),
        ((FORM, 2, {"count": (3, 3)}), errors.RangeError),
        ((FORM, 2, {"count": (0, 2**53)}), errors.RangeError),
        ((FORM, 2**40, {"count": (0, 2**23)}), errors.RangeError),
        ((FORM, 2, {"sum": (0, np.inf)}), errors.RangeError),
        ((FORM, 2, {"sum": (np.nan, 1)}), errors.RangeError),
        ((FORM, 2, {"sum": 5}), errors.ArrayError),
        ((FORM, 2, {}, 3), errors.RangeError),
    ],
)
def test_invalid_arguments_raise(arguments, error):
    options = dict(zip(("values", "clients", "bounds", "min_clients", "audit_key"), arguments, strict=False))
    with pytest.raises(error):
        Totals(**options)


def test_reports_go_to_callbacks_and_an_empty_round_is_zero():
    seen = []
    totals = Totals(FORM, SITES, callbacks=[seen.append, of_report, lambda report: 1 / 0])
    with totals.open_round() as round:
        pass
    assert seen == [round.report]
    require_exact(round.report.totals, [{name: np.zeros_like(value) for name, value in FORM.items()}])
    assert "totals" in repr(totals)
    twin = copy.deepcopy(totals)
    with twin.open_round() as round:
        round.add("site-0", GOOD)
    assert (twin.round_number, totals.round_number) == (2, 1)
    with pytest.raises(errors.PicklingError):
        pickle.dumps(totals)


# Noise.


def rule(**options):
    return PrivateMean(**{"clip": 2.0, "noise": 0.5, "expected": 10, "seed": 3} | options)


def test_noise_is_that_of_the_rule_on_values_in_units_of_their_bounds():
    bounds, sent = {"x": (-50.0, 20.0), "n": (0, 10)}, [([-10.0, 5.0], 3), ([50.0, 0.0], 10), ([-50.0, -50.0], 10)]
    sent[1] = ([20.0, -50.0], 10)
    form = {"x": np.zeros(2), "n": 0}
    totals = Totals(form, 3, bounds=bounds, private=rule(clip=1.5))
    with totals.open_round() as round:
        for client, (x, n) in enumerate(sent):
            round.add(client, {"x": np.array(x), "n": n})
    rows = np.array([[*x, n] for x, n in sent]) / [50, 50, 10]
    factors = np.minimum(1, 1.5 / np.sqrt((rows**2).sum(axis=1)))
    assert (factors < 1).sum() == 1
    expected = (rows * factors[:, None]).sum(axis=0)
    ledger = rule(clip=1.5).add_noise(expected, factors, Ledger(), 0)
    found = round.report.totals
    assert np.isclose([*found["x"], found["n"]], expected * [50, 50, 10], rtol=1e-12, atol=1e-7).all()
    assert found["n"].dtype == np.float64
    assert ledger.rounds == 1
    with pytest.raises(errors.RangeError, match="reproducible"):
        totals.privacy  # noqa: B018
    assert round.report.privacy["rounds"] == 1


def test_noise_has_the_deviation_and_a_budget():
    private = PrivateMean(clip=3.0, noise=0.5, expected=1, rounds=1)
    totals = Totals({"n": np.zeros(20_000, int)}, 4, bounds={"n": (-8, 8)}, private=private)
    with totals.open_round() as round:
        pass
    assert round.report.totals["n"].std() == pytest.approx(3.0 * 0.5 * 8, rel=0.03)
    with pytest.raises(errors.RoundError, match="budget"):
        totals.open_round()


def test_what_does_not_combine_is_refused_when_made():
    with pytest.raises(errors.RangeError, match="bounds of all totals"):
        Totals(FORM, SITES, bounds=BOUNDS, private=rule())
    with pytest.raises(errors.RangeError, match="quantile"):
        Totals({"n": 0}, 2, bounds={"n": (0, 1)}, private=rule(quantile=0.5, seed=None))
    with pytest.raises(errors.RangeError, match="noise under masks"):
        Totals({"n": 0}, 2, bounds={"n": (0, 1)}, private=rule()).encoding()
    with pytest.raises(errors.RangeError, match="'sum'"):
        Totals(FORM, SITES).encoding()
    for private, why in ((PrivateMean, "is a class"), ([rule()], "must be a PrivateMean"), (Median(), "must be a")):
        with pytest.raises(errors.RangeError, match=f"^private=.*: {why}"):
            Totals({"n": 0}, 2, bounds={"n": (0, 1)}, private=private)


def test_a_ledger_is_set_by_itself_or_its_state_and_only_in_memory(tmp_path):
    spent, arguments = Ledger(((2, 1.0, 0.5),)), {"values": {"n": 0}, "clients": 2, "bounds": {"n": (0, 1)}}
    totals = Totals(**arguments, private=rule(seed=None))
    for ledger in (spent, spent.to_state()):
        totals.privacy = ledger
    assert totals.privacy == spent
    for wrong in (None, {"entries": [[1]], "clip": None}, {"entries": [[-5, 1, 1]], "clip": None}):
        with pytest.raises(errors.RangeError, match=r"^privacy: must be a Ledger"):
            totals.privacy = wrong
    with Totals(**arguments, path=tmp_path / "t") as kept, pytest.raises(errors.RangeError, match=r"^privacy: the fol"):
        kept.privacy = spent


# Masks.


def masked(totals, sent, dropping=(), **options):
    """Run the phases of a masked sum; return it. ``dropping`` clients are lost before their masked values arrive."""
    secure_module = pytest.importorskip("fedcore.secure")
    secure = secure_module.SecureServer(sent, totals.encoding(), min_clients=7, **options.pop("server", {}))
    clients = {i: secure_module.SecureClient(min_clients=5, **options.get("client", {})) for i in sent}
    for i, key in options.get("keys", {}).items():
        clients[i] = secure_module.SecureClient(min_clients=5, identity=key, peers=options["peers"])
    while secure.messages:
        for i, message in secure.messages.items():
            if secure.phase == "masked" and i in dropping:
                continue
            words = clients[i].encoding.encode(sent[i]) if clients[i].needs_words(message) else None
            assert secure.receive(i, clients[i].answer(message, words)), secure.rejected
            clients[i] = type(clients[i]).from_state(json.loads(json.dumps(clients[i].to_state())))
        secure.close_phase()
    return secure


def unit(bound, clients):
    return 2.0 ** (math.frexp(clients * bound)[1] - 62)


def on_grid(values):
    """Values with each float rounded to the unit, as fractions would round it."""
    step = Fraction(unit(100, len(SITES)))
    rounded = [float(round(Fraction(x) / step) * step) for x in values["sum"]]
    return values | {"sum": np.array(rounded)}


def test_a_masked_sum_without_one_site_is_the_exact_sum_of_rounded_values():
    sent, totals = all_values(1), Totals(FORM, SITES, bounds=BOUNDS)
    secure = masked(totals, sent, dropping={"site-3"})
    with totals.open_round() as round:
        assert round.add_partial_sum(secure.partial_sum(totals), "masked sum")
    left = [on_grid(values) for site, values in sent.items() if site != "site-3"]
    assert set(round.report.accepted) == {*SITES} - {"site-3"}
    require_exact(round.report.totals, left)
    plain = totals_of({site: sent[site] for site in round.report.accepted})
    error = 9 * unit(100, 10) / 2 + np.spacing(np.abs(plain["sum"]))
    assert (np.abs(round.report.totals["sum"] - plain["sum"]) <= error).all()
    assert unit(100, 10) <= 10 * 100 * 2.0**-61


def test_masked_and_plain_values_are_one_sum_and_no_client_counts_twice():
    sent, totals = all_values(2), Totals(FORM, SITES, bounds=BOUNDS)
    secure = masked(totals, {site: sent[site] for site in SITES[:8]})
    partial = secure.partial_sum(totals)
    with totals.open_round() as round:
        assert round.add("site-8", sent["site-8"])
        assert round.add_partial_sum(partial, "sum")
        assert not round.add_partial_sum(partial, "sum")
        assert not round.add("site-0", sent["site-0"])
    assert [client for client, _ in round.report.rejected] == ["sum", "site-0"]
    require_exact(round.report.totals, [*(on_grid(sent[site]) for site in SITES[:8]), sent["site-8"]])
    with pytest.raises(errors.RangeError, match="another round"):
        secure.partial_sum(totals)
    with totals.open_round() as round:
        for wrong in (partial, None, partial.clients):
            assert not round.add_partial_sum(wrong, "sum")
    assert round.report.accepted == ()
    for wrong in (None, 5, Server(np.zeros(2, np.float32), "FedAvg", 3, lr=0.1)):
        with pytest.raises(errors.ArrayError, match=r"^server: "):
            secure.partial_sum(wrong)


def test_masked_sums_reach_the_bounds_exactly():
    bounds = {"n": (-(2**62 // 10) >> 9, 2**52), "x": (-1e280, 3.3), "y": (0, 1e-300)}
    form, totals = {"n": 0, "x": 0.0, "y": 0.0}, None
    for i in (0, 1):
        totals = Totals(form, SITES, bounds=bounds)
        sent = {site: {name: bounds[name][i] for name in form} for site in SITES}
        sent = {site: values | {"x": float(values["x"]), "y": float(values["y"])} for site, values in sent.items()}
        with totals.open_round() as round:
            assert round.add_partial_sum(masked(totals, sent).partial_sum(totals), "sum")
        found = round.report.totals
        assert int(found["n"]) == 10 * bounds["n"][i]
        for name in ("x", "y"):
            step = max(unit(max(map(abs, bounds[name])), 10), 2.0**-1000)
            assert abs(Fraction(float(found[name])) - 10 * Fraction(bounds[name][i])) <= 6 * Fraction(step)


def test_wrong_words_that_no_client_can_send_open_nothing():
    sent, totals = all_values(), Totals(FORM, SITES, bounds=BOUNDS)
    secure = masked(totals, sent)
    for at, wrong in ((0, 2**62 - 1), (3, -1), (4, 10 * 2**53)):
        right, secure.total[at] = secure.total[at], wrong
        with pytest.raises(errors.RangeError, match="masks hide which"):
            secure.partial_sum(totals)
        secure.total[at] = right
    assert secure.partial_sum(totals).clients == tuple(SITES)


def test_clients_refuse_values_and_sums_that_they_do_not_agree_to():
    pytest.importorskip("cryptography")
    from fedcore.secure import Encoding, SecureClient, SecureServer, identity_of

    totals = Totals(FORM, SITES, bounds=BOUNDS)
    for values in HOSTILE.values():
        with pytest.raises((errors.FedcoreError, RuntimeError)):
            totals.encoding().encode(values)
    key = bytes(32)
    for options in ({"max_norm": 1.0}, {"noise": 1.0, "identity": key, "peers": [key]}, {"min_clients": 9}):
        keys = dict.fromkeys(SITES, identity_of(key)) if "identity" in options else None
        secure = SecureServer(SITES, totals.encoding(), min_clients=7, identities=keys)
        with pytest.raises(errors.RoundError):
            SecureClient(**options).answer(secure.messages["site-0"])
    invitation = SecureServer(SITES, totals.encoding(), min_clients=7).messages["site-0"]
    with pytest.raises(errors.RoundError, match=r"^encoding: .* not TotalsForm"):
        SecureClient().answer(invitation, form=Encoding)
    assert SecureClient().answer(invitation, form=TotalsForm)


def test_masked_sums_with_identities():
    pytest.importorskip("cryptography")
    from fedcore.secure import identity_of

    keys = {site: bytes([i + 1] * 32) for i, site in enumerate(SITES)}
    public = {site: identity_of(key) for site, key in keys.items()}
    sent, totals = all_values(4), Totals(FORM, SITES, bounds=BOUNDS)
    secure = masked(totals, sent, server={"identities": public}, keys=keys, peers=[*public.values()])
    with totals.open_round() as round:
        round.add_partial_sum(secure.partial_sum(totals), "sum")
    require_exact(round.report.totals, [on_grid(values) for values in sent.values()])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def forge(data, at, most):
    """Replace a part of nested tables, at most so many levels down, by other JSON."""
    for _ in range(data.draw(st.integers(1, most))):
        if isinstance(at, dict | list) and at:
            key = data.draw(st.sampled_from([*at] if isinstance(at, dict) else range(len(at))))
            parent, at = at, at[key]
    parent[key] = data.draw(JSON)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_forged_form_is_an_error_by_name(data):
    state = json.loads(json.dumps(Totals(FORM, SITES, bounds=BOUNDS).encoding().to_state()))
    assert TotalsForm.read(state) == Totals(FORM, SITES, bounds=BOUNDS).encoding()
    forge(data, state, 5)
    with suppress(errors.ArrayError, errors.RangeError):
        form = TotalsForm.read(state)
        with suppress(errors.FedcoreError):
            assert form.encode(GOOD).shape == (form.words,) == (12,)


# Folders.


def of_folder(path, **options):
    bounds = BOUNDS | {"count": (0, np.int64(10**6)), "histogram": (0, 10**6)}
    return Totals(FORM, SITES, **{"bounds": bounds, "private": rule(seed=None), "path": path} | options)


def play(totals):
    with totals.open_round() as round:
        assert round.add(np.str_("site-1"), GOOD)
        assert not round.add("site-2", HOSTILE["NaN"])
    return round.report


def test_a_folder_has_a_document_of_each_round_and_continues_with_its_ledger(tmp_path):
    with of_folder(tmp_path / "t") as totals:
        reports = [play(totals)]
        is_locked(tmp_path / "t")
        assert not killed(lambda: is_locked(tmp_path / "t"))  # in another process
        with pytest.raises(errors.PicklingError):
            copy.deepcopy(totals)
    with of_folder(tmp_path / "t", audit_key=bytes(32), min_clients=1) as totals:
        assert (totals.round_number, totals.privacy.rounds) == (1, 1)
        reports.append(play(totals))
        log = totals.audit_log()
    for number, (report, document) in enumerate(zip(reports, log, strict=True)):
        assert (report.round, document["round"], document["privacy"]["entries"]) == (
            number,
            number,
            [[number + 1, 1.0, 0.5]],
        )
        assert document["updates"] == [{"client": "site-1"}]
        assert document["rejected"] == [{"client": "site-2", "reason": report.rejected[0][1]}]
        shown = {name: np.asarray(total).tolist() for name, total in report.totals.items()}
        assert document["totals"] == shown
        text = json.dumps(shown, sort_keys=True).encode()
        assert document["digest"] == blake2b(text, digest_size=32).hexdigest()
        text = json.dumps(document, sort_keys=True).encode()
        assert report.audited == blake2b(text, digest_size=32).hexdigest()
    assert log[1]["previous"] == reports[0].audited
    with pytest.raises(errors.CheckpointError, match="audit_key"):
        of_folder(tmp_path / "t")
    assert f"newest document: {reports[1].audited}" in output_of("store", "audit", f"{tmp_path}/t")
    output_of("store", "audit", f"{tmp_path}/t", "--export", f"{tmp_path}/log")
    checked = output_of("audit", "check", f"{tmp_path}/log", "--anchor", reports[0].audited)
    assert "sound: 2 documents of 2 rounds" in checked


def test_ids_of_numpy_have_documents(tmp_path):
    with Totals({"n": 0}, 3, path=tmp_path / "t") as totals, totals.open_round() as round:
        partial = totals.encoding().partial_sum(totals, np.int64([6]), np.arange(3))
        assert round.add_partial_sum(partial, np.int64(0))
        assert not round.add_partial_sum(partial, np.int64(0))
    (document,) = read_audit(tmp_path / "t")[0][1:]
    assert document["updates"] == [{"client": i} for i in range(3)]
    assert (document["totals"], document["rejected"][0]["client"]) == ({"n": 6}, 0)


def is_locked(path):
    with pytest.raises(errors.LockedError):
        of_folder(path)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("values", {"values": FORM | {"sum": np.zeros(4)}}),
        ("values", {"values": FORM | {"more": 1}}),
        ("bounds", {"bounds": {"sum": (-100.0, 51.0)}}),
        ("clients", {"clients": SITES[:9]}),
        ("clients", {"clients": [*SITES[:9], "site-10"]}),
    ],
)
def test_another_form_is_refused_by_name_and_another_order_is_not(tmp_path, name, other):
    given = {"values": FORM, "clients": SITES, "bounds": BOUNDS, "path": tmp_path / "t"}
    with Totals(**given) as totals, totals.open_round() as round:
        round.add("site-1", GOOD)
    with pytest.raises(errors.CheckpointError, match=f"^{name}: "):
        Totals(**given | other)
    turned = {key: FORM[key] for key in reversed(FORM)}
    with Totals(**given | {"values": turned, "clients": SITES[::-1]}) as totals, totals.open_round() as round:
        round.add("site-2", GOOD)
    require_exact(round.report.totals, [GOOD])


def test_a_kill_at_any_call_leaves_a_whole_round_or_none(folder_in_memory):
    """What ``finish`` returned is in the folder; a round is there with its document and ledger, or absent."""

    def act(path, told):
        with of_folder(path) as totals:
            for _ in range(2):
                told.write_text(told.read_text() + f"{play(totals).audited}\n")

    def begin(name):
        (folder_in_memory / f"{name}.txt").write_text("")
        return folder_in_memory / str(name), folder_in_memory / f"{name}.txt"

    calls, rounds = calls_of(lambda: act(*begin("whole"))), Counter()
    for call in range(1, calls + 1):
        path, told = begin(call)

        def dies(path=path, told=told, call=call):
            die_at(call, after=call % 2 == 0)
            act(path, told)

        assert killed(dies)
        with of_folder(path) as totals:
            log, published = totals.audit_log(), told.read_text().split()
            assert len(log) == totals.round_number == totals.privacy.rounds
            assert [digest_of_text(json.dumps(one)) for one in log][: len(published)] == published
            assert len(log) - len(published) in (0, 1)
            rounds[len(log)] += 1
            assert play(totals).round == len(log)
    assert set(rounds) == {0, 1, 2}


def test_a_full_disk_leaves_the_round_open(tmp_path, monkeypatch):
    with of_folder(tmp_path / "t") as totals:
        open_round = totals.open_round()
        open_round.add("site-1", GOOD)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "commit", fail)
            with pytest.raises(errors.StoreError, match="full"):
                open_round.finish()
        assert (totals.round_number, totals.privacy.rounds, totals.audit_log(), open_round.is_open) == (0, 0, [], True)
        assert open_round.finish().audited
        assert len(totals.audit_log()) == totals.round_number == 1


def fail(*_):
    raise full("commit")


TAMPERED = {
    "content": "UPDATE documents SET content = replace(content, 'site-1', 'site-3') WHERE number = 0",
    "the last": "UPDATE documents SET content = replace(content, 'site-1', 'site-3') WHERE number = 1",
    "the first is missing": "DELETE FROM documents WHERE number = 0",
    "the last is missing": "DELETE FROM documents WHERE number = 1",
    "all are missing": "DELETE FROM documents",
    "one more": "INSERT INTO documents SELECT 2, content FROM documents WHERE number = 1",
    "no JSON": "UPDATE documents SET content = '[' WHERE number = 1",
}


@pytest.mark.parametrize("change", TAMPERED)
def test_a_changed_folder_is_refused(tmp_path, change):
    with of_folder(tmp_path / "t") as totals:
        play(totals)
        play(totals)
    with sqlite3.connect(tmp_path / "t" / "index.sqlite") as index:
        index.execute(TAMPERED[change])
    index.close()
    for _ in range(2):  # the first one left no lock
        with pytest.raises(errors.CheckpointError, match=r"audit: |damaged"):
            of_folder(tmp_path / "t")
    assert invoke("store", "verify", f"{tmp_path}/t").status == 1


def test_a_ledger_cannot_be_rolled_back(tmp_path):
    with of_folder(tmp_path / "t") as totals:
        play(totals)
    with ClientStore.open(tmp_path / "t") as store:
        before = store.state
    with of_folder(tmp_path / "t") as totals:
        play(totals)
    with ClientStore.open(tmp_path / "t") as store:
        store.commit(1, state=before)
    with pytest.raises(errors.CheckpointError, match="damaged"):
        of_folder(tmp_path / "t")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_hostile_state_is_an_error_by_name(data):
    with TemporaryDirectory() as folder:
        with of_folder(f"{folder}/t") as totals:
            play(totals)
        with ClientStore.open(f"{folder}/t") as store:
            forge(data, state := store.state, 4)
            store.commit(1, state=state)
        with suppress(errors.CheckpointError, errors.StoreError), of_folder(f"{folder}/t") as totals:
            assert totals.round_number == totals.privacy.rounds == 1
        with suppress(errors.CheckpointError):
            read_audit(Path(folder, "t"))


def test_a_folder_of_something_else_is_refused(tmp_path):
    Server(np.zeros(2, np.float32), "FedAvg", 3, lr=0.1, storage=Storage(tmp_path / "s")).close()
    ClientStore(SITES, 1, medium="mmap", path=tmp_path / "c").close()
    (tmp_path / "f").write_text("years of work")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis").write_text("years of work")
    for name in "scfd":
        with pytest.raises((errors.CheckpointError, errors.StoreError), match=str(tmp_path / name)):
            of_folder(tmp_path / name)
    Totals(FORM, SITES, path=tmp_path / "t").close()
    with pytest.raises(errors.CheckpointError, match=r"Totals\(path="):
        Server.load(tmp_path / "t")
