"""A federated-learning server over HTTP: `python service.py --state state --parameters 10000000`.

Copy it and change `make_model` and `main`. One asyncio task (`Service.run`) opens and closes the rounds; requests write
to the open round. Calls of fedcore that compute or wait for the disk run in threads.
"""

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import os
import re
import secrets
import signal
from pathlib import Path

import numpy as np
import prometheus_client as prometheus
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import fedcore
from fedcore.callbacks import Prometheus
from fedcore.errors import FedcoreError, RoundError, StoreError
from fedcore.sampling import without_replacement

PIECE = 1 << 20  # bytes of one write of a broadcast
POLL = 20  # seconds that a client waits for a round before it asks again
UPLOAD = 600  # seconds that an update may take
STALL = 30  # seconds that an update may take between two pieces
NOT_ASKED = "round: it is over, or does not ask this client"


def make_model(parameters):
    """Return the initial model. Replace it by your own: an `nn.Module`, or arrays by name."""
    rng, wide = np.random.default_rng(0), parameters * 9 // 10
    return {"wide": rng.normal(0, 0.01, wide).astype(np.float32), "head": np.zeros(parameters - wide, np.float32)}


class Service:
    """The rounds of one server, and the HTTP interface to them.

    Args:
        server: a `fedcore.Server` whose method sends only x and a rate: FedAvg, FedAvgM, FedVARP, MIFA, MimiC, ...
        state: the folder of the secret from which the tokens of clients are made, and of asked and rejected clients.
        enrolment: the token that a new client shows. Give each client its own if they must not pose as each other.
        cohort: the number of clients that a round needs.
    """

    def __init__(self, server, state, enrolment, cohort):
        self.server, self.key, self.enrolment, self.cohort = server, key_of(state), enrolment, cohort
        self.registry = prometheus.CollectorRegistry()
        server.callbacks = (*server.callbacks, Prometheus("http", registry=self.registry))
        self.replies = prometheus.Counter("http_updates", "Updates by status", ["status"], registry=self.registry)
        self.uploads = prometheus.Gauge("http_uploads_open", "Updates that arrive now", registry=self.registry)
        self.round, self.sent = None, None
        self.file = Path(state, "clients.json")
        saved = json.loads(self.file.read_bytes()) if self.file.exists() else {"asked": {}, "rejected": {}}
        # The clients that each recent round asks; and of each client the last update, if its round rejected it.
        self.asked, self.rejected = {int(n): ids for n, ids in saved["asked"].items()}, saved["rejected"]
        # The clients that join with the next round; and the time limit of each client's open upload.
        self.joining, self.arriving, self.beginning = set(), {}, asyncio.Lock()
        self.arrived, self.opened, self.stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()

    # The rounds.

    async def run(self):
        """Open and close rounds until the service stops."""
        while True:
            await self.open()
            while True:
                self.arrived.clear()
                reason, wait = await asyncio.to_thread(lambda: (self.round.may_close(), self.round.wait()))
                if reason:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.arrived.wait(), wait)
            self.opened.clear()
            report = await asyncio.to_thread(self.round.finish)
            logging.info("round %d: %s, %d accepted", report.round, reason, len(report.accepted))
            for client in report.accepted:
                self.rejected.pop(client, None)
            for client, why in report.rejected:
                logging.warning("round %d: %s: %s", report.round, client, why)
                self.rejected[client] = {"round": report.round, "reason": why}
            await asyncio.to_thread(self.save, self.asked)

    def save(self, asked):
        """Keep the asked and the rejected clients over a crash."""
        write_file(self.file, json.dumps({"asked": asked, "rejected": self.rejected}))

    async def open(self):
        """Wait for enough clients, and open the next round for some of them."""
        while len(self.server.clients) + len(self.joining) < self.cohort:
            self.arrived.clear()
            await self.arrived.wait()

        def start():
            new, self.joining = self.joining, set()  # a request may have named a client while it was added
            self.server.add_clients(sorted(client for client in new if client not in self.server.clients))
            clients, number = [*self.server.clients], self.server.round_number
            count = min(len(clients), self.server.policy.asked(self.cohort))
            chosen = without_replacement(len(clients), count, seed=0, round=number)
            sent = self.server.broadcast([clients[i] for i in chosen.tolist()])
            if sent.has_offset or sent.second:
                raise FedcoreError("algorithm: it sends more than x; send Broadcast.of(client) to each client too")
            # Updates of the last max_staleness rounds may still arrive.
            asked = {n: ids for n, ids in self.asked.items() if n >= number - self.server.policy.max_staleness}
            asked[number] = sorted({*sent.ids, *asked.get(number, ())})
            self.save(asked)
            opened = self.server.open_round()  # after a crash with the updates of its journal
            return asked, sent, opened, memoryview(np.array(sent.x, "<f4")).cast("B")

        self.asked, self.sent, self.round, self.x = await asyncio.to_thread(start)
        self.opened.set()

    def fail(self, error):
        """Stop the process after a fault, such as a step that diverges or a full disk; a supervisor may restart it."""
        logging.error("the service stops", exc_info=error)
        signal.raise_signal(signal.SIGTERM)

    # The requests.

    def token_of(self, client):
        return f"{client}.{hmac.digest(self.key, client.encode(), 'sha256').hex()}"

    def client_of(self, request):
        """Return the client that the request's token names; raise 401 for a wrong token."""
        token = bearer(request)
        client = token.rpartition(".")[0]
        if not client or not hmac.compare_digest(token.encode(), self.token_of(client).encode()):
            raise HTTPException(401, "token: unknown; register first")
        return client

    async def register(self, request):
        """POST /register?client=a, with the enrolment token: return the client's own token and the layout."""
        if not hmac.compare_digest(bearer(request).encode(), self.enrolment.encode()):
            raise HTTPException(401, "token: not the enrolment token")
        client = request.query_params.get("client", "")
        if not re.fullmatch(r"[\w.-]{1,64}", client, re.ASCII):
            raise HTTPException(422, "client: must be 1 to 64 ASCII letters, digits, '_', '.' and '-'")
        self.join(client)
        layout = [{"name": piece.name, "shape": piece.shape} for piece in self.server.layout.slices]
        return JSONResponse({"token": self.token_of(client), "layout": layout})

    def join(self, client):
        if client not in self.server.clients:  # it joins with the next round
            self.joining.add(client)
            self.arrived.set()

    async def next_round(self, request):
        """GET /rounds/N/next: wait for a round from N on that asks the client; 204 if there is none for a while.

        `rejected` of the answer has the round and the reason if a round rejected the client's last update at its end.
        """
        client, end = self.client_of(request), asyncio.get_running_loop().time() + POLL
        self.join(client)  # also after a crash before the round with which it would have joined
        while asyncio.get_running_loop().time() < end and not self.stopping.is_set():
            number = self.sent.round if self.opened.is_set() else -1
            if number >= request.path_params["round"] and client in self.asked[number]:
                sent = {"round": number, "lr": float(self.sent.lr)}
                return JSONResponse(sent | {"rejected": self.rejected.get(client)})
            await asyncio.sleep(0.1)
        return Response(status_code=204)

    async def model(self, request):
        """GET /rounds/N/model: x as little-endian float32, in the order of the layout."""
        client, number = self.client_of(request), request.path_params["round"]
        if self.sent is None or number != self.sent.round or client not in self.asked[number]:
            raise HTTPException(409, NOT_ASKED)
        x = self.x
        pieces = (x[start : start + PIECE] for start in range(0, len(x), PIECE))
        return StreamingResponse(pieces, headers={"content-length": str(len(x))})

    async def update(self, request):
        """POST /rounds/N/update?steps=5&examples=30&id=a7: the client's model, in the form of GET /rounds/N/model.

        The client repeats the request with the same id until it gets a status below 500. `status` of the answer is
        "accepted", "held", "already counted" or "rejected" with a reason.
        """
        client, number, opened = self.client_of(request), request.path_params["round"], self.round
        if self.stopping.is_set() or not self.opened.is_set():
            raise self.busy()
        if client not in self.asked.get(number, ()):
            return self.answer(fedcore.Reply("rejected", NOT_ASKED))
        if client not in self.arriving and len(self.arriving) >= self.server.limits.max_open:
            raise self.busy()
        before, limit = self.arriving.get(client), asyncio.timeout(None)
        self.arriving[client] = limit
        if before and before.when() is not None and not before.expired():
            before.reschedule(0)  # a client has one upload: the last one
        try:
            with self.uploads.track_inprogress():
                async with limit:
                    pieces = in_time(request.stream(), limit)
                    reply = await self.receive(opened, client, number, request.query_params, pieces)
        except (TimeoutError, ClientDisconnect):
            reply = fedcore.Reply("rejected", "update: it did not arrive in time, or the client began another one")
        except (RoundError, ValueError, KeyError) as error:
            if not opened.is_open:  # it closed meanwhile: the update may count in the next round
                raise self.busy() from None
            reply = fedcore.Reply("rejected", str(error))
        except (FedcoreError, OSError, MemoryError) as error:  # the client is not at fault
            self.fail(error)
            raise self.busy() from None
        finally:
            if self.arriving.get(client) is limit:
                del self.arriving[client]
        self.arrived.set()
        return self.answer(reply)

    def answer(self, reply):
        self.replies.labels(reply.status).inc()
        return JSONResponse({"status": reply.status, "reason": reply.reason}, 200 if reply else 409)

    def busy(self):
        self.replies.labels("busy").inc()
        return HTTPException(503, "the service is full, between two rounds, or stops; send again", {"retry-after": "1"})

    async def receive(self, opened, client, number, claims, pieces):
        """Write the body to the round as it arrives: at most one piece of it is in memory twice."""
        try:
            how = dict(steps=int(claims["steps"]), examples=float(claims.get("examples", 1)), update_id=claims["id"])
        except (KeyError, ValueError):
            raise ValueError("update: needs steps (an integer), examples (a number) and id in its address") from None
        async with self.beginning:  # in the order of arrival, because the round keeps a client's last one
            incoming = await asyncio.to_thread(opened.begin, client, round=number, **how)
        try:
            await self.write(incoming, pieces)
            reply = await asyncio.to_thread(incoming.done)
        finally:
            incoming.abandon()
        if reply.reason.startswith("journal: "):  # the round could not write a valid update
            raise StoreError(reply.reason)
        return reply

    async def write(self, incoming, pieces):
        rest, start = b"", 0
        async for piece in pieces:
            piece = rest + piece if rest else piece
            numbers = np.frombuffer(piece, "<f4", len(piece) // 4)
            rest, stop = piece[4 * len(numbers) :], start + len(numbers)
            if not np.isfinite(numbers).all():  # the round would reject it too, but only at its end
                raise ValueError("update: expected finite numbers, got a NaN or an infinity")
            if stop > self.server.layout.n:
                raise ValueError("update: it has more numbers than the model")
            for tensor in self.server.layout.slices:
                first, last = max(start, tensor.start), min(stop, tensor.stop)
                if first < last:
                    incoming.write(tensor.name, numbers[first - start : last - start], first - tensor.start)
            start = stop
        if rest:
            raise ValueError("update: it has more bytes than its numbers of 4 bytes")

    async def health(self, request):
        """GET /health: 503 if the rounds have stopped."""
        state = {"round": self.server.round_number, "clients": len(self.server.clients), "open": self.opened.is_set()}
        return JSONResponse(state, 503 if self.running.done() or self.stopping.is_set() else 200)

    async def metrics(self, request):
        return Response(prometheus.generate_latest(self.registry), media_type=prometheus.CONTENT_TYPE_LATEST)

    def app(self):
        @contextlib.asynccontextmanager
        async def lifespan(app):
            self.running = asyncio.create_task(self.run())
            self.running.add_done_callback(lambda task: task.cancelled() or self.fail(task.exception()))
            yield
            self.running.cancel()  # the journal keeps the updates of the open round, as after a crash
            await asyncio.gather(self.running, return_exceptions=True)
            await asyncio.to_thread(self.server.close)

        routes = [
            Route("/register", self.register, methods=["POST"]),
            Route("/rounds/{round:int}/next", self.next_round),
            Route("/rounds/{round:int}/model", self.model),
            Route("/rounds/{round:int}/update", self.update, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        return Starlette(routes=routes, lifespan=lifespan)


class Uvicorn(uvicorn.Server):
    """Answer waiting clients at once when a signal asks the service to stop; uploads may end."""

    def handle_exit(self, sig, frame):
        self.config.service.stopping.set()
        super().handle_exit(sig, frame)


async def in_time(stream, limit):
    """Yield the pieces of a body. Let `limit` expire if one of them, or all together, take too long."""
    clock = asyncio.get_running_loop().time
    end = clock() + UPLOAD
    limit.reschedule(min(clock() + STALL, end))
    async for piece in stream:
        yield piece
        limit.reschedule(min(clock() + STALL, end))
    limit.reschedule(None)  # the body is whole: the round decides


def bearer(request):
    """Return the token of a request; raise 401 if it has none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise HTTPException(401, "token: missing; send the header `Authorization: Bearer TOKEN`")
    return token


def write_file(path, text):
    """Write a file that only the service's user can read, durably and as a whole or not at all."""
    part = path.with_suffix(".part")
    with open(os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def key_of(state):
    """Return the service's secret; make it at the first start, once the server has locked the folder."""
    path = Path(state, "key")
    if not path.exists():
        write_file(path, secrets.token_hex(32))
    if not re.fullmatch("[0-9a-f]{64}", text := path.read_text()):
        raise ValueError(f"{path}: is no key of 32 bytes; restore it, or delete it: then all clients register again")
    return bytes.fromhex(text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, default=Path("state"), help="folder of the server and its secret")
    parser.add_argument("--parameters", type=int, default=10_000_000, help="size of the example's model")
    parser.add_argument("--cohort", type=int, default=10, help="clients that a round needs")
    parser.add_argument("--deadline", type=float, default=600, help="seconds of a round")
    parser.add_argument("--uploads", type=int, default=64, help="updates that may arrive at a time")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), default=(None, None))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    half = max(options.cohort // 2, 1)
    try:
        if len(enrolment := os.environ.get("ENROLMENT_TOKEN", "")) < 16:
            raise ValueError("ENROLMENT_TOKEN: must have at least 16 characters; make one with `openssl rand -hex 16`")
        storage = fedcore.Storage(options.state / "server", journal=True)  # an answered update survives kill -9
        policy = fedcore.RoundPolicy(half, 0.8, options.deadline, options.deadline / 20, 1.2, max_staleness=1)
        limits = fedcore.Limits(max_steps=10_000, max_examples=10**6, max_open=options.uploads)
        model = make_model(options.parameters)
        server = fedcore.Server.open(storage, model, "FedAvg", [], lr=0.1, policy=policy, limits=limits)
        service = Service(server, options.state, enrolment, options.cohort)
    except (FedcoreError, ValueError, OSError) as error:
        parser.exit(1, f"error: {error}\n")
    tls = dict(zip(("ssl_certfile", "ssl_keyfile"), options.tls, strict=True))
    how = {"host": options.host, "port": options.port, "access_log": False, "timeout_graceful_shutdown": 60}
    config = uvicorn.Config(service.app(), **how, **tls)
    config.service = service
    Uvicorn(config).run()


if __name__ == "__main__":
    main()
