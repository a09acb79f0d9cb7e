"""Updates that arrive at least once count once: the bits are those of one delivery each, in the order of acceptance."""

import copy
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedcore import Compute, EdgeAggregator, Model, RoundPolicy, Server, Storage, Update, cluster
from fedcore.algorithms import MIFA, FedAsync, FedAvg, FedVARP, MimiC
from fedcore.rules import CountOnce, PrivateMean, RejectLong
from fedcore.server.folder import HEADER, go_back, open_updates
from fedcore.server.update import LONGEST_ID
from fedcore.store import ClientStore
from fedcore.store.inspect import state_of
from tests.kills import calls_of, die_at, killed
from tests.server.rounds import everything

ROOT, N, LARGE = Path(__file__).parents[2], 4, 2 * 16_384
LATE, BUFFER = RoundPolicy(max_staleness=2), RoundPolicy(buffer=3, max_staleness=2, discount=0.5)
EXACT = dict(compute=Compute(accumulator="exact"))
SCENARIOS = {
    "FedBuff": (FedAvg("uniform"), dict(policy=BUFFER)),
    "CA2FL": (FedVARP(), dict(policy=RoundPolicy(buffer=3, max_staleness=2))),
    "FedAsync": (FedAsync(0.5), dict(policy=RoundPolicy(buffer=1, max_staleness=3))),
    "clients count once": (FedAvg(), dict(policy=BUFFER, aggregation=[CountOnce()])),
    "buffer, exact sums": (FedAvg(), dict(policy=BUFFER, **EXACT)),
    "buffer, shards": (FedAvg(), dict(policy=BUFFER, compute=Compute(shards=2))),
    "buffer, journal": (FedAvg(), dict(policy=BUFFER)),
    "fresh": (FedAvg(), {}),
    "late": (MIFA(wait=False), dict(policy=LATE)),
    "late, exact sums": (FedAvg(), dict(policy=LATE, **EXACT)),
    "late, journal": (MimiC(), dict(policy=LATE)),
    "late, groups": (FedAvg(), dict(policy=LATE)),
    "private": (FedAvg("uniform"), dict(aggregation=[PrivateMean(1.0, 1.0, 2, seed=0)])),
}


def numbers(*values):
    return np.float32(values)


def made(scenario, path=None):
    method, options = SCENARIOS[scenario]
    model = {"w": np.zeros(LARGE if "shards" in scenario else 6, np.float32), "b": np.zeros(2, np.float32)}
    model = Model(model, partial={"one": "w", "two": "b"}) if "groups" in scenario else model
    return Server(model, method, N, lr=0.1, storage=path and Storage(path, journal=True), **options)


