"""A client of the service, with the standard library and NumPy alone."""

import json
import logging
import time
import uuid
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlencode

import numpy as np

PIECE = 1 << 20


class Client:
    """One client: `Client(host, port).register(name, enrolment)`, then `run(train)`.

    For TLS use `HTTPSConnection` with your own `ssl` context in place of `HTTPConnection`.
    """

    def __init__(self, host, port, token=None, patience=120):
        self.address, self.token, self.patience = (host, port), token, patience

    def ask(self, method, path, expected, body=None, token=None, **headers):
        """Send a request, and again while the service is full, restarts or does not answer; return (status, body).

        Raise PermissionError for a status that is not expected.
        """
        headers["authorization"] = f"Bearer {token or self.token}"
        end = time.monotonic() + self.patience
        while True:
            status = 503  # as if the service were full, if it does not answer
            with suppress(OSError, HTTPException), closing(HTTPConnection(*self.address, timeout=60)) as connection:
                connection.request(method, path, body and body(), headers, encode_chunked=True)
                with connection.getresponse() as answer:
                    status, found = answer.status, answer.read()
            if status in expected:
                return status, found
            if status < 500:
                raise PermissionError(f"{status}: {found.decode()}")
            if time.monotonic() > end:
                raise TimeoutError(f"{method} {path}: no answer for {self.patience} seconds ({status})")
            time.sleep(0.2)

    def register(self, name, enrolment):
        _, answer = self.ask("POST", "/register?" + urlencode({"client": name}), [200], token=enrolment)
        self.token = json.loads(answer)["token"]  # keep it: it stays valid when the service starts again
        return self

    def next_round(self, first=0):
        """Wait for a round that asks this client; return it with its x, float32[n]."""
        while True:
            status, answer = self.ask("GET", f"/rounds/{first}/next", [200, 204])
            if status == 200:
                found = json.loads(answer)
                status, x = self.ask("GET", f"/rounds/{found['round']}/model", [200, 409])
                if status == 200:
                    return found, np.frombuffer(x, "<f4")

    def send(self, number, y, *, steps, examples, update_id=None):
        """Send the trained model of a round in pieces; return the answer. A repeated update counts once."""
        memory = memoryview(np.ascontiguousarray(y, "<f4")).cast("B")
        query = urlencode({"steps": steps, "examples": examples, "id": update_id or uuid.uuid4()})
        path = f"/rounds/{number}/update?{query}"
        pieces = lambda: (memory[start : start + PIECE] for start in range(0, len(memory), PIECE))  # noqa: E731
        return json.loads(self.ask("POST", path, [200, 409], pieces, **{"transfer-encoding": "chunked"})[1])

    def run(self, train, rounds):
        """Take part in some rounds; `train(x, lr)` returns (y, steps, examples)."""
        first = 0
        for _ in range(rounds):
            found, x = self.next_round(first)
            if (rejected := found["rejected"]) and rejected["round"] >= first - 1:
                logging.warning("round %d: the update did not count: %s", rejected["round"], rejected["reason"])
            y, steps, examples = train(x, found["lr"])
            answer = self.send(found["round"], y, steps=steps, examples=examples)
            if answer["status"] == "rejected":
                logging.warning("round %d: the update does not count: %s", found["round"], answer["reason"])
            first = found["round"] + 1
