"""The HTTP service: the federation's average, what a client hears, full, late, twice, killed, stopped."""

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import fedcore

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
FOLDER = Path(__file__).parents[2] / "examples" / "http_service"
N = 1000


def module(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


Client = module("client").Client


class Service:
    """A process of the service, which may be killed and started again."""

    def __init__(self, state, **options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = {"state": state, "port": self.port, "parameters": N, "cohort": 2} | options
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        self.command = [sys.executable, FOLDER / "service.py", *words]
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command, env=os.environ | {"ENROLMENT_TOKEN": "welcome"})
        assert Client("127.0.0.1", self.port).ask("GET", "/health")[0] == 200

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.process.wait()

    def client(self, name):
        return Client("127.0.0.1", self.port).register(name, "welcome")

    def metrics(self):
        lines = Client("127.0.0.1", self.port).ask("GET", "/metrics")[1].decode().splitlines()
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
        client.send = lambda *a, send=client.send, **k: answers.append(send(*a, **k))
        client.run(train, rounds)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
    assert one.ask("POST", "/register", "[]", token="welcome")[0] == 422
    assert one.next_round()[0]["round"] == 0
    assert "more numbers" in one.send(0, np.ones(N + 1), steps=1, examples=1)["reason"]
    assert "parts are missing" in one.send(0, np.ones(N - 1), steps=1, examples=1)["reason"]
    for wrong in ({"steps": 0}, {"examples": -1}, {"steps": "many"}):
        assert sent(one, 0, 1, **wrong)["status"] == "rejected"
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
    slow = running.opened(http.client.HTTPConnection("127.0.0.1", running.port))
    slow.putrequest("POST", "/rounds/0/update?steps=1&examples=10&id=slow")
    slow.putheader("authorization", f"Bearer {other.token}")
    slow.putheader("content-length", str(4 * N))
    slow.endheaders(bytes(2 * N))
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
