"""A placement whose shards are processes, forked from this one, which can be killed at any call into the system."""

import os
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import wait

from fedcore.cluster.placement import Lost
from fedcore.cluster.shard import Shard


def serve(info, pipe, others, begin, prepare):
    """A shard's process: it runs calls until the pipe is closed."""
    begin()
    for other in others:
        other.close()  # otherwise the coordinator's death would not close the pipe
    shard = Shard(info)
    while True:
        try:
            name, *arguments = pipe.recv()
            if name == "arm":
                prepare(info.shard)
                continue
            (shard.begin if name == "begin" else shard.thread.answer)(*arguments)
            pipe.send(shard.thread.wait())
        except (EOFError, ConnectionError):
            os._exit(0)


class Processes:
    """The placement.

    Args:
        begin: called first in each shard's process.
        prepare: called with the number of each shard, in its process, once ``arm`` is called.
        notify: called before every message to a shard.
    """

    copies, has_references = True, False

    def __init__(self, prepare=None, notify=lambda: None, begin=lambda: None):
        self._begin, self._prepare, self._notify, self._shards = begin, prepare, notify, []
        self.waiting = set()

    def make(self, shards):
        self.drop()
        context = get_context("fork")
        for info in shards:
            own, its = context.Pipe()
            others = [pipe for _, pipe in self._shards] + [own]
            process = context.Process(target=serve, args=(info, its, others, self._begin, self._prepare), daemon=True)
            process.start()
            its.close()
            self._shards.append((process, own))

    def arm(self):
        for _, pipe in self._shards:
            pipe.send(("arm",))

    def begin(self, name, arguments):
        for k, own in enumerate(arguments):
            self._send(k, "begin", name, *own)

    def answer(self, answers):
        for k, value in answers.items():
            self._send(k, "answer", value)

    def wait(self, seconds):
        pipes = {self._shards[k][1]: k for k in self.waiting}
        found = {k: self._receive(k) for pipe in wait(list(pipes), seconds) for k in [pipes[pipe]]}
        self.waiting -= found.keys()
        return found

    def put(self, vector):
        return vector.copy()

    def drop(self):
        for process, pipe in self._shards:
            process.kill()
            process.join()
            pipe.close()
        self._shards = []
        self.waiting.clear()

    def _send(self, k, *message):
        self.waiting.add(k)
        self._notify()
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, which the next wait finds
            self._shards[k][1].send(message)

    def _receive(self, k):
        try:
            return self._shards[k][1].recv()
        except (EOFError, ConnectionResetError) as error:
            return Lost(error)