class Course:
    """A server that gets messages once or more, in any order, and one that gets each update once."""

    def __init__(self, scenario, seed, kept, path):
        self.rng, self.kept = random.Random(f"{scenario} {seed} {kept}"), kept
        self.path = path if "journal" in scenario else None
        self.server, self.straight = made(scenario, self.path), made(scenario)
        self.in_buffers = self.server.policy.buffer is not None
        self.messages, self.counted, self.sent, self.copies = [], set(), 0, 0
        self.begin()

    def begin(self):
        self.of_round = set()
        if not self.in_buffers:
            self.opened, self.due = self.server.open_round(), self.straight.open_round()

    def train(self):
        """A client sends an update, of this round or a late one."""
        client, self.sent = self.rng.randrange(N), self.sent + 1
        start = max(0, self.server.round_number - self.rng.randrange(2) * self.rng.randrange(4))
        y = np.random.default_rng(self.sent).normal(size=self.server.layout.n).astype(np.float32)
        self.messages.append(Update(client, y, 1 + self.sent % 3, round=start, update_id=f"{self.sent}"))

    def deliver(self):
        """Deliver some messages in any order; the network keeps copies of some."""
        some = [self.rng.choice(self.messages) for _ in range(self.rng.choice([1, 1, 1, 3]))]
        lost = {one.update_id for one in some if self.rng.random() > self.kept}
        self.messages = [one for one in self.messages if one.update_id not in lost] or self.messages
        if self.rng.random() < 0.1:  # damaged on the way
            some[0] = some[0]._replace(value=np.full_like(some[0].value, np.nan))
        due = [self.deliver_once(one) for one in some]
        if self.in_buffers and len(some) > 1:
            self.server.push(some)
            return
        replies = (self.server.open_buffer() if self.in_buffers else self.opened).add_batch(some)
        oldest = self.server.round_number - self.server.settings.policy.max_staleness
        for one, reply, counts in zip(some, replies, due, strict=True):
            is_copy = reply.status == "already counted"
            if counts is None:
                assert is_copy or (one.round < oldest and not reply)
            else:
                assert (bool(reply), is_copy) == (counts, False)
        if self.in_buffers:
            self.server.push([])

    def deliver_once(self, one):
        """Deliver an update to the other server unless it counts; return whether it counts now, or None for a copy."""
        if one.update_id in self.counted:
            self.copies += 1
            return None
        opened = self.straight.open_buffer() if self.in_buffers else self.due
        reply = bool(opened.add_batch([one._replace(update_id=None)])[0])
        if self.in_buffers:
            self.straight.push([])
        for ids in (self.counted, self.of_round) if reply else ():
            ids.add(one.update_id)
        return reply

    def close(self):
        """Finish the round, or abort it."""
        if abort := self.rng.random() < 0.25:
            self.counted -= self.of_round
        for opened in (self.opened, self.due):
            opened.abort() if abort else opened.finish()
        self.begin()

    def crash(self):
        """After an acknowledgement that no client hears; without a journal a copy of the server takes its place."""
        if self.path is not None:
            self.server.close()
            self.server = Server.load(self.path)
            self.opened = None if self.in_buffers else self.server.open_round()
        elif self.in_buffers and self.server.layout.n < LARGE:
            self.server = copy.deepcopy(self.server)

    def run(self, steps=40):
        acts = [self.train] * 6 + [self.deliver] * 14 + [self.crash] + [self.close] * (0 if self.in_buffers else 4)
        self.train()
        for _ in range(steps):
            self.rng.choice(acts)()
            assert self.server.round_number == self.straight.round_number
            assert self.server.x.tobytes() == self.straight.x.tobytes()
        self.server.close()
        return self.copies


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize("kept", [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_at_least_once_has_the_bits_of_once(scenario, seed, kept, tmp_path):
    """In all cases together 11,648 schedules, each of 40 events."""
    copies = sum(Course(scenario, 7 * seed + i, kept, tmp_path / f"{i}").run() for i in range(7))
    assert copies > 5


def test_exact_sums_have_the_bits_of_any_order():
    servers = [Server(np.zeros(9, np.float32), "FedAvg", N, lr=0.1, policy=LATE, **EXACT) for _ in range(2)]
    for t in range(20):
        rng = np.random.default_rng(t)
        updates = [Update(i, rng.normal(size=9).astype(np.float32), 1, round=t, update_id=t) for i in range(N)]
        servers[0].round([one._replace(update_id=None) for one in updates])
        copies = [*updates, *updates, *(one._replace(round=t - 1, update_id=t - 1) for one in updates if t)]
        servers[1].round([copies[i] for i in rng.permutation(len(copies))])
        assert servers[0].x.tobytes() == servers[1].x.tobytes()


def test_replies_and_ids_of_a_round():
    server = Server(numbers(0, 0), "FedAvg", 3, lr=0.1)
    with server.open_round() as opened:
        add = lambda client, *y, id, **more: opened.add(client, numbers(*y), steps=1, update_id=id, **more)  # noqa: E731
        assert not add(0, 1, 1, id="a")  # without its round a later copy could not be told
        assert add(0, np.nan, 1, id="a", round=0, keep=True).status == "held"
        assert add(0, 3, 3, id="a", round=0)  # the first one was rejected
        assert add(0, 4, 4, id="a", round=0).status == "already counted"  # whatever its vector
        assert add(0, 3, 3, id="a", round=0), "a client that sends until a true reply stops"
        assert add(0, 3, 3, id="b", round=0).status == "rejected"
        for id in ("", "x" * (LONGEST_ID + 1), "é" * LONGEST_ID, "\ud800", -1, 2**64, True, 2.5, b"x", ["x"]):
            assert not add(1, 9, 9, id=id, round=0)
        for client, id, status in ((1, "a", "held"), (2, 2**64 - 1, "held"), (1, "a", "already counted")):
            incoming = opened.begin(client, steps=1, round=0, update_id=id)  # ids are those of a client
            incoming.write(server.layout.names[0], numbers(6, 6))
            assert incoming.done().status == status
    assert (opened.report.accepted, server.x.tolist()) == ((0, 1, 2), [5, 5])
    with server.open_round() as opened:
        assert opened.add(0, numbers(3, 3), steps=1, round=0, update_id="a").status == "already counted"
    with server.open_round() as opened:  # older than the memory: rejected
        assert opened.add(0, numbers(3, 3), steps=1, round=0, update_id="a").status == "rejected"


def test_an_update_that_a_median_rejects_may_come_again():
    policy = RoundPolicy(buffer=20, max_staleness=2)
    server = Server(numbers(0, 0), FedAvg("uniform"), 12, lr=0.1, aggregation=[RejectLong(2)], policy=policy)
    server.push([Update(i, numbers(1, 100 * (i == 1)), 1, round=0, update_id=0) for i in range(10)])
    opened = server.open_buffer()
    assert [client for client, _ in opened.rejected] == [1]
    assert opened.add(1, numbers(1, 0), steps=1, round=0, update_id=0).status == "accepted"
    assert opened.add(2, numbers(1, 0), steps=1, round=0, update_id=0).status == "already counted"


def test_an_update_whose_push_is_interrupted_may_come_again():
    """At each line that follows the native call, and before it."""
    for count in range(1, 100):
        server, lines = Server(np.zeros(1, np.float32), "FedAvg", N, lr=0.1, policy=BUFFER), iter(range(count))
        first, *others = (Update(c, numbers(3), 1, round=0, update_id=7) for c in range(3))

        def traced(frame, event, value, lines=lines):
            inside = frame.f_code.co_qualname in ("Round._add_plain", "Round._add_new")
            if inside and event == "line" and next(lines, None) is None:
                sys.settrace(None)
                raise KeyboardInterrupt
            return traced

        sys.settrace(traced)
        try:
            server.push([first])
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(None)
        server.push([first])
        [report] = server.push(others)
        assert (report.accepted, report.rejected, server.x.tolist()) == ((0, 1, 2), (), [3])
    assert count > 10


def test_a_journal_with_gaps_gives_each_update_its_own_order(tmp_path):
    server = made("buffer, journal", tmp_path / "s")
    opened, good = server.open_buffer(), {"w": np.ones(6, np.float32), "b": np.ones(2, np.float32)}
    bad = good | {"b": np.float32([np.nan, 1])}
    for client, y in enumerate([good, bad, good, bad]):
        opened.add(client, y, steps=1, round=0, update_id=1, keep=client > 1)
    opened.abort(keep=True)
    server.close()
    with Server.load(tmp_path / "s") as server:
        opened = server.open_buffer()
        opened.add(3, good, steps=1, round=0, update_id=1)
        assert opened.finish().accepted == (0, 2, 3)


def test_a_longer_staleness_counts_no_copy_of_forgotten_rounds():
    server = Server(numbers(0), FedAsync(0.5), 2, lr=0.1, policy=RoundPolicy(buffer=1, max_staleness=1))
    updates = [Update(0, numbers(4), 1, round=t, update_id=t) for t in range(5)]
    for one in updates:
        server.push([one])
    server.change(policy=RoundPolicy(buffer=1, max_staleness=9))
    assert server.push(updates) == []
    assert len(server.push([Update(0, numbers(4), 1, round=5, update_id=5)])) == 1
    assert server.push(updates) == []


def buffered(path=None):
    storage = path and Storage(path, journal=True)
    return Server(np.zeros(LARGE, np.float32), "FedAvg", 3, lr=0.1, policy=BUFFER, storage=storage)


def kth(k):
    """Update k of a client; three close a buffer."""
    return Update(k % 3, np.full(LARGE, k + 1, np.float32), 1, round=max(0, k // 3 - 1), update_id=k)


def counts_no_copy(server, most):
    """Whether the server counts no copy of the first updates, and then the next ones."""
    straight = buffered()
    straight.push([kth(k) for k in range(most + 4)])
    assert server.push([kth(k) for k in range(most)]) == []
    server.push([kth(k) for k in range(most + 4)])
    return server.x.tobytes() == straight.x.tobytes()


def test_the_ids_follow_the_state(tmp_path):
    """Copies, loads, shards and other numbers of them, a replaced model, an undone round, and an erasure."""
    with buffered(tmp_path / "s") as server:
        server.push([kth(k) for k in range(7)])
    with Server.load(tmp_path / "s", storage=Storage(medium="ram")) as server:  # the folder stays as it is
        assert server.push([kth(k) for k in range(6)]) == []
    with Server.load(tmp_path / "s") as server:
        server.open_buffer().abort(keep=True)
        server.save(tmp_path / "copy")
        assert counts_no_copy(server, 7)
    for shards in (2, 1):
        with Server.load(cluster.reshard(tmp_path / "copy", shards, to=tmp_path / f"{shards}")) as server:
            assert counts_no_copy(server, 6)
    with Server.load(tmp_path / "copy") as server:
        assert counts_no_copy(copy.deepcopy(Server.load(tmp_path / "copy", storage=Storage(medium="ram"))), 6)
        server.replace_x(server.x + 1)
        server.remove_client(2)
        server.add_clients(2)
        for _ in range(2):  # an aborted round forgets its ids
            replies = server.open_buffer().add_batch([kth(5), kth(6)])
            assert [reply.status for reply in replies] == ["already counted", "accepted"]
            server.open_buffer().abort()
        server.remove_client(2, erase=True)
        assert not server._backend.snapshot.norms["ids"][1:].any()
        replies = server.open_buffer().add_batch([kth(3), kth(4)])
        assert [reply.status for reply in replies] == ["rejected"] * 2  # of a round whose ids are forgotten


def test_an_undone_round_forgets_its_ids(tmp_path):
    storage = Storage(tmp_path / "s", keep_previous=True)
    with Server(numbers(0), "FedAvg", 2, lr=0.1, storage=storage) as server:
        for t in range(2):
            server.round([Update(0, numbers(t + 1), 1, round=t, update_id=t)])
    rows = ClientStore.open(tmp_path / "s", keep_previous=True)
    assert go_back(rows, 1)
    with Server.load(rows) as server, server.open_round() as opened:
        assert opened.add(0, numbers(1), steps=1, round=0, update_id=0).status == "already counted"
        assert opened.add(0, numbers(2), steps=1, round=1, update_id=1).status == "held"


def test_an_edge_counts_an_update_once_in_each_opening_of_a_round():
    server = Server(numbers(0), "FedAvg", 2, lr=0.1, policy=LATE, **EXACT)
    edge = EdgeAggregator(numbers(0), "FedAvg", [0, 1], lr=0.1)
    update = Update(0, numbers(4), 1, round=0, update_id="a")
    for aborts in (True, False):  # the client then sends again
        with server.open_round() as opened:
            opened.add_partial_sum(sent := edge.fold(server.x, [update, update], round=0), "edge")
            opened.add_partial_sum(sent, "edge")
            assert (opened.clients, len(opened.rejected)) == ((0,), 1)
            if aborts:
                opened.abort()
    assert (server.round_number, server.x.tolist()) == (1, [4])
    with server.open_round() as opened:
        assert not opened.add(*update[:2], steps=1, round=0, update_id="a")  # it was in the sum


def test_a_journal_has_room_for_the_longest_id(tmp_path):
    server = Server(numbers(0), "FedAvg", [0], lr=0.1, policy=BUFFER, storage=Storage(tmp_path / "s", journal=True))
    claims = dict(examples=0.12345678901234567, lr=0.1, weight=1.2345678901234567e-300, loss=1.2345678901234567e-300)
    update = Update(0, numbers(1), 10**6, **claims, round=0, update_id="\x01" * LONGEST_ID)
    assert server.open_buffer().add_batch([update])[0].status != "rejected", HEADER
    server.close()
    with Server.load(tmp_path / "s") as server:
        assert server.open_buffer().add_batch([update])[0].status == "already counted"


ALL = 14


def deliver(server, order, note=lambda k: None):
    for k in order:
        server.push([kth(k)])
        note(k)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.endurance)])
def test_a_kill_at_any_system_call_and_all_updates_again(step, after, tmp_path):
    straight = buffered()
    deliver(straight, range(ALL))

    def play(folder):
        with Server.load(folder) as server:
            deliver(server, range(ALL))

    buffered(tmp_path / "whole").close()
    total = calls_of(lambda: play(tmp_path / "whole"))
    for call in range(1, total, step):
        buffered(folder := tmp_path / f"{call}").close()
        assert killed(lambda call=call, folder=folder: (die_at(call, after=after), play(folder)))
        with Server.load(folder) as server:
            done = 3 * server.round_number + len(open_updates(folder, state_of(folder)))
            deliver(server, [*range(ALL), *reversed(range(max(0, done - 3), ALL))])
            server.open_buffer().abort(keep=True)
            assert everything(server, range(3)) == everything(straight, range(3))


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.endurance)])
def test_clients_send_until_they_hear_a_reply(kills, tmp_path):
    """SIGKILL at any moment, also between the journal and the reply; the client then cannot know."""
    moments, straight, heard = random.Random(0), buffered(), 0
    buffered(tmp_path / "s").close()
    for _ in range(kills):
        command = [sys.executable, "-m", "tests.server.test_update_ids", str(tmp_path / "s"), str(heard)]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert child.stdout.readline() == "loaded\n"
        time.sleep(moments.uniform(0.005, 0.05))
        child.send_signal(signal.SIGKILL)
        heard = max([heard, *(int(line) + 1 for line in child.stdout.read().split())])
        child.stdout.close()
        child.wait()
    assert heard > kills
    with Server.load(tmp_path / "s") as server:
        assert 3 * server.round_number + len(server.open_buffer().clients) in (heard, heard + 1)
        deliver(server, range(max(0, heard - 3), heard + 4))
        deliver(straight, range(heard + 4))
        server.open_buffer().abort(keep=True)
        assert everything(server, range(3)) == everything(straight, range(3))


if __name__ == "__main__":
    resumed = Server.load(sys.argv[1])
    print("loaded", flush=True)
    deliver(resumed, range(max(0, int(sys.argv[2]) - 2), 10**6), lambda k: print(f"{k}\n", end="", flush=True))
