"""The HTTP service: the federation's average, what a client hears, full, late, twice, stalled, killed, stopped."""

import contextlib
import http.client
import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedcore
from tests.kit import in_threads

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
FOLDER = Path(__file__).parents[2] / "examples" / "http_service"
N, WELCOME = 1000, "welcome to the rounds"


def module(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


Client = module("client").Client


class Service:
    """A process of the service, which may be killed and started again."""

    def __init__(self, state, *, stall=60, **options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = {"state": state, "port": self.port, "parameters": N, "cohort": 2} | options
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        code = f"import service; service.STALL = {stall}; service.main()"
        self.command = [sys.executable, "-c", code, *words]
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command, cwd=FOLDER, env=os.environ | {"ENROLMENT_TOKEN": WELCOME})
        assert Client("127.0.0.1", self.port).ask("GET", "/health", [200])

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.process.wait()

    def client(self, name):
        return Client("127.0.0.1", self.port).register(name, WELCOME)

    def upload(self, client, number, update_id, body, length=4 * N):
        """Return the connection of an upload of which only some bytes are sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.putrequest("POST", f"/rounds/{number}/update?steps=1&examples=10{update_id and f'&id={update_id}'}")
        connection.putheader("authorization", f"Bearer {client.token}")
        connection.putheader("content-length", str(length))
        connection.endheaders(body)
        return connection

    def metrics(self):
        lines = Client("127.0.0.1", self.port).ask("GET", "/metrics", [200])[1].decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


@pytest.fixture
def service(tmp_path):
    with contextlib.ExitStack() as opened:

        def start(**options):
            found = Service(tmp_path / "state", **options)
            found.opened = lambda connection: opened.enter_context(contextlib.closing(connection))
            opened.callback(lambda: found.process.poll() is None and found.stop(signal.SIGKILL))
            return found

        yield start


def sent(client, number, value, **options):
    return client.send(number, np.full(N, value, "<f4"), **{"steps": 1, "examples": 10} | options)


def test_rounds_are_those_of_the_server_alone(service, tmp_path):
    running, rounds = service(cohort=4), 3
    answers = []

    def work(number):
        def train(x, lr):
            return x + number, 1, 10 * (number + 1)

        client = running.client(f"c{number}")
        client.send = lambda *a, send=client.send, **k: answers.append(send(*a, **k)) or answers[-1]
        client.run(train, rounds)

    in_threads(work, range(4))
    found, x = running.client("c0").next_round(rounds)  # the last round is finished
    assert found["round"] == rounds
    assert {answer["status"] for answer in answers} <= {"accepted", "held"}
    assert len(answers) == 4 * rounds
    alone = fedcore.Server(module("service").make_model(N), "FedAvg", clients=4, lr=0.1)
    for _ in range(rounds):
        alone.round([fedcore.Update(k, alone.x + np.float32(k), 1, examples=10 * (k + 1)) for k in range(4)])
    np.testing.assert_allclose(x, alone.x, rtol=1e-6, atol=1e-6)
    shown = running.metrics()
    assert shown['fedcore_rounds_total{server="http"}'] == rounds
    assert shown['http_updates_total{status="held"}'] + shown.get('http_updates_total{status="accepted"}', 0) == 12
    assert running.stop() in (0, -signal.SIGTERM)  # uvicorn raises the signal again at its end
    with fedcore.Server.load(tmp_path / "state" / "server") as saved:
        assert [*saved.clients] == ["c0", "c1", "c2", "c3"]
        np.testing.assert_array_equal(saved.x, x)


def test_what_a_client_hears(service):
    running = service()
    one, other = running.client("one"), running.client("other")
    with pytest.raises(PermissionError, match="token"):
        Client("127.0.0.1", running.port).register("third", "wrong")
    with pytest.raises(PermissionError, match="token"):
        Client("127.0.0.1", running.port, one.token.replace("one", "other")).next_round()
    with pytest.raises(PermissionError, match="token"):
        sent(Client("127.0.0.1", running.port, "one.00"), 0, 1)
    for name in ("", "a" * 65, "%E6%9D%B1", "a/b", "a%0A", "a&x"):
        with pytest.raises(PermissionError, match=r"^422"):
            running.client(name)
    plain = running.opened(http.client.HTTPConnection("127.0.0.1", running.port))
    plain.request("POST", "/register?client=third", headers={"authorization": WELCOME})
    assert plain.getresponse().status == 401
    assert one.next_round()[0]["round"] == 0
    for update_id, more, reason in (("", b"", "id"), ("more", b"xyz", "more bytes")):
        body = bytes(4 * N) + more
        answer = running.opened(running.upload(one, 0, update_id, body, len(body))).getresponse()
        assert answer.status == 409
        assert reason in json.loads(answer.read())["reason"].split(": ", 1)[1]
    assert "more numbers" in one.send(0, np.ones(N + 1), steps=1, examples=1)["reason"]
    assert "parts are missing" in one.send(0, np.ones(N - 1), steps=1, examples=1)["reason"]
    for wrong in ({"steps": 0}, {"examples": -1}, {"steps": "many"}):
        assert sent(one, 0, 1, **wrong)["status"] == "rejected"
    before = running.metrics()['http_updates_total{status="rejected"}']
    assert "finite" in sent(one, 0, np.nan)["reason"]
    assert running.metrics()['http_updates_total{status="rejected"}'] == before + 1
    assert sent(one, 0, 2, update_id="a")["status"] == "held"
    assert sent(one, 0, 2, update_id="a")["status"] == "already counted"
    assert sent(one, 0, 2, update_id="b")["status"] == "rejected"  # a second one in a round
    assert sent(running.client("stranger"), 0, 1)["status"] == "rejected"  # it joins with the next round
    assert sent(other, 0, 4)["status"] == "held"
    found, x = one.next_round(1)
    assert found["round"] == 1
    np.testing.assert_allclose(x, 3, rtol=1e-6)
    assert sent(one, 0, 2, update_id="a")["status"] == "already counted"  # it heard no answer
    assert "round" in sent(one, 3, 5)["reason"]
    asked = {one: 1e30, other: 4, running.client("stranger"): 4}  # finite, but too long
    assert {sent(client, 1, value)["status"] for client, value in asked.items()} == {"held"}
    for _ in range(2):
        heard = [client.next_round(2)[0]["rejected"] for client in (one, other)]
        assert (heard[0]["round"], "norm" in heard[0]["reason"], heard[1]) == (1, True, None)
        running.stop(signal.SIGKILL)
        running.start()


def test_a_killed_service_keeps_the_updates_that_it_answered(service):
    running = service()
    one, other = running.client("one"), running.client("other")
    assert one.next_round()[0]["round"] == 0
    assert sent(one, 0, 1, update_id="a")["status"] == "held"
    running.stop(signal.SIGKILL)
    running.start()
    assert sent(one, 0, 1, update_id="a")["status"] == "already counted"
    assert sent(other, 0, 3)["status"] == "held"
    np.testing.assert_allclose(other.next_round(1)[1], 2, rtol=1e-6)


def test_full_and_a_stop_during_an_upload(service):
    running = service(uploads=1)
    one, other = running.client("one"), running.client("other")
    assert other.next_round()[0]["round"] == 0
    slow = running.opened(running.upload(other, 0, "slow", bytes(2 * N)))
    while not running.metrics()["http_uploads_open"]:
        pass
    one.patience = 0
    with pytest.raises(TimeoutError, match="503"):
        sent(one, 0, 1)
    running.process.send_signal(signal.SIGTERM)
    slow.send(bytes(2 * N))
    assert json.loads(slow.getresponse().read())["status"] == "held"
    assert running.process.wait() in (0, -signal.SIGTERM)
    running.start()
    one.patience = 60
    assert sent(one, 0, 2)["status"] == "held"
    np.testing.assert_allclose(one.next_round(1)[1], 1, rtol=1e-6)


def test_a_round_ends_at_its_deadline(service):
    running = service(deadline=1, cohort=3)
    one, two, _ = [running.client(name) for name in ("one", "two", "three")]
    assert one.next_round()[0]["round"] == 0
    assert sent(one, 0, 7)["status"] == "held"
    np.testing.assert_allclose(one.next_round(1)[1], 7, rtol=1e-6)
    assert sent(two, 0, 7, update_id="late")["status"] == "held"  # it counts in round 1
    assert one.next_round(2)[0]["round"] == 2
    assert sent(two, 0, 7, update_id="later")["status"] == "rejected"


def test_only_the_asked_clients_count(service):
    running = service(deadline=3)
    clients = [running.client("a")]
    clients[0].ask("GET", "/rounds/0/model", [409])  # before the first round

    def wait_for(number):
        shown = {"round": -1}
        while shown["round"] < number or not shown["open"]:
            shown = json.loads(clients[0].ask("GET", "/health", [200])[1])
        return [one for one in clients if one.ask("GET", f"/rounds/{number}/model", [200, 409])[0] == 200]

    clients.append(running.client("b"))
    assert wait_for(0) == clients
    clients += [running.client(name) for name in "cdefgh"]
    for one in clients[:2]:
        assert sent(one, 0, 1)["status"] == "held"
    asked = wait_for(1)
    others = [one for one in clients if one not in asked]
    assert len(asked) == 3
    assert all(sent(one, 1, 1e6)["status"] == "rejected" for one in others)
    assert sent(asked[0], 1, 1)["status"] == "held"
    wait_for(2)
    running.stop(signal.SIGKILL)
    running.start()
    wait_for(2)
    assert all(sent(one, 1, 1e6)["status"] == "rejected" for one in others)
    assert sent(asked[1], 1, 1)["status"] == "held"  # it is late, and was asked before the crash
    x = wait_for(3)[0].next_round(3)[1]
    np.testing.assert_allclose(x, 1, rtol=1e-6)


def test_stalled_uploads_of_a_client_keep_no_one_out(service):
    running = service(uploads=1, stall=2)
    one, other = running.client("one"), running.client("other")
    assert one.next_round()[0]["round"] == 0
    stalled = []
    for number in range(2):
        stalled.append(running.opened(running.upload(one, 0, str(number), bytes(N))))
        rejected = 'http_updates_total{status="rejected"}'  # on a slow machine an upload may have stalled already
        while (seen := running.metrics())["http_uploads_open"] + seen.get(rejected, 0) <= number:
            pass
    assert stalled[0].getresponse().status == 409  # the second one took its place
    assert sent(other, 0, 1)["status"] == "held"  # the second one has stalled for too long
    assert stalled[1].getresponse().status == 409
    assert sent(one, 0, 3)["status"] == "held"
    np.testing.assert_allclose(one.next_round(1)[1], 2, rtol=1e-6)


def test_a_full_disk_ends_the_service_and_loses_no_update(service):
    running = service()
    one, other = running.client("one"), running.client("other")
    assert one.next_round()[0]["round"] == 0
    assert sent(one, 0, 1)["status"] == "held"
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (0, 0))
    answer = running.opened(running.upload(other, 0, "a", bytes(4 * N))).getresponse()
    assert answer.status == 503
    assert b"server" not in answer.read()  # the path of the folder
    running.process.wait(60)
    running.start()
    assert sent(other, 0, 3, update_id="a")["status"] == "held"
    np.testing.assert_allclose(one.next_round(1)[1], 2, rtol=1e-6)


def test_a_service_without_secrets_does_not_start(tmp_path):
    code = "import resource, service; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); service.key_of({!r})"
    full = subprocess.run([sys.executable, "-c", code.format(str(tmp_path))], cwd=FOLDER, capture_output=True)
    assert b"OSError" in full.stderr
    key_of = module("service").key_of
    key = key_of(tmp_path)
    assert len(key) == 32
    assert key_of(tmp_path) == key
    assert (tmp_path / "key").stat().st_mode & 0o77 == 0
    for content in ("", "ab", "ab" * 31, "x" * 64):
        (tmp_path / "key").write_text(content)
        with pytest.raises(ValueError, match="32 bytes"):
            key_of(tmp_path)
    new = tmp_path / "new"

    def refused(token, *words):
        environment = {name: value for name, value in os.environ.items() if name != "ENROLMENT_TOKEN"} | token
        command = [sys.executable, FOLDER / "service.py", "--state", new, "--port", "0", *words]
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=60)
        assert ended.returncode
        return ended.stderr

    for token in ({}, {"ENROLMENT_TOKEN": ""}, {"ENROLMENT_TOKEN": "15 characters.."}):
        assert b"16 characters" in refused(token, "--parameters", "9")
    for words in (("--deadline", "-1"), ("--uploads", "0")):
        assert b"Traceback" not in refused({"ENROLMENT_TOKEN": WELCOME}, *words)
    assert not new.exists()
    fedcore.Server.open(fedcore.Storage(new / "server", journal=True), np.zeros(9, "f4"), "FedAvg", [], lr=0.1).close()
    message = refused({"ENROLMENT_TOKEN": WELCOME}, "--parameters", "10")
    assert (message.count(b"\n"), b"Traceback" in message) == (1, False)
