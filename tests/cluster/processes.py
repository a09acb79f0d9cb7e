"""A placement whose shards are processes, forked from this one, which can be killed at any call into the system."""

import os
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import wait

from fedcore.cluster.placement import Lost
from fedcore.cluster.shard import Shard


def serve(info, pipe, others, begin, prepare):
    """A shard's process: it does as it is told until nobody tells it anything."""
    begin()
    for other in others:
        other.close()  # else the coordinator's death is heard by nobody
    shard = Shard(info)
    while True:
        try:
            said, *arguments = pipe.recv()
            if said == "arm":
                prepare(info.shard)
                continue
            getattr(shard, said)(*arguments)
            pipe.send(shard.wait())
        except (EOFError, ConnectionError):
            os._exit(0)


class Processes:
    """The placement.

    Args:
        begin: is called in each shard's process before anything else.
        prepare: is given the number of each shard, in its process, once ``arm`` is called.
        hear: is told of every message to a shard.
    """

    copies, has_references = True, False

    def __init__(self, prepare=None, hear=lambda: None, begin=lambda: None):
        self._begin, self._prepare, self._hear, self._shards = begin, prepare, hear, []
        self.waiting = set()

    def make(self, shards):
        self.drop()
        context = get_context("fork")
        for info in shards:
            here, there = context.Pipe()
            others = [pipe for _, pipe in self._shards] + [here]
            process = context.Process(target=serve, args=(info, there, others, self._begin, self._prepare), daemon=True)
            process.start()
            there.close()
            self._shards.append((process, here))

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
        found = {k: self._heard(k) for pipe in wait(list(pipes), seconds) for k in [pipes[pipe]]}
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
        self._hear()
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, as is heard next
            self._shards[k][1].send(message)

    def _heard(self, k):
        try:
            return self._shards[k][1].recv()
        except (EOFError, ConnectionResetError) as error:
            return Lost(error)
