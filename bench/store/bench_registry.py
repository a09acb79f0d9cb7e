"""A million clients: registering them, and finding the numbers of 1,000 of them, against a dict."""

import numpy as np
import pytest

from fedcore.clients import Registry

N, K = 1_000_000, 1_000
SPREAD = np.random.default_rng(0).permutation(N).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
IDS = {
    "an array": SPREAD,
    "a list of ints": SPREAD.tolist(),
    "a list of strs": [f"client-{number:013d}" for number in range(N)],
}


@pytest.mark.parametrize("kind", IDS)
def bench_register(versus, kind):
    ids = IDS[kind]
    rivals = {"dict": lambda: {client: number for number, client in enumerate(ids)}}
    versus(f"{N:,} clients from {kind}", lambda: Registry(ids), rivals, bytes=0)


@pytest.mark.parametrize("kind", IDS)
def bench_find(versus, kind):
    ids = IDS[kind]
    registry, plain = Registry(ids), {client: number for number, client in enumerate(ids)}
    at = iter(np.random.default_rng(1).integers(0, N, 10**6).tolist())
    # Each client is asked for once, as in a round: what is found is in no cache.
    asked = [[_copy(ids[next(at)]) for _ in range(K)] for _ in range(100)]
    sets = iter(asked), iter(asked)

    def one_by_one():
        for client in next(sets[0]):
            registry.number(client)

    def by_dict():
        for client in next(sets[1]):
            plain[client]

    versus(f"{K:,} of {N:,} clients from {kind}, one by one", one_by_one, {"dict": by_dict}, bytes=0, rounds=31)


def _copy(client):
    return "".join(list(client)) if isinstance(client, str) else int(client)
