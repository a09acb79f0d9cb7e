"""Lets each call into the system that a server makes fail in turn, and looks at memory and folder after each.

Run it as ``python -m tests.store.calls.every_call FOLDER METHOD MEDIUM ERROR STRIDE`` with the library of
``failing_calls.c`` preloaded; it prints, as JSON, how many calls of each operation failed, and what was wrong then.
"""

import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedcore import ClientStore, Server, Storage, Update, algorithms, errors
from tests.kit import place, with_history
from tests.server.invariant import contradictions
from tests.server.stopping import immutable_copy
from tests.store.calls.failing import Calls

METHODS = {"MIFA": algorithms.MIFA(wait=False), "MimiC": "MimiC", "SCAFFOLD": "SCAFFOLD"}
N, CLIENTS = 3000, 4


def a_server(method, store):
    return Server(np.zeros(N, np.float32), with_history(METHODS[method], 3), CLIENTS, lr=0.1, storage=place(store))


def a_round(server, number):
    clients = sorted(server.clients, key=str)[: 2 + number % 3]
    server.round([Update(c, server.x + np.float32(1 + number + i), 1) for i, c in enumerate(clients)])


def an_arrival(server, number):
    server.add_clients(f"client {number}")


def a_departure(server, number):
    server.remove_client(sorted(server.clients, key=str)[number % len(server.clients)])


def a_replacement(server, number):
    server.replace_x(server.x + np.float32(number))


def a_compaction(server, number):
    server.compact()


CHANGES = [a_round, an_arrival, a_departure, a_replacement, a_compaction]


