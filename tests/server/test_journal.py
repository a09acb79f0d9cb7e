"""A round with a journal: no accepted update is lost, none counts twice, and the bits are those of a straight run."""

import contextlib
import copy
import itertools
import json
import os
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcore import ClientStore, Compute, Limits, Model, RoundPolicy, Server, Storage, Update, errors
from fedcore.cli import main
from fedcore.cluster import Slices
from fedcore.errors import FedcoreError, RangeError, RoundError, StoreError
from fedcore.rules import PrivateMean
from fedcore.server.aggregation import Sum
from fedcore.server.folder import HEADER, JOURNAL, Journal, open_updates
from fedcore.server.round import SECOND
from fedcore.store.inspect import state_of
from fedcore.validation import check_number
from tests.kills import count_calls, die_at
from tests.kit import flat
from tests.server import test_groups as groups
from tests.server.rounds import METHODS, everything, go_on, go_on_acknowledging, made, updates_of
from tests.store.kit import CALLS, broken, fail_at, full
from tests.store.recording import Recorder, put

ROOT = Path(__file__).parents[2]


def interrupted(server, path, updates):
    """Add some updates to a round, close the server in the middle of it, and return the loaded server."""
    round = server.open_round()
    assert [round.add(**update._asdict()) for update in updates] == [True] * len(updates)
    server.close()
    return Server.load(path)


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_round_ends_as_a_straight_one(method, tmp_path):
    straight, server = made(method), made(method, path=tmp_path / "s", journal=True)
    for _ in range(4):
        updates = list(updates_of(server))
        assert open_updates(tmp_path / "s", state_of(tmp_path / "s")) == []
        server = interrupted(server, tmp_path / "s", updates[:1])
        server = interrupted(server, tmp_path / "s", updates[1:2])
        with server.open_round() as round:
            assert set(round.clients) == {update.client for update in updates[:2]}
            if updates:
                assert not round.add(**updates[0]._asdict())  # a client counts once
            round.add_batch(updates[2:])
        assert set(server.open_round().clients) == set()
        server._between_rounds()
        go_on(straight, 1)
        assert everything(server) == everything(straight)


