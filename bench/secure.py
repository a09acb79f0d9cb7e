"""Masked sums: the server's rate beside exact sums, the cost of unmasking, and a client beside Flower's SecAgg+.

python -m bench.secure --clients 32 --n 11700000 --dropping 3 --turns 11
"""

import argparse
import os
import statistics
import time

import numpy as np

import fedcore
from fedcore import kernels
from fedcore.kernels import ExactSum
from fedcore.secure import Encoding, SecureClient, SecureServer, client
from fedcore.secure import messages as wire
from fedcore.secure.primitives import digest_of

WEIGHT, DIFFERENT = 100, 8
"""Examples of each client; how many different updates there are, which clients share in turn."""


def encoding_of(clients, n):
    limits = dict(max_norm=1e6, max_examples=1000, max_steps=10)
    model = digest_of(np.zeros(n, np.float32))
    return Encoding(clients=clients, n=n, parameters=n, weights="examples", eta=None, model=model, **limits)


def seconds(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def phase(server, clients, absent=(), **words):
    for i, message in server.messages.items():
        if i not in absent:
            assert server.receive(i, clients[i].answer(message, **words))
    server.close_phase()


def until_masked(count, n):
    """Return a server and clients that have exchanged their shares."""
    server = SecureServer(range(count), encoding_of(count, n), group=count)
    clients = {i: SecureClient() for i in range(count)}
    phase(server, clients)
    phase(server, clients)
    return server, clients


def fold_exactly(x, ys, count):
    """Return the work of a server with exact sums: updates in batches of 8."""
    total, spare = (ExactSum.zeros(len(x)) for _ in range(2))
    ones = np.ones(len(ys))

    def work():
        for _ in range(count // len(ys)):
            kernels.accumulate(total, [x] * len(ys), ys, ones, ones * WEIGHT, out=spare)

    return work


def time_server(count, n, dropping, turns):
    """Print the server's times: the folds in turns, then the opening of a sum without and with dropped clients."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=n).astype(np.float32)
    ys = [x + np.float32(i + 1) * np.float32(1e-3) for i in range(min(DIFFERENT, count))]
    exactly, masked = fold_exactly(x, ys, count), [os.urandom(8 * (n + 2)) for _ in range(min(DIFFERENT, count))]
    exactly()
    times = {"exact": [], "masked": [], "opening": [], "opening after drops": []}
    for turn in range(turns):
        drops = set(range(dropping)) if turn % 2 else set()
        server, clients = until_masked(count, n)
        head = wire.header(wire.MASKED, server._session)
        messages = [head + words for words in masked]
        times["exact"].append(seconds(exactly))
        senders = [i for i in range(count) if i not in drops]

        def receive(server=server, senders=senders, messages=messages):
            for i in senders:
                assert server.receive(i, messages[i % len(messages)])
            server._add_held()

        times["masked"].append(seconds(receive) * count / len(senders))
        keep, client.add_masks = client.add_masks, lambda *_: None  # only the shares are needed
        words = np.zeros(n + 2, np.uint64)
        for i in senders:
            clients[i].answer(server.messages[i], words)
        client.add_masks = keep
        server.close_phase()
        for i, message in server.messages.items():
            server.receive(i, clients[i].answer(message))
        times["opening after drops" if drops else "opening"].append(seconds(server.close_phase))
    middle = {name: statistics.median(some) for name, some in times.items() if some}
    print(f"exact fold of {count} updates: {middle['exact']:.3f} s")
    print(f"masked fold: {middle['masked']:.3f} s, {middle['exact'] / middle['masked']:.2f} of the exact fold's rate")
    print(f"opening: {middle['opening']:.3f} s")
    if "opening after drops" in middle:
        print(f"opening after {dropping} clients dropped out with their shares: {middle['opening after drops']:.3f} s")


def flower_client(y, count):
    """Return what Flower's SecAgg+ mod does with an update between its training and its answer."""
    from flwr.common.secure_aggregation import ndarrays_arithmetic as arithmetic
    from flwr.common.secure_aggregation.quantization import quantize
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    def work():
        vectors = quantize(arithmetic.parameters_multiply([y], 0.1), 8.0, 1 << 22)
        vectors = arithmetic.factor_combine(1000, vectors)
        for i in range(count):
            mask = pseudo_rand_gen(os.urandom(32), 1 << 32, [(1,), y.shape])
            add = arithmetic.parameters_addition if i % 2 else arithmetic.parameters_subtraction
            vectors = add(vectors, mask)
        return arithmetic.parameters_mod(vectors, 1 << 32)

    return work


def time_client(count, n, turns):
    """Print a client's times from the end of its training to its masked answer, in turns."""
    x = np.zeros(n, np.float32)
    y = np.random.default_rng(1).normal(size=n).astype(np.float32)
    ours, flowers = [], []
    for _ in range(turns):
        server, clients = until_masked(count, n)
        work = flower_client(y, count)
        flowers.append(seconds(work))
        own, message = clients[0], server.messages[0]
        ours.append(seconds(lambda own=own, m=message: own.answer(m, own.encoding.encode(x, y, steps=1, examples=9))))
    ratio = statistics.median(flowers) / statistics.median(ours)
    print(f"client, {count} masks: {shown(ours)}; Flower's SecAgg+: {shown(flowers)}, {ratio:.1f} times as long")


def shown(times):
    return f"{statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f}, {len(times)} turns)"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("clients", 32), ("n", 11_700_000), ("dropping", 3), ("turns", 11)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"{options.clients} x {options.n / 1e6:.2f} M, {fedcore.threads()} threads, {fedcore.isa()}")
    time_server(options.clients, options.n, options.dropping, options.turns)
    time_client(options.clients, options.n, options.turns)


if __name__ == "__main__":
    main()