class Trial:
    """A server, and a reference in memory of which no call fails."""

    def __init__(self, folder, method, medium, error):
        self.folder, self.method, self.error = folder, method, error
        self.path, self.copy = folder / "run", folder / "copy"
        self.calls, self.number, self.wrong = Calls(folder), 0, []
        self.server = a_server(method, f"mmap:{self.path}" if medium == "mmap" else "ram")
        self.twin = a_server(method, "ram")
        self.doing = "begins"
        for _ in range(3):
            self.change(a_round)

    def change(self, operation):
        """Both change; no call fails."""
        self.number += 1
        for server in (self.server, self.twin):
            operation(server, self.number)

    def expect(self, holds, what):
        if not holds:
            self.wrong.append(f"{self.doing}: {what}")
            sys.stderr.write(f"{self.wrong[-1]}\n")
            sys.stderr.flush()

    def attempt(self, act):
        """Whether it was done. Errors are those of fedcore."""
        try:
            act()
        except errors.FedcoreError as error:
            self.doing += f" ({type(error).__name__}: {str(error)[-150:]})"
            self.expect(str(self.folder) in str(error), "expected a message with the path")
            return False
        except Exception as error:
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            self.expect(False, f"expected an error of fedcore's, got {type(error).__name__}: {error}\n{where}")
            return False
        return True

    def each(self, name, act, check, stride):
        """Let every call of an operation fail in turn, and none at last; how many did."""
        at, tried = 1 + hash_of(name) % stride, 0
        while True:
            self.number += 1
            self.doing = f"{name}, call {at}"
            with self.calls.failing(at, self.error) as failed:
                done = self.attempt(act)
            self.doing += f", {failed[0] if failed else 'none'} failed"
            self.expect(failed or done, "expected it to be done")
            try:
                check(done)
            except Exception:
                self.expect(False, traceback.format_exc())
                if name != "a look at copy":
                    raise
                return tried
            if not failed:
                return tried
            at, tried = at + stride, tried + 1

    def reopen(self):
        """Open the server again, as some errors demand."""
        with suppress(errors.FedcoreError):
            self.server.close()
        self.server = Server.load(self.path)

    def check_server(self, done, operation=None):
        """Memory and folder are both as before an operation, or both as after it; and the server goes on."""
        if self.server._backend.store._session.broken is not None:
            self.expect(not done, f"expected an error, since {self.server._backend.store._session.broken}")
            self.reopen()
        if operation is not None and (done or immutable_copy(self.server) != immutable_copy(self.twin)):
            operation(self.twin, self.number)
        self.expect(
            immutable_copy(self.server) == immutable_copy(self.twin),
            "expected all as before or all as after, got neither",
        )
        found = contradictions(self.server) + self.server.store.verify()
        self.expect(not found, str(found))
        if self.server.store.medium == "mmap":
            left = Server.load(self.path, storage=Storage(medium="ram"))
            self.expect(immutable_copy(left) == immutable_copy(self.twin), "expected the folder as memory is")
        self.change(a_round)
        while len(self.twin.clients) > CLIENTS + 1:
            self.change(a_departure)
        while len(self.twin.clients) < CLIENTS:
            self.change(an_arrival)
        self.expect(
            immutable_copy(self.server) == immutable_copy(self.twin), "expected it to go on as if nothing had happened"
        )

    def each_change(self, operation, stride):
        return self.each(
            operation.__name__,
            lambda: operation(self.server, self.number),
            lambda done: self.check_server(done, operation),
            stride,
        )

    def each_save(self, stride):
        """Save over an older copy: one of the two exists afterwards."""
        self.server.save(self.copy)
        kept = immutable_copy(self.twin)

        def check(done):
            nonlocal kept
            now = immutable_copy(Server.load(self.copy, storage=Storage(medium="ram")))
            self.expect(
                now == immutable_copy(self.twin) or (not done and now == kept), "expected the older copy or the new"
            )
            self.expect(not done or os.listdir(self.folder).count("copy") == 1, "expected a copy")
            self.check_server(done)
            self.server.save(self.copy)
            kept = immutable_copy(self.twin)
            left = sorted(entry for entry in os.listdir(self.folder) if entry.startswith("copy"))
            self.expect(left == ["copy"], f"expected no drafts after the next save, got {left}")
            self.change(a_round)

        return self.each("a save", lambda: self.server.save(self.copy), check, stride)

    def each_making(self, stride):
        """Make a folder for a new server: it exists, or can be made again."""
        path = self.folder / "new"

        def make():
            a_server(self.method, f"mmap:{path}").close()

        def check(done):
            if not done and not path.exists():
                make()
            with ClientStore.open(path) as store:
                self.expect(store.verify() == [] and len(store.registry) == CLIENTS, "expected a new store")
            removed(path)

        return self.each("making", make, check, stride)

    def each_opening(self, stride):
        """Open the folder of a dead server: it has its content."""
        path = self.folder / "left"

        def put():
            removed(path)
            # Holes stay holes.
            subprocess.run(["cp", "-r", "--sparse=always", self.path, path], check=True)

        def check(done):
            with Server.load(path) as server:
                self.expect(immutable_copy(server) == immutable_copy(self.twin), "expected the acknowledged round")
                self.expect(server.store.verify() == [], "expected a whole store")
                a_round(server, self.number)
                self.expect(contradictions(server) == [], str(contradictions(server)))
            put()

        self.reopen()  # with a short log: each of its pages is a call
        self.change(a_round)
        put()
        return self.each("opening", lambda: Server.load(path).close(), check, stride)

    def each_end(self, stride):
        """A close that fails is tried again, or not, and the folder has the last round."""

        def check(done):
            if not done:
                self.attempt(self.server.close)
            self.server = Server.load(self.path)
            self.check_server(False)

        return self.each("close", self.server_closes, check, stride)

    def server_closes(self):
        self.server.close()

    def each_look(self, path, stride):
        """Without writing, and loading into memory."""

        def look():
            with ClientStore.open(path, readonly=True) as reader:
                reader.verify()
                reader.refresh()
            Server.load(path, storage=Storage(medium="ram"))

        def check(done):
            self.expect(Server.load(path, storage=Storage(medium="ram")).round_number > 0, "expected a server")

        return self.each(f"a look at {path.name}", look, check, stride)


def hash_of(name):
    """A number that does not change from run to run."""
    return sum(name.encode())


def removed(path):
    subprocess.run(["rm", "-rf", path], check=True)


def main(folder, method, medium, error, stride):
    trial, tried = Trial(folder, method, medium, error), Counter()
    for operation in CHANGES:
        tried[operation.__name__] = trial.each_change(operation, stride)
    tried["save"] = trial.each_save(stride)
    tried["look at a copy"] = trial.each_look(trial.copy, stride)
    if medium == "mmap":
        tried["making"] = trial.each_making(stride)
        tried["opening"] = trial.each_opening(stride)
        tried["look"] = trial.each_look(trial.path, stride)
        tried["close"] = trial.each_end(stride)
    before = len(os.listdir("/proc/self/fd"))
    trial.server.close()
    trial.expect(len(os.listdir("/proc/self/fd")) <= before, "expected no more open files")
    sys.stdout.write(json.dumps({"tried": tried, "wrong": trial.wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5]))