SERVERS = {
    "whole updates": (partial(made, "FedVARP"), updates_of, everything),
    "partial updates": (
        lambda **options: groups.new_server("MIFA", **flat(**options)),
        groups.updates_of,
        groups.state,
    ),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", SERVERS)
def test_a_kill_at_any_system_call(kind, after, tmp_path):
    """Between two calls that change the disk: in an update, in the commit, and while the journal is emptied."""
    make, sent, everything = SERVERS[kind]
    go_on = partial(go_on_acknowledging, updates_of=sent)

    def play(folder, call):
        """Run two rounds in a child, which is killed at a system call; return the accepted updates and the calls."""
        make(path=folder, journal=True).close()
        read, write = os.pipe()
        if not (child := os.fork()):
            try:
                os.dup2(write, 1)
                sys.stdout = os.fdopen(1, "w", closefd=False)
                calls = count_calls() if call is None else die_at(call, after=after)
                with Server.load(folder) as server:
                    go_on(server, 2)
                print("calls", len(calls or ()), flush=True)
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            lines = [line.split() for line in pipe]
        os.waitpid(child, 0)
        return lines

    go_on(straight := make(), 2)
    (*_, (_, total)) = play(tmp_path / "whole", None)
    assert int(total) > 20
    for call in range(1, int(total), 9):
        lines = play(folder := tmp_path / f"at-{call}", call)
        with Server.load(folder) as server:
            kept = {str(client) for client in open_updates(folder, state_of(folder))}
            assert kept >= {what for round, what in lines if int(round) == server.round_number and what != "finished"}
            go_on(server, 2)
            assert everything(server) == everything(straight)


@pytest.mark.parametrize("most", [1, pytest.param(20, marks=pytest.mark.endurance)])
def test_a_loss_of_power_at_any_write(most, tmp_path, monkeypatch):
    """Disks with a random part of the unsynced bytes, after every write: each accepted update is there once."""
    made("FedVARP", path=tmp_path / "s", journal=True).close()
    straight, server = made("FedVARP"), Server.load(tmp_path / "s")  # with empty logs of SQLite
    recorder = Recorder(tmp_path / "s", monkeypatch, JOURNAL)
    for end in (3, 1):  # a round, and the first update of the next
        round = server.open_round()
        for update in list(updates_of(server))[:end]:
            assert round.add(**update._asdict())
            recorder.events.append(("mark", (server.round_number, round.clients)))
        if end == 3:
            round.finish()
            recorder.events.append(("mark", (server.round_number, ())))
    monkeypatch.undo()
    server.close()
    go_on(straight, 1)
    tried = interrupted = 0
    for files, _ in recorder.crashes(most):
        put(files, left := tmp_path / "left")
        (now, accepted), tried = recorder.mark or (0, ()), tried + 1
        with Server.load(left) as server:
            assert now <= server.round_number <= now + 1
            if server.round_number == now:
                kept = open_updates(left, state_of(left))
                assert set(kept) >= set(accepted)
                interrupted += bool(kept)
            go_on_acknowledging(server, 1)
            assert everything(server) == everything(straight)
    assert tried > 20
    assert interrupted > tried / 4


@pytest.mark.parametrize("error", [full, broken])
def test_a_full_disk_rejects_the_update_and_the_round_continues(error, tmp_path, monkeypatch):
    straight, server = made("FedAvg"), made("FedAvg", path=tmp_path / "s", journal=True)
    first, *others = updates_of(server)
    for call in range(1, 40):
        with server.open_round() as round, monkeypatch.context() as patch:
            called = fail_at(patch, call, error, CALLS)
            accepted = round.add(**first._asdict())
            round.abort()
        if len(called) < call:
            break
        if not accepted:
            assert "journal" in dict(round.rejected)[first.client]
            break
    assert not accepted
    with server.open_round() as round:
        assert round.add_batch([first, *others]) == [True] * (1 + len(others))
    go_on(straight, 1)
    assert np.array_equal(server.x, straight.x)
    server.close()


def test_only_abort_drops_updates(tmp_path):
    server = made("FedAvg", path=tmp_path / "s", journal=True)
    (first, *_) = updates_of(server)
    with pytest.raises(KeyboardInterrupt), server.open_round() as round:
        round.add(**first._asdict())
        raise KeyboardInterrupt
    round = server.open_round()
    assert round.clients == (first.client,)
    round.abort()
    assert server.open_round().clients == ()
    server.close()
    assert open_updates(tmp_path / "s", state_of(tmp_path / "s")) == []


@pytest.mark.parametrize("shards", [1, 2])
def test_a_journal_has_no_rejected_updates(shards, tmp_path):
    """A NaN that the fold finds, and updates without examples before the first one with examples."""
    x0, path = np.zeros(40_000, np.float32), tmp_path / "s"
    server = made("FedAvg", x0, path=path, journal=True, shards=shards, batch_size=1, clients=5)
    y = np.ones_like(x0)

    def kept():
        return set(open_updates(path, state_of(path if shards == 1 else path / "shard-0")))

    with pytest.raises(KeyboardInterrupt), server.open_round() as round:
        assert round.add(0, y, steps=1)
        assert not round.add(1, y * np.nan, steps=1)
        assert set(round.clients) == {0} == kept()
        assert round.add(1, 2 * y, steps=1)
        round.add(2, 3 * y, steps=1, examples=2)
        assert set(round.clients) == {2} == kept()
        assert round.add(3, 7 * y, steps=1, examples=2)
        assert not round.add(4, y, steps=1)
        raise KeyboardInterrupt
    server.close()
    assert kept() == {2, 3}
    with Server.load(path) as server:
        with server.open_round() as round:
            assert set(round.clients) == {2, 3}
        assert round.report.rejected == ()
        assert np.array_equal(server.x, 5 * y)


@pytest.mark.parametrize(("shards", "weight", "kept"), [(1, 1e-40, []), (2, 1e-40, []), (1, 1.0, [0])])
def test_a_journal_has_no_updates_whose_sums_are_refused(shards, weight, kept, tmp_path, monkeypatch):
    """Such updates would end each further round; a wrong rate can be corrected."""
    path = tmp_path / "s"
    if weight == 1:
        monkeypatch.setattr("fedcore.server.state.step_length", lambda *_: check_number("rate", 0.0, "(0, inf)"))
    server = made("FedAvg", np.zeros(40_000, np.float32), path=path, journal=True, shards=shards, clients=2)
    with pytest.raises(RangeError), server.open_round() as round:
        assert round.add(0, np.ones(40_000, np.float32), steps=1, weight=weight)
    server.close()
    assert open_updates(path, state_of(path if shards == 1 else path / "shard-0")) == kept


def test_removed_clients_and_undone_rounds_leave_nothing(tmp_path):
    server = made("FedAvg", path=tmp_path / "s", journal=True, keep_previous=True)
    first, second, *_ = updates_of(server)
    round = server.open_round()
    round.add_batch([first, second])
    round.abort(keep=True)
    server.remove_client(first.client)
    with server.open_round() as round:
        assert round.clients == (second.client,)
        assert [client for client, _ in round.rejected] == [first.client]
    server.close()
    with ClientStore.open(tmp_path / "s", keep_previous=True) as store:
        assert store.undo()
    with Server.load(tmp_path / "s") as server:
        assert (server.round_number, server.open_round().clients) == (0, ())


def test_a_damaged_update_is_an_error(tmp_path, capsys):
    server = made("FedAvg", path=tmp_path / "s", journal=True)
    server.open_round().add_batch(list(updates_of(server)))
    server.close()
    main(["store", "info", str(tmp_path / "s")])
    main(["store", "verify", str(tmp_path / "s")])
    assert "updates in the journal" in capsys.readouterr().out
    with ClientStore.open(tmp_path / "s" / JOURNAL, readonly=True) as store:
        place = store.row(store.registry.id_of(0)).tobytes()
    file = tmp_path / "s" / JOURNAL / "rows.slots"
    content = file.read_bytes()
    file.write_bytes(content.replace(place, place[:-4] + b"\1\2\3\4"))
    with pytest.raises(SystemExit):
        main(["store", "verify", str(tmp_path / "s")])
    assert "open round: " in capsys.readouterr().out
    with Server.load(tmp_path / "s") as server, pytest.raises(errors.CorruptionError):
        server.open_round()


@pytest.mark.parametrize("partial", [{}, {"A": "a"}], ids=len)
def test_verify_computes_the_round_that_a_restarted_server_finishes(partial, tmp_path, capsys):
    """While the server writes, and with another result after each update; nothing is committed."""

    def verified():
        main(["store", "verify", "--round", "--json", str(tmp_path / "s")])
        return json.loads(capsys.readouterr().out)["open_round"]

    policy = RoundPolicy(min_clients=2)
    x0 = Model({"a": np.zeros(30, np.float32), "b": np.zeros(40, np.float32)}, partial)
    server = made("MimiC", x0, path=tmp_path / "s", journal=True, audit=True, policy=policy)
    go_on(server, 2)
    digests = set()
    for _ in range(2):
        updates = list(updates_of(server))
        round = server.open_round()
        for k, update in enumerate(updates):
            found = verified()
            assert (found["accepted"], found["missing"] is None) == ([one.client for one in updates[:k]], k >= 2)
            digests.add(found["digest"])
            assert round.add(**update._asdict())
        server.close()
        found = verified()
        server = Server.load(tmp_path / "s", storage=Storage(audit=True), policy=policy)
        x = server.x.copy()
        server.open_round().finish()
        assert found["digest"] == server.audit_log()[-1]["x_after"]
        assert found["step"] == pytest.approx(np.linalg.norm(server.x - x), rel=1e-6)
    assert len(digests) > 3
    server.close()
    made("MimiC", path=tmp_path / "t").close()
    with pytest.raises(SystemExit):
        main(["store", "verify", "--round", str(tmp_path / "t")])


def test_verify_draws_no_noise(tmp_path, capsys):
    server = made("FedAvg", path=tmp_path / "s", journal=True, aggregation=[PrivateMean(1, 1, 2)], server_lr=1.0)
    with contextlib.suppress(KeyboardInterrupt), server.open_round() as round:
        round.add(**next(iter(updates_of(server)))._asdict())
        raise KeyboardInterrupt
    server.close()
    main(["store", "verify", "--round", "--json", str(tmp_path / "s")])
    found = json.loads(capsys.readouterr().out)["open_round"]
    assert (len(found["accepted"]), found["step"], found["digest"]) == (1, None, None)
    main(["store", "verify", "--round", str(tmp_path / "s")])
    assert "|x'" not in capsys.readouterr().out


@pytest.mark.parametrize("options", [{}, {"journal": True}, {"shards": 2}])
def test_an_update_in_pieces_counts_as_a_whole(options, tmp_path):
    if "journal" in options:
        options = options | {"path": tmp_path / "s"}
    x0 = {"a": np.zeros((200, 200), np.float32), "b": np.zeros(5, np.float32), "n": np.array(3)}
    whole, server = made("SCAFFOLD, two vectors", x0), made("SCAFFOLD, two vectors", x0, **options)
    rng = np.random.default_rng(0)
    model = {"a": rng.normal(size=(200, 200)).astype(np.float32), "b": rng.normal(size=5), "n": np.array(4)}
    control = rng.normal(size=40_005).astype(np.float32)
    with whole.open_round() as round:
        round.add(
            0, np.concatenate([model["a"].reshape(-1), np.float32(model["b"])]), steps=2, examples=3, control=control
        )
    with server.open_round() as round:
        incoming = round.begin(0, steps=2, examples=3)
        incoming.write("control", control[30_000:], start=30_000)
        incoming.write("a", model["a"][100:], start=20_000)
        incoming.write("b", model["b"])
        incoming.write("a", model["a"][:100])
        other = round.begin(1, steps=2, examples=3)
        other.write("a", model["a"])
        assert not other.done()
        with pytest.raises(errors.RangeError):
            incoming.write("a", model["a"][:1], start=399)
        with pytest.raises(errors.ShapeError):
            incoming.write("b", model["b"], start=1)
        with pytest.raises(errors.UnknownNameError):
            incoming.write("c", model["b"])
        incoming.write("control", control[:30_000])
        assert incoming.done()
        with pytest.raises(RoundError):
            incoming.write("b", model["b"])
        round.begin(2, steps=2, examples=3).abandon()
        with pytest.raises(RangeError):
            round.begin(2, steps=0)
        with pytest.raises(RoundError):
            round.begin(0, steps=2)
    assert round.report.accepted == (0,)
    assert sorted(client for client, _ in round.report.rejected) == [0, 1, 2]  # as ``add``, which raises no error
    reasons = dict(round.report.rejected)
    assert reasons[1] == "update: parts are missing of b, control"
    assert reasons[2].startswith("steps=0")
    assert np.array_equal(server.x, whole.x)
    server.close()


def sent_as(kind, numbers, write):
    """Write a vector to an update in pieces, as a client would send it, and return what the server should decode."""
    n, rng = len(numbers), np.random.default_rng(1)
    bounds = [0, *np.sort(rng.choice(n, 3, replace=False)), n]
    parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
    rng.shuffle(parts)
    if kind == "top-k":
        at = np.argsort(-np.abs(numbers))[:50]
        write(numbers[at], at=at)
        return np.where(np.isin(np.arange(n), at), numbers, np.float32(0))
    if kind == "top-k, int8":
        at, codes, scales = rng.permutation(n)[:50], rng.integers(-127, 128, 50, np.int8), rng.random(4, np.float32)
        write(codes, at=at, scales=scales, block=16)
        decoded = np.zeros(n, np.float32)
        decoded[at] = codes * scales.repeat(16)[:50]
        return decoded
    decoded = np.empty(n, np.float32)
    for i, part in enumerate(parts):
        size = part.stop - part.start
        if kind == "int8" or (kind == "mixed" and i == 2):
            block = 1000 if i % 2 else size
            scales, codes = rng.random(-(-size // block), np.float32), rng.integers(-127, 128, size, np.int8)
            write(codes, part.start, scales=scales, block=block if i % 2 else None)
            decoded[part] = codes * scales.repeat(block)[:size]
        else:
            dtype = {"mixed": ["float32", "bfloat16", "", "float64"][i]}.get(kind, kind)
            sent = torch.from_numpy(numbers[part]).to(getattr(torch, dtype))
            write(sent.numpy() if dtype == "float16" else sent, part.start)
            decoded[part] = sent.float().numpy()
    return decoded


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8", "top-k", "top-k, int8", "mixed"])
@pytest.mark.parametrize("options", [{}, {"path": True, "resident": 1 << 20}, {"shards": 2}])
def test_updates_in_pieces_have_the_bits_of_decoding_first(kind, options, tmp_path):
    """Also if more of them are open than may be in memory."""
    n = (1 << 18) + 4_321
    options = options | ({"path": tmp_path / "s"} if "path" in options else {})
    whole, server = made("FedVARP", np.zeros(n, np.float32)), made("FedVARP", np.zeros(n, np.float32), **options)
    rng = np.random.default_rng(0)
    with whole.open_round() as decoded, server.open_round() as round:
        opened = [round.begin(client, steps=2, examples=3, kind="delta") for client in range(3)]
        for client, incoming in enumerate(opened):
            numbers = rng.normal(size=n).astype(np.float32)
            y = sent_as(kind, numbers, partial(incoming.write, "x"))
            assert decoded.add(client, y, steps=2, examples=3, kind="delta")
        assert all(incoming.done() for incoming in opened)
    go_on(whole, 1)
    go_on(server, 1)
    assert server.x.tobytes() == whole.x.tobytes()
    server.close()


def test_pieces_that_do_not_fit_are_refused():
    server = made("FedAvg", {"w": np.zeros(10, np.float32)})
    codes, scales = np.ones(8, np.int8), np.ones(2, np.float32)
    with server.open_round() as round:
        model, delta = (round.begin(client, steps=1, kind=kind) for client, kind in enumerate(("model", "delta")))
        with pytest.raises(RangeError, match="delta"):
            model.write("w", np.ones(1, np.float32), at=[3])
        for wrong in (
            {"scales": scales},
            {"scales": scales, "block": 3},
            {"scales": scales, "block": -(10**5000)},
            {"scales": scales.astype(float), "block": 4},
            {"scales": scales, "block": 4, "start": 3},
            {"at": range(3, 11), "scales": scales, "block": 4},
            {"at": [1] * 8, "scales": scales, "block": 4},
            {"at": [0.5] * 8, "scales": scales, "block": 4},
            {},
        ):
            with pytest.raises(errors.FedcoreError):
                delta.write("w", codes, **wrong)
        for wrong in ([1.0], 1.0, np.float32(3), b"123", np.ones(2)[::-1], np.ones(2, ">f4"), memoryview(b"123")):
            with pytest.raises(errors.FedcoreError):
                delta.write("w", wrong)
        for start in (0.0, "0", None, True, -1, 10**5000, -(10**5000)):
            with pytest.raises(RangeError, match="start"):
                delta.write("w", np.ones(2, np.float32), start)
        with pytest.raises(RangeError, match="block"):
            delta.write("w", np.ones(2, np.float32), block=10**5000)
        with pytest.raises(RangeError, match="start"):
            delta.write("w", np.ones(2, np.float32), 2, at=[0, 1])
        delta.write("w", codes, at=range(1, 9), scales=scales, block=4)
        with pytest.raises(RangeError, match="before"):
            delta.write("w", np.ones(1, np.float32))
        assert delta.done()
        model.abandon()
        infinite = round.begin(2, steps=1, kind="delta")
        infinite.write("w", np.int8([0, 127] * 5), scales=np.float32([np.inf]), block=2**63)
        infinite.done()
    assert round.report.accepted == (1,)
    assert "finite" in dict(round.report.rejected)[2]
    assert server.x.tolist() == [0] + [1] * 8 + [0]


def test_a_tensor_that_is_not_averaged_is_copied_once():
    x0 = {"w": np.zeros(2, np.float32), "n": np.array(3), "e": np.zeros((0, 4), np.float32)}
    server = made("FedAvg", Model(x0, partial={"g": ["w", "n", "e"]}))
    count = np.array(4)
    with server.open_round() as round:
        incoming = round.begin(0, steps=1)
        incoming.write("n", count)
        count[...] = 1000
        with pytest.raises(RangeError, match="once"):
            incoming.write("n", count)
        incoming.write("w", memoryview(np.ones(2, np.float32)).cast("B"))
        incoming.write("e", x0["e"])
        assert incoming.done()
        late = round.begin(1, steps=1)
    assert server.tensors()["n"] == 4
    with pytest.raises(RoundError, match="finished"):
        late.write("w", np.ones(2, np.float32))
    both = made("SCAFFOLD, two vectors", {"control": np.zeros(2, np.float32)})
    with both.open_round() as round, pytest.raises(RangeError, match="control"):
        round.begin(0, steps=1)


@pytest.mark.parametrize("policy", [RoundPolicy(), RoundPolicy(buffer=9)], ids=["round", "buffer"])
def test_a_client_has_one_open_update_and_a_round_has_max_open(policy):
    server = made("FedAvg", np.zeros(4, np.float32), policy=policy, limits=Limits(max_open=3))
    with server.open_buffer() if policy.buffer else server.open_round() as round:
        begin = partial(round.begin, steps=1, round=0)
        first, other = begin(0), begin(1)
        if policy.buffer:  # a copy's clients replace nothing here
            copy.deepcopy(server).open_buffer().begin(0, steps=1, round=0)
        first.write("x", np.ones(2, np.float32))
        with pytest.raises(RangeError):
            begin(0, steps=0)  # an invalid one replaces nothing
        second = begin(0)
        for call in (first.done, partial(first.write, "x", np.ones(2, np.float32))):
            with pytest.raises(RoundError):
                call()
        third = begin(2)
        with pytest.raises(RoundError, match="max_open"):
            begin(3)
        for incoming in (second, other):
            incoming.write("x", np.ones(4, np.float32))
            assert incoming.done()
        third.abandon()
        held = [begin(client) for client in (2, 3, 4)]
        del held[1]
        begin(5)
    assert round.report.accepted == (0, 1)
    assert [client for client, _ in round.report.rejected] == [0, 3]


def test_a_client_that_begins_without_end_takes_one_descriptor():
    server = made("FedAvg", np.zeros(4, np.float32), batch_size=1)
    before = len(os.listdir("/proc/self/fd"))
    with server.open_round() as round:
        held = []
        with pytest.raises(RoundError, match="replaced"):
            for _ in range(400):
                held.append(round.begin(0, steps=1))
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        held[-1].write("x", np.ones(4, np.float32))
        assert held[-1].done()
    assert round.report.accepted == (0,)


def test_a_client_begins_again_while_others_send():
    """``begin`` folds the held updates, and must wait for an ``add`` of another thread."""
    server = made("FedAvg", np.zeros(4, np.float32), batch_size=3)
    folding, most, fold = [], [], Sum.try_fold

    def slow(self, batch):
        folding.append(batch)
        most.append(len(folding))
        time.sleep(0.2)
        found = fold(self, batch)
        folding.pop()
        return found

    with server.open_round() as round, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sum, "try_fold", slow)
        for client in range(2):
            round.add(client, np.full(4, client, np.float32), steps=1, keep=True)
        with ThreadPoolExecutor() as pool:
            begun = pool.submit(round.begin, 0, steps=1)
            time.sleep(0.1)
            for client in range(2, 5):
                round.add(client, np.full(4, client, np.float32), steps=1, keep=True)
            assert isinstance(begun.exception(), RoundError)
    assert max(most) == 1
    assert (server.x == np.float32(40 / 15)).all()


def test_updates_in_pieces_beyond_the_batch_are_in_files(tmp_path, monkeypatch):
    server = made("FedAvg", np.zeros(100_000, np.float32), path=tmp_path / "s", batch_size=2)
    with server.open_round() as round:
        opened = [round.begin(client, steps=1) for client in range(4)]
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
        assert sum("deleted" in line for line in mapped) == 2

        def refused(*_):
            raise full("reserve")

        with monkeypatch.context() as patch, pytest.raises(StoreError, match="disk space"):
            patch.setattr(os, "posix_fallocate", refused)
            round.begin(4, steps=1)
        for incoming in opened:
            incoming.write("x", np.ones(100_000, np.float32))
            assert incoming.done()
    assert [client for client, _ in round.report.rejected] == [4]
    assert (server.x == 1).all()
    assert not any(
        "deleted" in line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    )
    server.close()


def test_a_journal_of_an_earlier_version_continues(tmp_path):
    """Its rows have the clients' ids, and their headers the order."""
    with zipfile.ZipFile(Path(__file__).with_name("journal.zip")) as file:
        file.extractall(tmp_path)
    assert open_updates(tmp_path, state_of(tmp_path)) == ["b", "a"]
    with Server.load(tmp_path) as server:
        with server.open_round() as round:
            assert set(round.clients) == {"a", "b"}
            round.add("c", np.float32([0, 0, 4]), steps=5, examples=40)
        assert round.report.accepted == ("b", "a", "c")
        np.testing.assert_allclose(server.x, np.float32([70, 110, 310]) / 80, rtol=1e-6)


def layers(count, name):
    """Tensors of two dtypes that are averaged, a float buffer, a constant, and a counter for each layer."""
    x0 = {"w": np.zeros((200, 200), np.float32), "running_mean": np.zeros(3, np.float32)}
    x0 |= {"half": np.zeros(3, np.float16), "mask": np.array([True, False])}
    return x0 | {name.format(i): np.array(i) for i in range(count)}


@pytest.mark.parametrize(
    ("shards", "count", "name"),
    [
        (1, 53, "layer3.{}.bn2.num_batches_tracked"),
        (2, 53, "layer3.{}.bn2.num_batches_tracked"),
        (2, 10_000, "{}.num_batches_tracked"),
        (1, 2, "deep." * 1000 + "{}"),
    ],
)
def test_a_journal_takes_any_model(shards, count, name, tmp_path):
    """ResNet-50's counters, more tensors, long names and long ids, and all forms of an update."""
    x0, ids = layers(count, name), ["a" * 100_000, "\u20ac\0" * 1000, 2**64 - 1, "new" * 50_000]
    ones = {key: np.ones_like(value) for key, value in x0.items()}
    sent = {key: value + ones[key] for key, value in x0.items()} | {"mask": x0["mask"]}
    updates = [
        Update(ids[0], sent, steps=np.int64(1), examples=2**53, lr=0.25),
        Update(ids[1], sent, steps=1, kind="gradient", examples=np.float32(2.5), weight=2.0),
        Update(ids[2], ones | {"mask": np.array([False, False])}, 1, kind="delta", examples=1, round=0),  # a late one
        Update(ids[3], np.ones(40_006), steps=2**31 - 1, examples=1),
    ]
    options = dict(clients=dict.fromkeys(ids[:3], 7), lr=0.1, server_lr=1.0, compute=Compute(shards=shards))
    options |= dict(limits=Limits(max_steps=2**31, max_client_lr=1.0), policy=RoundPolicy(max_staleness=1))
    straight = Server(x0, "FedAvg", **options)
    server = Server(x0, "FedAvg", storage=Storage(tmp_path / "s", journal=True), **options)
    for one in (straight, server):
        one.round([])
    with straight.open_round(newcomers={ids[3]: np.int64(5)}) as round:
        assert round.add_batch(updates) == [True] * 4
    opened = server.open_round(newcomers={ids[3]: np.int64(5)})
    assert opened.add_batch(updates) == [True] * 4
    server.close()
    with Server.load(tmp_path / "s") as server:
        with server.open_round() as again:
            pass
        assert np.array_equal(again.report.norms, round.report.norms)
        assert list(map(ids.index, again.report.accepted)) == [0, 1, 2, 3]
        assert server.x.tobytes() == straight.x.tobytes()
        named = server.tensors()
        assert all(np.array_equal(tensor, named[name]) for name, tensor in straight.tensors().items())


def test_an_error_while_an_update_is_written_is_a_rejection(tmp_path, monkeypatch):
    server = made("FedAvg", path=tmp_path / "s", journal=True)
    first, *others = updates_of(server)
    with server.open_round() as round:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_write", lambda *_: 1 / 0)
            assert not round.add_batch([first])[0]
        round.add_batch(others)
    assert dict(round.report.rejected)[first.client].startswith("journal: ")
    assert open_updates(tmp_path / "s", state_of(tmp_path / "s")) == []
    server.close()


class Odd:
    """A client's object that is not what it claims to be."""

    shape, dtype, nbytes = (20_000,), np.dtype("float32"), 80_000

    def __dlpack__(self, **_):
        raise RuntimeError("no memory")

    def __dlpack_device__(self):
        return 1, 0


ones = np.ones(20_000, np.float32)
ODD_VECTORS = [None, 3, "x", b"1", ones[:5], ones.astype(int), ones.reshape(2, -1), ones[::2], ones * np.nan, Odd()]
ODD_NUMBERS = [0, -1, "2", np.nan, np.inf, [1], 10**400, Odd()]
ODD = {
    "value": ODD_VECTORS,
    "control": [*ODD_VECTORS, torch.ones(20_000, device="meta")],
    "steps": [*ODD_NUMBERS, None, 1.5],
    "examples": ODD_NUMBERS,
    "lr": [*ODD_NUMBERS, 0.5, 1e-320],
    "round": [*ODD_NUMBERS[1:], 1, 2.0],
    "loss": ODD_NUMBERS[1:],
}
KINDS = {"plain": {}, "shards": {"shards": 2}, "buffer": {"buffer": 200, "max_staleness": 1}, "groups": {}}


@pytest.mark.parametrize("method", ["SCAFFOLD, two vectors", "QFedAvg"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("journal", [False, True])
def test_a_wrong_field_is_one_rejection_and_never_in_the_journal(method, kind, journal, tmp_path):
    """The same rejections and the same bits with shards, in a buffer and after a crash."""
    x0 = np.zeros(20_000, np.float32)
    wrong = [(name, value) for name, values in ODD.items() for value in values]
    clients = len(wrong) + 2
    options = dict(clients=clients, lr=0.1) | KINDS[kind] | (dict(path=tmp_path / "s", journal=True) if journal else {})
    model = Model({"x": x0}, partial={"x": ["x"]}) if kind == "groups" else x0
    server = made(method, model, **options)
    plain = made(method, x0, clients=clients, lr=0.1)
    good = Update(0, x0 + 1, 2, 3, control=x0 + 2, round=0, loss=1.0)
    updates = [good, *(good._replace(client=i, **{name: value}) for i, (name, value) in enumerate(wrong, 1))]
    updates.append(good._replace(client=clients - 1, value=x0 + 5))
    rejected = {}
    for one in (plain, server):
        round = one.open_round()
        round.add_batch(updates)
        rejected[one] = {client: reason.partition(", in ")[0] for client, reason in round.rejected}
        if one is server and journal:
            accepted = set(round.clients)
            server.close()
            server = Server.load(tmp_path / "s")
            round = server.open_round()
            assert (set(round.clients), round.rejected) == (accepted, ())
        round.finish()
    assert len(accepted if journal else round.report.accepted) == clients - len(rejected[plain])
    assert rejected.popitem()[1] == rejected[plain]
    assert server.x.tobytes() == plain.x.tobytes()
    server.close()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_new_rate_rejects_the_updates_of_the_old_one(shards, tmp_path):
    """As it rejects late updates; those of clients that choose their rates count, and models that are mixed."""
    x0 = np.zeros(20_000, np.float32)
    for method, limits, accepted in (
        ("FedAvg", Limits(), False),
        ("FedAvg", Limits(max_client_lr=1.0), True),
        ("FedAsync", Limits(), True),
    ):
        path, server_lr = tmp_path / f"{method}, {limits.max_client_lr}", 1.0 if method == "FedAvg" else None
        server = made(method, x0, lr=0.1, server_lr=server_lr, path=path, journal=True, shards=shards)
        server.open_round().add(0, x0 - 1, steps=2, examples=1)
        server.close()
        with Server.load(path, lr=0.2, limits=limits) as server:
            with server.open_round() as round:
                pass
            assert [reason[:7] for _, reason in round.report.rejected] == ([] if accepted else ["lr=0.1:"])
            # the mean gradient, by the rate of the steps
            assert method != "FedAvg" or (server.x == -5 * accepted).all()


def with_one_update(path, **options):
    server = made("SCAFFOLD", path=path, journal=True, keep_previous=True, **options)
    go_on(server, 1)
    server.open_round().add(0, server.x + 1, steps=2, examples=1)
    server.close()


@pytest.mark.parametrize("ending", ["abort", "finish"])
def test_a_round_without_the_journal_ends_its_updates(ending, tmp_path):
    with_one_update(tmp_path / "s")
    Server.load(tmp_path / "s", storage=Storage(journal=False)).close()  # nothing is lost before a round is opened
    with Server.load(tmp_path / "s", storage=Storage(journal=False)) as server:
        getattr(server.open_round(), ending)()
    assert not (tmp_path / "s" / JOURNAL).exists()
    with Server.load(tmp_path / "s", storage=Storage(journal=True)) as server:
        assert server.open_round().clients == ()


def test_an_undo_ends_the_open_round(tmp_path):
    """Another round without the journal follows, and the number of the open round is the same again."""
    with_one_update(tmp_path / "s")
    main(["store", "undo", str(tmp_path / "s")])
    with Server.load(tmp_path / "s") as server:
        assert len(server._journal._store.registry) == 0
        server.round([Update(1, server.x + 3, 2, 1)])
        assert (server.round_number, server.open_round().clients) == (1, ())


@pytest.mark.parametrize("shards", [1, 2])
def test_updates_that_started_from_other_vectors_are_rejected(shards, tmp_path):
    """The offset c = T / N of SCAFFOLD changes with the clients; other methods send x alone."""
    x0 = np.zeros(20_000, np.float32)
    for method in ("SCAFFOLD", "MIFA"):
        server = made(method, x0, lr=0.1, path=tmp_path / method, journal=True, shards=shards)
        server.round([Update(0, x0 + 1, 2, 1)])
        server.open_round().add(1, x0 + 2, steps=2, examples=1)
        server.close()
        with Server.load(tmp_path / method) as server:
            assert server.open_round().clients == (1,)
        with Server.load(tmp_path / method) as server:
            server.add_clients({"new": 5})
            round = server.open_round()
            assert (round.clients, len(round.rejected)) == (((), 1) if method == "SCAFFOLD" else ((1,), 0))


def test_a_newcomer_is_registered_before_its_round_continues(tmp_path):
    server = made("FedAvg", path=tmp_path / "s", journal=True)
    round = server.open_round(newcomers={"new": 3})
    round.add("new", server.x + 1, steps=2)
    round.abort(keep=True)
    server.add_clients({"new": np.int64(3)})
    assert server.open_round().clients == ("new",)
    server.close()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_copy_has_a_journal_too(shards, tmp_path):
    """It is a setting of the server, and not only a folder. A copy that was only loaded can be replaced."""
    x0 = np.zeros(20_000, np.float32)
    server = made("FedAvg", x0, path=tmp_path / "s", journal=True, shards=shards)
    for _ in range(2):
        server.save(tmp_path / "copy")
        Server.load(tmp_path / "copy").close()
    server.close()
    for _ in range(2):
        with Server.load(tmp_path / "copy") as copy:
            round = copy.open_round()
            round.add(0, x0, steps=2, examples=1)
    assert round.rejected == ((0, SECOND),)


CLAIMS = {"steps": 1, "examples": 1, "count": 1, "kind": "model", "apart": False, "outside": []}
MALFORMED = {
    "bytes": (b"\xff" * HEADER, {}),
    "list": (b"[]", {}),
    "deep": (b"[" * HEADER, {}),
    "no form": (b"{}", {}),
    "form": ({"apart": 1}, {}),
    "outside": ({"outside": 5}, {}),
    "kind": ({"kind": "zip"}, {}),
    "count": ({"count": -1}, {}),
    "weight": ({"weight": "a"}, {}),
    "steps": ({"steps": 10**30}, {}),
    "examples": ({"examples": {}}, {}),
    "lr": ({"lr": []}, {}),
    **{f"id {id}": ({}, {"id": id}) for id in ("abc", "0 [1]", "0 {", "0 null", f"{'9' * 30} 0", "-1 0", "0 77")},
    **{f"newcomers {new}": ({}, {"newcomers": new}) for new in (5, [[1]], [["a", 2]], [["a", "b"]], [None], "ab")},
    "round": ({}, {"round": [0]}),
    "format": ({}, {"format": 3}),
    "format text": ({}, {"format": "a"}),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_journal_is_an_error_that_names_it(what, tmp_path, capsys):
    """Or a rejection; and an error of fedcore's at every door."""
    (claims, state), path = MALFORMED[what], tmp_path / "s"
    Server(np.zeros(8, np.float32), "FedAvg", 3, lr=0.1, storage=Storage(path, journal=True)).close()
    with ClientStore.open(path / JOURNAL) as store:
        store.add(id := state.pop("id", "0 0"))
        row = store.stage(id)
        row[:] = 1
        header = claims if isinstance(claims, bytes) else json.dumps(CLAIMS | claims).encode()
        row[: HEADER // 4].view(np.uint8)[:] = np.frombuffer(header.ljust(HEADER), np.uint8)
        store.commit(0, state={"round": 0} | state)

    def opened():
        with Server.load(path) as server, server.open_round() as round:
            assert len(round.clients) + len(round.rejected) == (what != "round")

    for door in (["info"], ["verify", "--round"], ["verify"]):
        is_sound = False
        with contextlib.suppress(SystemExit):
            main(["store", *door, str(path)])
            is_sound = True
        assert "Traceback" not in "".join(capsys.readouterr())
    try:
        opened()
    except FedcoreError as error:
        assert str(path / JOURNAL) in str(error)  # noqa: PT017
        assert not is_sound or what == "newcomers [['a', 2]]"  # a size, of which only the server knows that it has none
        (path / JOURNAL).rename(tmp_path / "gone")
        with Server.load(path) as server:
            server.open_round().add(0, server.x, steps=1)
        assert open_updates(path, state_of(path)) == [0]


def test_a_journal_takes_slices_of_any_dtype(tmp_path):
    x0, y = np.zeros(20_000, np.float32), np.linspace(-1, 1, 20_000).astype(np.float32)
    parts = [torch.from_numpy(y[:16384]).bfloat16(), y[16384:].astype(np.float16)]
    server = made("FedAvg", x0, path=tmp_path / "s", journal=True, shards=2)
    server.open_round().add(0, Slices(parts), steps=1)
    server.close()
    with Server.load(tmp_path / "s", storage=Storage(journal=True)) as again:
        assert again.open_round().finish().accepted == (0,)
        np.testing.assert_array_equal(again.x, np.concatenate([parts[0].float(), parts[1]]).astype(np.float32))
